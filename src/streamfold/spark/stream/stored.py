"""Streams read from the storage of a Streamfold store, without its server.

Every opening sees what is durable at that moment. The driver finds tails in one; tasks open the store
themselves, later, so they see all records before those tails.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamfold.extras import needing_extra
from streamfold.model.positions import StreamPosition
from streamfold.records.columns import Columns, read_columns
from streamfold.spark.errors import OptionError
from streamfold.spark.stream.range_reads import PIECE, Range, Wanted, report_loss, within
from streamfold.wire.s2.errors import BadHeaderError
from streamfold.wire.s2.headers import parse_encryption_key

if TYPE_CHECKING:
    # Only for types: at run time this loads SlateDB, which most queries do not need.
    from streamfold.store.log.sealing import SealingKey
    from streamfold.store.read.requests import ReadBatch
    from streamfold.store.read_only import StoredStreams


@dataclass(frozen=True, slots=True)
class StoredBasin:
    """A basin on the storage of its store. Pickled with a plan for its tasks."""

    #: file:///folder or s3://bucket/prefix, as the server has it.
    url: str
    basin: str
    #: In base64, as the server takes it.
    encryption_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        try:
            parse_encryption_key(self.encryption_key or None)
        except BadHeaderError:
            raise OptionError("encryptionKey", "must be 32 bytes in base64") from None

    def key(self) -> SealingKey | None:
        from streamfold.store.log.sealing import SealingKey

        found = parse_encryption_key(self.encryption_key or None)
        return None if found is None else SealingKey(found.reveal())


class OpenBasin:
    """The streams of a basin as they were when it was opened; has the methods of `client.Streams`."""

    def __init__(self, stored: StoredBasin, opened: StoredStreams, runner: asyncio.Runner) -> None:
        self._basin = stored.basin
        self._key = stored.key()
        self._streams = opened
        # Not `runner.run`: its handling of signals formats the result, megabytes of records, as text.
        self._run: Callable[[Coroutine[Any, Any, Any]], Any] = runner.get_loop().run_until_complete

    def names(self, prefix: str = "") -> list[str]:
        found: list[str] = self._run(self._streams.names(self._basin, prefix))
        return found

    def tail(self, stream: str) -> StreamPosition:
        found: StreamPosition = self._run(self._streams.tail(self._basin, stream))
        return found

    def first(self, stream: str, at: int = 0) -> int:
        return int(self._run(self._streams.first(self._basin, stream, at)))

    def first_since(self, stream: str, timestamp: int) -> int:
        wanted = self._streams.first_since(self._basin, stream, timestamp, self._key)
        return int(self._run(wanted))

    def page_bytes(self, stream: str, at: int) -> bytes | None:
        """Return records from `at` on, about as many as one answer of a server holds."""
        return next(self.pieces(stream, at, at + 1000), None)

    def snapshot_cursor(self, stream: str) -> int | None:
        found: int | None = self._run(self._streams.newest_snapshot(self._basin, stream))
        return found

    def pieces(self, stream: str, start: int, end: int) -> Iterator[bytes]:
        """Yield the records of the range that can be read, joined to pieces of some megabytes."""
        batches = self._streams.batches(self._basin, stream, start, end, self._key)
        try:
            while piece := self._run(_next_piece(batches)):
                yield piece
        finally:
            self._run(batches.aclose())


async def _next_piece(batches: AsyncIterator[ReadBatch]) -> bytes:
    parts: list[bytes | memoryview] = []
    size = 0
    while size < PIECE and (batch := await anext(batches, None)) is not None:
        parts += batch.parts
        size += sum(map(len, batch.parts))
    return b"".join(parts)


@contextmanager
def open_basin(stored: StoredBasin) -> Iterator[OpenBasin]:
    """Open the store of a basin, as it is now; a process that writes it continues."""
    with needing_extra("server"):
        from streamfold.store.read_only import open_read_only
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        streams = runner.run(stack.enter_async_context(open_read_only(stored.url)))
        try:
            yield OpenBasin(stored, streams, runner)
        finally:
            runner.run(stack.aclose())


def read_stored(stored: StoredBasin, wanted_range: Range, wanted: Wanted) -> Iterator[Columns]:
    """Yield every record of the range, once and in order; DataLossError for one that is gone."""
    stream, at, end = wanted_range.stream, wanted_range.start, wanted_range.end
    with open_basin(stored) as basin:
        for piece in basin.pieces(stream, at, end):
            found = read_columns(piece, headers=wanted.headers, bodies=wanted.bodies)
            found, at = within(found, stream, at, end, wanted)
            if len(found.seq_nums):
                yield found
        if at < end:
            report_loss(stream, at, end, basin.first(stream, at), wanted)
