"""The content of a commit: batches taken from streams, as chunks and rows.

Taking batches from a stream is cheap and happens on the event loop. Joining, sealing or compressing
them takes at least 1 ms per MiB, so `build` does that in a thread if there are many bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from streamfold.errors import StreamfoldError
from streamfold.model.configs import Cipher
from streamfold.model.positions import StreamPosition
from streamfold.store import keys
from streamfold.store.engine.engine import Op, WriteBatch, size_of
from streamfold.store.log import chunks
from streamfold.store.log.chunk_files import ChunkFiles, NewFile
from streamfold.store.log.chunks import Chunk, StoredChunk
from streamfold.store.log.sealing import SEALING_OF, SealingKey
from streamfold.store.log.tail_waiters import reject

if TYPE_CHECKING:
    from streamfold.store.log.stream_log import StreamLog

#: Bytes of records and rows, and number of rows, from which a thread builds the commit. A thread
#: costs 0.2 ms, or 2 ms on a busy machine. Copying takes 4 ms per MiB, most of it without the GIL.
#: Small rows take 3 to 12 us each, so thousands would block the event loop.
_THREAD_FROM_BYTES: Final = 192 << 10
_THREAD_FROM_ROWS: Final = 600


class AppendAck(msgspec.Struct, frozen=True, gc=False):
    """The positions of a batch's start and end, and of the durable tail."""

    start: StreamPosition
    end: StreamPosition
    tail: StreamPosition


# Tracked by the garbage collector, like Share: a failed commit's error refers to them and they to it.
class Accepted(msgspec.Struct, frozen=True, eq=False):
    """A batch that has its slot in the stream but is not durable yet."""

    chunk: Chunk
    #: None if the ack of a later batch of the same append covers it.
    ack: asyncio.Future[AppendAck] | None
    key: SealingKey | None

    def fail(self, error: StreamfoldError) -> None:
        if self.ack is not None:
            reject(self.ack, error)


class Attached(NamedTuple):
    """Rows that a caller commits together with a stream's share, and the future it waits for."""

    rows: Sequence[Op]
    done: asyncio.Future[None]

    def settle(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class Share(msgspec.Struct, frozen=True, eq=False):
    """One stream's share of a commit."""

    log: StreamLog
    batches: list[Accepted]
    trim_point: int
    trim_point_at_once: int
    trimmed: bool
    closed: bool
    #: Rows other than chunks.
    rows: list[Op]
    metered: int
    #: Callers' rows, which are also in `rows`.
    attached: list[Attached]
    #: The records as chunks, and the bytes of each chunk's row; empty until `build`.
    chunks: list[Chunk] = []
    stored_bytes: list[int] = []

    def build(self, files: ChunkFiles) -> tuple[list[Op], NewFile | None]:
        """Build the chunks. Returns all rows to commit, and the file to write before them, if any.

        Runs in any thread, but only once.
        """
        log = self.log
        cipher = log.row.cipher
        if cipher is None and len(self.batches) == 1:
            chunk = self.batches[0].chunk
            if len(chunk.payload) < files.write_from:
                # The same as below, in fewer steps: with many streams, each has one small batch.
                self.chunks.append(chunk)
                value = chunks.encode(chunk).row
                self.stored_bytes.append(len(value))
                return [(keys.chunk(log.id, chunk.last_seq_num), value), *self.rows], None
        if cipher is not None:
            built = _seal(self.batches, log.id, cipher)
        else:
            built = chunks.merge([accepted.chunk for accepted in self.batches])
        self.chunks.extend(built)
        stored = [chunks.encode(chunk) for chunk in built]
        values, file = _place(log.id, stored, files)
        self.stored_bytes.extend([len(value) for value in values])
        ops: list[Op] = [
            (keys.chunk(log.id, chunk.last_seq_num), value)
            for chunk, value in zip(built, values, strict=True)
        ]
        ops += self.rows
        return ops, file


class Built(NamedTuple):
    """The rows of a commit, and the files that must be durable first."""

    batch: WriteBatch
    files: list[NewFile]

    @property
    def size(self) -> int:
        """Bytes of rows and files."""
        return self.batch.size + sum([len(file.data) for file in self.files])


async def build(
    shares: Sequence[Share],
    rows: Sequence[Op],
    files: ChunkFiles,
    prepare: Callable[[list[Op]], WriteBatch],
) -> Built:
    """Build the rows of `shares`, in order, followed by `rows`.

    Never blocks the event loop for long.

    A single thread does all the work, because each switch between threads may cost more than the
    work.
    """

    def build_all() -> Built:
        ops: list[Op] = []
        new: list[NewFile] = []
        for share in shares:
            share_ops, file = share.build(files)
            ops += share_ops
            if file is not None:
                new.append(file)
        ops += rows
        return Built(prepare(ops), new)

    # Rows may be large too: a subscription's row is up to 1 MiB, and many may arrive at once. A
    # stream has one row per producer.
    size = sum([share.metered for share in shares]) + size_of(rows)
    count = sum([1 + len(share.rows) for share in shares]) + len(rows)
    if size >= _THREAD_FROM_BYTES or count >= _THREAD_FROM_ROWS:
        return await asyncio.to_thread(build_all)
    return build_all()


def _place(
    stream_id: int, stored: Sequence[StoredChunk], files: ChunkFiles
) -> tuple[list[bytes], NewFile | None]:
    """Return the rows of the chunks, and the file for their payloads if these are large."""
    if sum([len(chunk.payload) for chunk in stored]) >= files.write_from:
        file, values = files.lay_out(stream_id, stored)
        return values, file
    return [chunk.row for chunk in stored], None


def _seal(batches: list[Accepted], stream_id: int, cipher: Cipher) -> list[Chunk]:
    """Merge adjacent batches that share a key, and seal the chunks with it."""
    sealed: list[Chunk] = []
    for key, group in groupby(batches, lambda accepted: accepted.key):
        merged = chunks.merge([accepted.chunk for accepted in group])
        if key is not None:
            merged = [chunks.seal(chunk, stream_id, SEALING_OF[cipher], key) for chunk in merged]
        sealed += merged
    return sealed
