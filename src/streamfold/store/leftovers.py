"""Decides when files that no row names may be deleted.

Files beside the database (`chunk_files.py`, `snapshots.py`) are written before the rows that name
them, so a failed commit leaves a file without a row. But damage that loses rows, or a database
restored from an older backup, also leaves such files, and then they may be the only copy of
acknowledged records. Neither storage nor the file's age tells these cases apart. So the store
records when it first found a file without a row, and deletes it after a grace period of days. Until
then, an operator can notice, stop the server and restore the rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import Final

from streamfold.store import keys, rows
from streamfold.store.engine.engine import Engine, Op
from streamfold.store.rows import LeftoversRow
from streamfold.wording import noun

logger = logging.getLogger(__name__)

_DAY: Final = 86_400.0
#: Maximum number of files of one kind recorded at once, which bounds the row. Further files are
#: recorded after these are deleted, and are kept until then.
LEFTOVERS_MAX: Final = 10_000


class Leftovers:
    """The files of one kind that no row names."""

    def __init__(
        self,
        kind: str,
        engine: Engine,
        write: Callable[[list[Op]], Awaitable[None]],
        grace: float,
        now: Callable[[], int],
    ) -> None:
        self._kind = kind
        self._key = keys.leftovers(kind)
        self._engine = engine
        self._write = write
        #: Seconds.
        self._grace = grace
        self._now = now
        #: When to search again, in ms since the Unix epoch: immediately, until one search succeeds.
        self.due_at: float = 0

    async def overdue(self, names: Iterable[str]) -> set[str]:
        """Return the files among `names` that may be deleted. Record when the others were found.

        All of `names` must be files without a row. Reads at most `LEFTOVERS_MAX` + 1 names.
        """
        first = list(islice(names, LEFTOVERS_MAX + 1))
        value, now = await self._engine.get(self._key), self._now()
        noted = rows.decode(value, LeftoversRow).since if value else {}
        since = {name: min(noted.get(name, now), now) for name in first[:LEFTOVERS_MAX]}
        if since != noted:
            row = rows.encode(LeftoversRow(since)) if since else None
            await self._write([(self._key, row)])
        grace = self._grace * 1000
        waiting = [at for at in since.values() if now < at + grace]
        self.due_at = min(waiting, default=math.inf) + grace
        if waiting:
            logger.info(
                "no row names %d %s %s: kept until %.1f days after they were found",
                len(waiting),
                self._kind,
                noun(len(waiting), "file"),
                self._grace / _DAY,
            )
        if deleted := [name for name, at in since.items() if now >= at + grace]:
            logger.info("deleting %d %s files that no row names", len(deleted), self._kind)
            if len(first) > LEFTOVERS_MAX:
                self.due_at = now
        return set(deleted)
