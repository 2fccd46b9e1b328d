"""Files for large chunks, beside the database.

When a stream gets much in one commit, its chunks go to a file, and the database gets rows that say
where they are. SlateDB would write the bytes three times and more, to its log, to a table and with each
merge of tables, and reading them back takes a copy per layer.

A file is durable before the commit that names it begins, and it never changes. So a row always finds
its file; a commit that failed leaves a file without a row, and `sweep` deletes it after a grace of days
(`leftovers.py` says why). Upkeep deletes a file before it deletes the row of its last chunk: that row
is trimmed already, and if a crash comes in between, upkeep finds it again and repeats both.

    {epoch} / {number, without its last 3 digits} / {the rest} - {stream id} - {last seq_num}

all in hexadecimal. The epoch of the writer and a number, which it counts up, make each name unique: no
attempt replaces the file of another. A folder has 4096 files at most. A file has each chunk as a row
would have it, header and payload, one after the other.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Final, NamedTuple, TypeAlias
from zlib import crc32

from streamfold.blob import BlobMeta, BlobStore
from streamfold.errors import (
    DataCorruptError,
    DeviceFailedError,
    StorageError,
    StorageFullError,
    StreamfoldError,
)
from streamfold.store import keys
from streamfold.store.engine.disk_space import is_disk_full
from streamfold.store.engine.engine import Engine, Row
from streamfold.store.engine.location import FileLimits
from streamfold.store.leftovers import Leftovers
from streamfold.store.log import chunks
from streamfold.store.log.chunks import Chunk, FilePart, StoredChunk

#: Bytes from which a thread checks and decompresses what was read.
_THREAD_FROM: Final = 64 << 10
#: Files of a listing after which other tasks get their turn: 2 us each.
_LISTED_AT_ONCE: Final = 256
#: Files of one epoch that may be without a row, because their commits were in flight: more than 64 MiB,
#: which may be in flight by default, can have.
_FAILED_MAX: Final = 16_384
_NAME = re.compile(r"([0-9a-f]{8})/([0-9a-f]{8})/([0-9a-f]{3})-([0-9a-f]{16})-([0-9a-f]{16})")


class NewFile(NamedTuple):
    """A file that is not written yet."""

    name: str
    data: bytes


class FileName(NamedTuple):
    """What the name of a file says; names sort as these do."""

    epoch: int
    number: int
    stream_id: int
    last_seq_num: int

    def __str__(self) -> str:
        folder = f"{self.epoch:08x}/{self.number >> 12:08x}"
        return f"{folder}/{self.number & 0xFFF:03x}-{self.stream_id:016x}-{self.last_seq_num:016x}"

    @classmethod
    def parse(cls, name: str) -> FileName | None:
        """The parts of `name`; None if it is not the name of a chunk file."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        epoch, folder, rest, stream_id, last_seq_num = (int(part, 16) for part in match.groups())
        return cls(epoch, folder << 12 | rest, stream_id, last_seq_num)


#: The newest files of an epoch, in the order in which they were written.
_Found: TypeAlias = deque[tuple[FileName, BlobMeta]]


class ChunkFiles:
    """The chunk files of one mount."""

    def __init__(self, blobs: BlobStore, epoch: int, limits: FileLimits) -> None:
        self._blobs = blobs
        self._epoch = epoch
        self.write_from = limits.write_from
        self._numbers = count()
        self._reading = asyncio.Semaphore(limits.reads_max)
        self._deletes_max = limits.deletes_max
        #: Bytes of all files, as far as they are known: those from before this mount after `sweep`.
        self.size = 0
        #: Bytes of files that no row names.
        self.leftover_size = 0
        self._counted = False

    def lay_out(self, stream_id: int, stored: Sequence[StoredChunk]) -> tuple[NewFile, list[bytes]]:
        """A file for these chunks of one stream, and the row of each. Runs in any thread."""
        name = str(FileName(self._epoch, next(self._numbers), stream_id, stored[-1].last_seq_num))
        values: list[bytes] = []
        pieces: list[bytes | memoryview] = []
        offset = 0
        for chunk in stored:
            pieces += (chunk.header, chunk.payload)
            offset += len(chunk.header)
            size = len(chunk.payload)
            last = chunk is stored[-1]
            values.append(
                chunks.reference(
                    chunk.header, FilePart(name, offset, size, crc32(chunk.payload), last)
                )
            )
            offset += size
        return NewFile(name, b"".join(pieces)), values

    async def write(self, files: Sequence[NewFile]) -> None:
        """Make `files` durable; an error means that some may be left behind."""
        try:
            async with asyncio.TaskGroup() as group:
                for file in files:
                    group.create_task(self._blobs.put(file.name, file.data))
        except* StreamfoldError as errors:
            raise _cause(errors) from errors
        self.size += sum(len(file.data) for file in files)

    async def read(self, run: Sequence[Chunk]) -> list[Chunk]:
        """`run`, which are neighbours in one file, with their payloads, decompressed.

        BlobNotFoundError if the file is gone, because its chunks are trimmed.
        """
        first, last = run[0].part, run[-1].part
        async with self._reading:
            length = last.offset + last.size - first.offset
            data = await self._blobs.get_range(first.file, first.offset, length)
            if sum([chunk.metered for chunk in run]) < _THREAD_FROM:
                return payloads_of(data, run)
            return await asyncio.to_thread(payloads_of, data, run)

    async def delete(self, page: Sequence[Row]) -> None:
        """Delete the files whose last chunk is in `page`: chunks that are about to be deleted."""
        parts = [part for _, value in page if (part := _part_of(value)) is not None and part.last]
        for first in range(0, len(parts), self._deletes_max):
            some = parts[first : first + self._deletes_max]
            deletions = [self._delete(part.file) for part in some]
            for failure in await asyncio.gather(*deletions, return_exceptions=True):
                if failure is not None:
                    raise failure
            freed = sum([part.offset + part.size for part in some])
            self.size = max(0, self.size - freed)

    async def sweep(self, engine: Engine, leftovers: Leftovers) -> None:
        """Find the files of former mounts that no row names, and delete those that are overdue.

        Checks all epochs, each time: what a former writer sent may arrive after the next one's sweep.
        """
        newest: _Found = deque(maxlen=_FAILED_MAX)
        unnamed: list[BlobMeta] = []
        listed = size = 0
        async for meta in self._blobs.list():
            listed += 1
            if listed % _LISTED_AT_ONCE == 0:
                await asyncio.sleep(0)  # a listing need not wait for storage
            name = FileName.parse(meta.key)
            if name is None or name.epoch >= self._epoch:
                continue
            size += meta.size
            if newest and newest[-1][0].epoch != name.epoch:
                unnamed += await _without_row(engine, newest)
                newest.clear()
            newest.append((name, meta))
        if not self._counted:
            self.size += size
        self._counted = True
        unnamed += await _without_row(engine, newest)
        overdue = await leftovers.overdue(meta.key for meta in unnamed)
        self.leftover_size = sum(meta.size for meta in unnamed)
        for meta in unnamed:
            if meta.key in overdue:
                await self._delete(meta.key)
                self.size = max(0, self.size - meta.size)
                self.leftover_size -= meta.size

    async def _delete(self, name: str) -> None:
        try:
            await self._blobs.delete(name)
        except StreamfoldError as error:
            raise _translated(error) from error


async def _without_row(engine: Engine, files: _Found) -> list[BlobMeta]:
    """The files that have no row: the newest ones, because commits take effect in order.

    So this reads one row if all of them have one.
    """
    unnamed: list[BlobMeta] = []
    for name, meta in reversed(files):
        value = await engine.get(keys.chunk(name.stream_id, name.last_seq_num))
        if value is not None and _may_name(value, meta.key):
            break
        unnamed.append(meta)
    return unnamed


def has_files(page: Sequence[Row]) -> bool:
    """Whether chunks of `page` are in files."""
    return any(_part_of(value) is not None for _, value in page)


def _may_name(value: bytes, file: str) -> bool:
    """Whether the chunk of a row is in `file`; also true if the row cannot be read."""
    try:
        return chunks.decode(value).part.file == file
    except StorageError:
        return True


def _part_of(value: bytes) -> FilePart | None:
    """Where the chunk of a row is, if not in the row; None also if the row cannot be read."""
    try:
        chunk = chunks.decode(value)
    except StorageError:
        return None
    return chunk.part if chunk.in_file else None


def payloads_of(data: bytes | memoryview, run: Sequence[Chunk]) -> list[Chunk]:
    """`run` with its payloads, decompressed, from `data`, the bytes of its file from its first one on.

    DataCorruptError if they are not what was written.
    """
    first, loaded = run[0].part, []
    for chunk in run:
        part = chunk.part
        start = part.offset - first.offset
        payload = memoryview(data)[start : start + part.size]
        if len(payload) != part.size or crc32(payload) != part.checksum:
            raise DataCorruptError(
                f"records {chunk.first_seq_num} to {chunk.last_seq_num} in the file {part.file!r} are "
                "damaged: restore the file from a backup"
            )
        whole = chunks.with_payload(chunk, payload)
        loaded.append(chunks.unpacked(whole) if whole.packed else whole)
    return loaded


def missing(chunk: Chunk) -> DataCorruptError:
    """The error for a chunk that is not trimmed, but whose file is gone."""
    return DataCorruptError(
        f"the file {chunk.part.file!r}, with records {chunk.first_seq_num} to "
        f"{chunk.last_seq_num}, is missing: restore it from a backup; if the store is read beside its "
        "server, they may have been trimmed meanwhile: read again"
    )


def _cause(errors: BaseExceptionGroup[Exception]) -> Exception:
    error = errors.exceptions[0]
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return _translated(error)


def _translated(error: Exception) -> Exception:
    """What a change of a file failed for, if the disk is full or the device is to blame."""
    if not isinstance(error.__cause__, OSError):
        return error
    if is_disk_full(error.__cause__):
        return StorageFullError(
            f"the disk is full: {error}",
            public_message="the disk is full: free some space, trim or delete streams",
        )
    if error.__cause__.errno == errno.EIO:
        return DeviceFailedError(str(error))
    return error
