"""Reads streams from the storage of a Streamfold store, without its server.

Opening a store shows the records that are durable at that moment. The driver reads the tails. Tasks
open the store themselves, later, so they see all records before those tails.
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
    # Only for types: importing these at run time loads SlateDB, which most queries do not need.
    from streamfold.store.log.sealing import SealingKey
    from streamfold.store.read.requests import ReadBatch
    from streamfold.store.read_only import StoredStreams


@dataclass(frozen=True, slots=True)
class StoredBasin:
    """A basin in a store's storage. Pickled with a plan for its tasks."""

    #: The server's storage URL: file:///folder or s3://bucket/prefix.
    url: str
    basin: str
    #: Base64, as the server accepts it.
    encryption_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        try:
            parse_encryption_key(self.encryption_key or None)
        except BadHeaderError:
            raise OptionError("encryptionKey", "must be 32 bytes in base64") from None

    def key(self) -> SealingKey | None:
        from streamfold.store.log.sealing import SealingKey

        key = parse_encryption_key(self.encryption_key or None)
        return None if key is None else SealingKey(key.reveal())


class OpenBasin:
    """A basin's streams as of its opening. Has the `StreamCalls` methods that positions need."""

    def __init__(self, stored: StoredBasin, opened: StoredStreams, runner: asyncio.Runner) -> None:
        self._basin = stored.basin
        self._key = stored.key()
        self._streams = opened
        # Not `runner.run`: its signal handling formats the result, megabytes of records, as text.
        self._run: Callable[[Coroutine[Any, Any, Any]], Any] = runner.get_loop().run_until_complete

    def names(self, prefix: str = "") -> list[str]:
        names: list[str] = self._run(self._streams.names(self._basin, prefix))
        return names

    def tail(self, stream: str) -> StreamPosition:
        tail: StreamPosition = self._run(self._streams.tail(self._basin, stream))
        return tail

    def first(self, stream: str, at: int = 0) -> int:
        return int(self._run(self._streams.first(self._basin, stream, at)))

    def first_since(self, stream: str, timestamp: int) -> int:
        first = self._streams.first_since(self._basin, stream, timestamp, self._key)
        return int(self._run(first))

    def page_bytes(self, stream: str, at: int) -> bytes | None:
        """Return records starting at `at`, about as many as one server response holds."""
        return next(self.pieces(stream, at, at + 1000), None)

    def snapshot_cursor(self, stream: str) -> int | None:
        cursor: int | None = self._run(self._streams.newest_snapshot(self._basin, stream))
        return cursor

    def pieces(self, stream: str, start: int, end: int) -> Iterator[bytes]:
        """Yield the range's readable records, joined into pieces of a few megabytes."""
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
    """Open a basin's store in its current state, without disturbing a process that writes to it."""
    with needing_extra("server"):
        from streamfold.store.read_only import open_read_only
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        streams = runner.run(stack.enter_async_context(open_read_only(stored.url)))
        try:
            yield OpenBasin(stored, streams, runner)
        finally:
            runner.run(stack.aclose())


def read_stored(stored: StoredBasin, part: Range, options: Wanted) -> Iterator[Columns]:
    """Yield every record of the range once and in order. Raises DataLossError if one is gone."""
    stream, at, end = part.stream, part.start, part.end
    with open_basin(stored) as basin:
        for piece in basin.pieces(stream, at, end):
            columns = read_columns(piece, headers=options.headers, bodies=options.bodies)
            columns, at = within(columns, stream, at, end, options)
            if len(columns.seq_nums):
                yield columns
        if at < end:
            report_loss(stream, at, end, basin.first(stream, at), options)
