"""Chunk files: files for large chunks, beside the database.

When a stream receives much data in one commit, its chunks go to a file, and the database gets rows
that point to them. SlateDB would write the bytes at least three times, to its log, to a table and
with each table merge, and reading them back takes one copy per layer.

A file is durable before the commit that names it begins, and never changes. So a row always finds
its file. A failed commit leaves a file without a row, which `sweep` deletes after a grace period of
days (`leftovers.py` says why). Upkeep deletes a file before the row of its last chunk: that row is
already trimmed, and if a crash comes in between, upkeep finds the row again and repeats both
deletions.

    {epoch} / {number, without its last 3 digits} / {the rest} - {stream id} - {last seq_num}

All parts are hexadecimal. The writer's epoch and a number that it counts up make each name unique:
no attempt replaces another attempt's file. A folder has at most 4096 files. A file contains the
header and payload of each chunk, one after the other, in the same form as in a row.
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

#: Bytes from which data read from a file is checked and decompressed in a thread.
_THREAD_FROM: Final = 64 << 10
#: Listed files after which the sweep yields to other tasks: 2 us each.
_LISTED_AT_ONCE: Final = 256
#: Maximum files per epoch that lack a row because their commits were in flight: more than the
#: default limit of 64 MiB in flight allows.
_FAILED_MAX: Final = 16_384
_NAME = re.compile(r"([0-9a-f]{8})/([0-9a-f]{8})/([0-9a-f]{3})-([0-9a-f]{16})-([0-9a-f]{16})")


class NewFile(NamedTuple):
    """A file to be written."""

    name: str
    data: bytes


class FileName(NamedTuple):
    """The parts of a chunk file's name. Names sort in the order of these tuples."""

    epoch: int
    number: int
    stream_id: int
    last_seq_num: int

    def __str__(self) -> str:
        folder = f"{self.epoch:08x}/{self.number >> 12:08x}"
        return f"{folder}/{self.number & 0xFFF:03x}-{self.stream_id:016x}-{self.last_seq_num:016x}"

    @classmethod
    def parse(cls, name: str) -> FileName | None:
        """Parse `name`. Returns None if it does not name a chunk file."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        epoch, folder, rest, stream_id, last_seq_num = (int(part, 16) for part in match.groups())
        return cls(epoch, folder << 12 | rest, stream_id, last_seq_num)


#: The newest files of one epoch, in write order.
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
        #: Known bytes of all files. Files from before this mount are included after `sweep`.
        self.size = 0
        #: Bytes of files that no row names.
        self.leftover_size = 0
        self._counted = False

    def lay_out(self, stream_id: int, stored: Sequence[StoredChunk]) -> tuple[NewFile, list[bytes]]:
        """Return a file for these chunks of one stream, and each chunk's row.

        Runs in any thread.
        """
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
        """Make `files` durable. After an error, some of them may be left behind."""
        try:
            async with asyncio.TaskGroup() as group:
                for file in files:
                    group.create_task(self._blobs.put(file.name, file.data))
        except* StreamfoldError as errors:
            raise _cause(errors) from errors
        self.size += sum(len(file.data) for file in files)

    async def read(self, run: Sequence[Chunk]) -> list[Chunk]:
        """Return `run`, adjacent chunks of one file, with their payloads loaded and decompressed.

        Raises BlobNotFoundError if the file is gone because its chunks are trimmed.
        """
        first, last = run[0].part, run[-1].part
        async with self._reading:
            length = last.offset + last.size - first.offset
            data = await self._blobs.get_range(first.file, first.offset, length)
            if sum([chunk.metered for chunk in run]) < _THREAD_FROM:
                return payloads_of(data, run)
            return await asyncio.to_thread(payloads_of, data, run)

    async def delete(self, page: Sequence[Row]) -> None:
        """Delete the files whose last chunk is in `page`, a page of chunks about to be deleted."""
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
        """Find files of former mounts that no row names, and delete the overdue ones.

        Checks all epochs each time: a write sent by a former writer may arrive after the next
        writer's sweep.
        """
        newest: _Found = deque(maxlen=_FAILED_MAX)
        unnamed: list[BlobMeta] = []
        listed = size = 0
        async for meta in self._blobs.list():
            listed += 1
            if listed % _LISTED_AT_ONCE == 0:
                await asyncio.sleep(0)  # a listing may never wait for storage
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
    """Return the files without a row. They are the newest, because commits take effect in order.

    So this reads a single row if every file has one.
    """
    unnamed: list[BlobMeta] = []
    for name, meta in reversed(files):
        value = await engine.get(keys.chunk(name.stream_id, name.last_seq_num))
        if value is not None and _may_name(value, meta.key):
            break
        unnamed.append(meta)
    return unnamed


def has_files(page: Sequence[Row]) -> bool:
    """Return whether any chunk of `page` is in a file."""
    return any(_part_of(value) is not None for _, value in page)


def _may_name(value: bytes, file: str) -> bool:
    """Return whether the chunk of a row is in `file`, or may be because the row is unreadable."""
    try:
        return chunks.decode(value).part.file == file
    except StorageError:
        return True


def _part_of(value: bytes) -> FilePart | None:
    """Return where the chunk of a row is in a file, or None if it is in the row or unreadable."""
    try:
        chunk = chunks.decode(value)
    except StorageError:
        return None
    return chunk.part if chunk.in_file else None


def payloads_of(data: bytes | memoryview, run: Sequence[Chunk]) -> list[Chunk]:
    """Return `run` with its payloads, decompressed.

    `data` starts at the payload of its first chunk.

    Raises DataCorruptError if `data` differs from what was written.
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
    """Return the error for an untrimmed chunk whose file is gone."""
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
    """Return a full-disk or device error if one caused `error`, else `error` itself."""
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
