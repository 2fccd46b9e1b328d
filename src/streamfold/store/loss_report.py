"""Says what an operator gives up who has damaged log files dropped."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import aclosing, suppress

from streamfold.errors import StorageError
from streamfold.store import keys, rows
from streamfold.store.engine.engine import Engine, Op, readable_pages
from streamfold.store.log import chunks
from streamfold.store.rows import StreamRow

logger = logging.getLogger(__name__)


class LossReport:
    """The records in dropped log files, by stream, as far as those files can be read."""

    def __init__(self) -> None:
        #: First and last seq_num by stream id.
        self._spans: dict[int, tuple[int, int]] = {}
        #: Names of streams by id: of those whose rows are dropped as well, at first.
        self._names: dict[int, str] = {}
        #: Streams whose state changes: with each append, and with trims and fences.
        self._states: set[int] = set()
        #: Changes of other rows.
        self._others = 0

    def add(self, ops: Sequence[Op]) -> None:
        """Count the rows of a log file that is dropped."""
        for key, value in ops:
            if value is not None and keys.is_chunk(key):
                self._add_chunk(key, value)
            elif (stream_id := keys.state_stream_id(key)) is not None:
                self._states.add(stream_id)
            else:
                self._others += 1
                if value is not None and keys.STREAMS_START <= key < keys.STREAMS_END:
                    self._add_name(key, value)

    def _add_chunk(self, key: bytes, value: bytes) -> None:
        stream_id, last = keys.chunk_parts(key)
        try:
            first = chunks.decode(value).first_seq_num
        except StorageError:
            first = last
        before = self._spans.get(stream_id, (first, last))
        self._spans[stream_id] = min(before[0], first), max(before[1], last)

    def _add_name(self, key: bytes, value: bytes) -> None:
        with suppress(StorageError):  # then the id must do
            self._names[rows.decode(value, StreamRow).id] = "/".join(keys.stream_names(key))

    async def log(self, engine: Engine) -> None:
        """Log a line for each stream, with the names that storage still has."""
        if not (self._spans or self._states or self._others):
            return
        span = keys.STREAMS_START, keys.STREAMS_END
        # A damaged row costs a name here, and must not cost the report.
        async with aclosing(readable_pages(engine, *span, first=100)) as pages:
            async for page in pages:
                for key, value in page:
                    self._add_name(key, value)
        for stream_id, (first, last) in sorted(self._spans.items()):
            logger.error(
                "dropped: records %d to %d of stream %s", first, last, self._name(stream_id)
            )
        for stream_id in sorted(self._states - self._spans.keys()):
            logger.error("dropped: a change of the state of stream %s", self._name(stream_id))
        if self._others:
            logger.error("dropped: %d changes of other rows", self._others)

    def _name(self, stream_id: int) -> str:
        return self._names.get(stream_id, f"of id {stream_id}, whose name is unknown")
