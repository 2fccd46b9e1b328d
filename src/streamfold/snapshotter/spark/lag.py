"""Reports how far queries are behind, as Spark says after every batch."""

# mypy: disallow-subclassing-any=False
# The base class is Spark's, which the checker does not follow.

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryListener


class LagListener(StreamingQueryListener):
    """Reports the lag to each table by the name of its query; called in one thread of Spark's."""

    def __init__(self, tables: Mapping[str, Callable[[int], None]]) -> None:
        self._tables = dict(tables)
        self._names: dict[str, str] = {}

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        self._names[str(event.runId)] = event.name or ""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's name
        tell = self._tables.get(event.progress.name or "")
        if tell is None or not event.progress.sources:
            return
        source = event.progress.sources[0]
        tell(lag_of(source.endOffset, source.latestOffset))

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802 - Spark's name
        tell = self._tables.get(self._names.get(str(event.runId), ""))
        if tell is not None:
            tell(0)

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's name
        self._names.pop(str(event.runId), None)


def lag_of(end: str | None, latest: str | None) -> int:
    """Return the records between two offsets of a source; 0 while one of them is unknown."""
    if not end or not latest:
        return 0
    ends, tails = json.loads(end), json.loads(latest)
    if not isinstance(ends, dict) or not isinstance(tails, dict):
        return 0
    return sum(max(0, tail - ends.get(stream, tail)) for stream, tail in tails.items())
