"""An archive's files on this machine: fetched, verified, and open for reading.

A file is used only if its size and hash match the manifest. Local archives are read directly,
others through the cache or through temporary files.

The cache is a folder of files read earlier, named by their SHA-256 and limited in bytes. Several
processes may share it. A file appears as a whole, under its hash, by a single rename. A process
that has it open can still read it after another process evicts it. A cache can be deleted at any
time. Files with a wrong hash are fetched again.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast
from urllib.parse import urlsplit

import pyarrow as pa

from streamfold.archive.destinations.destination import (
    Destination,
    local_folder,
    name_destination_on_error,
)
from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.manifest.model import Part
from streamfold.blob import BlobStore, open_blob_store
from streamfold.blob.local_files import finish
from streamfold.errors import BlobNotFoundError, BlobUnavailableError, InvalidError, RetryLaterError

#: Default maximum bytes of a cache: a few bases of a table with millions of rows.
DEFAULT_MAX_BYTES = 10 << 30
#: Seconds after which the writer of an unfinished file counts as dead.
ABANDONED = 86_400
#: Name prefix of unfinished files.
DRAFT = "draft-"
#: Lock file for evictions.
LOCK = "lock"
#: Bytes of an uncached file that stay in memory.
SPOOL_MEMORY = 8 << 20
#: Files to fetch while others are read: enough to hide a round trip or two.
AHEAD = 4


@dataclass(frozen=True, slots=True)
class Cache:
    """Caches files by content in `folder`, evicting the least recently used above `max_bytes`.

    The limit holds after each addition. A single file larger than the limit stays until the next
    one.
    """

    folder: Path
    max_bytes: int = DEFAULT_MAX_BYTES

    def __post_init__(self) -> None:
        if self.max_bytes < 0:
            raise InvalidError(f"a cache of {self.max_bytes} bytes: it cannot be negative")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidError(
                f"{self.folder} cannot be the folder of a cache: {error.strerror}; name another"
            ) from None

    def path(self, sha256: str) -> Path:
        """Return the path of a file with this content, which need not exist."""
        return self.folder / sha256[:2] / sha256

    def find(self, sha256: str) -> Path | None:
        """Return a file with verified content and mark it as used, or None if it is not cached."""
        path = self.path(sha256)
        try:
            if digest_of(path) == sha256:
                os.utime(path)
                return path
            path.unlink()
        except FileNotFoundError:
            pass  # not cached, or evicted while this method looked
        return None

    @contextmanager
    def draft(self) -> Iterator[IO[bytes]]:
        """Yield a file to write to. It is deleted unless `keep` adds it to the cache."""
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=DRAFT, delete=False) as file:
            try:
                yield file
            finally:
                with suppress(FileNotFoundError):  # `keep` has renamed it
                    Path(file.name).unlink()

    def keep(self, draft: IO[bytes], sha256: str) -> Path:
        """Add a draft with verified content, and evict files beyond the limit."""
        draft.flush()
        path = self.path(sha256)
        path.parent.mkdir(exist_ok=True)
        Path(draft.name).replace(path)
        self.evict(spare=path)
        return path

    def evict(self, spare: Path | None = None) -> None:
        """Delete the least recently used files until the limit holds, but never `spare`."""
        with self._lock():
            files = sorted(self._files(), key=lambda file: file[0])
            excess = sum(size for _, size, _ in files) - self.max_bytes
            for used, size, path in files:
                abandoned = path.name.startswith(DRAFT) and used < time.time() - ABANDONED
                if abandoned or (excess > 0 and path != spare and not path.name.startswith(DRAFT)):
                    path.unlink(missing_ok=True)
                    excess -= size

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        for path in (*self.folder.glob("??/*"), *self.folder.glob(f"{DRAFT}*")):
            with suppress(FileNotFoundError):
                status = path.stat()
                yield status.st_mtime, status.st_size, path

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Wait for other evictions: an eviction that has listed the files misses later additions."""
        with (self.folder / LOCK).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class PartGoneError(RetryLaterError):
    """A file of the plan no longer exists. Plan again from the current manifest."""

    code = "part_gone"

    def __init__(self, path: str, folder: str) -> None:
        super().__init__(
            f"file {path!r} is not in {folder}: it was collected since the manifest was read, or "
            "deleted otherwise; read the manifest again"
        )
        self.path = path


@dataclass(frozen=True, slots=True)
class PartFiles:
    """Opens the files of one archive by the manifest's parts."""

    destination: Destination
    cache: Cache | None = None
    #: Opens another folder in the same storage, for files whose URI points there.
    elsewhere: Callable[[str], BlobStore] = open_blob_store

    @asynccontextmanager
    async def open(self, part: Part) -> AsyncIterator[BinaryIO]:
        """Yield a complete, unchanged file. Raises `PartGoneError` if it does not exist."""
        async with AsyncExitStack() as stack:
            yield await self._open(part, stack)

    async def open_all(self, parts: Iterable[Part]) -> AsyncGenerator[tuple[Part, BinaryIO]]:
        """Yield one open file after another, each until the next is requested. Fetches some ahead."""
        waiting: deque[tuple[Part, AsyncExitStack, asyncio.Task[BinaryIO]]] = deque()
        rest = iter(parts)
        try:
            while True:
                while len(waiting) < AHEAD and (part := next(rest, None)):
                    stack = AsyncExitStack()
                    waiting.append((part, stack, asyncio.create_task(self._open(part, stack))))
                if not waiting:
                    return
                part, stack, task = waiting[0]
                yield part, await task
                await stack.aclose()
                waiting.popleft()
        finally:
            for _, stack, task in waiting:
                task.cancel()
                # Its failure does not matter, because the file will not be read.
                await asyncio.gather(task, return_exceptions=True)
                await stack.aclose()

    async def _open(self, part: Part, stack: AsyncExitStack) -> BinaryIO:
        try:
            if path := self._local_path(part):
                return await self._open_local(part, path, stack)
            if self.cache and part.sha256:
                return await self._open_cached(part, self.cache, part.sha256, stack)
            return await self._open_spooled(part, stack)
        except OSError as error:
            raise BlobUnavailableError(
                f"file {part.path!r} cannot be read or kept on this machine: "
                f"{error.strerror or error}"
            ) from error

    async def _open_spooled(self, part: Part, stack: AsyncExitStack) -> BinaryIO:
        spool = tempfile.SpooledTemporaryFile(SPOOL_MEMORY)  # noqa: SIM115  # the stack closes it
        stack.callback(spool.close)
        await self._fetch(part, cast("IO[bytes]", spool))
        return cast("BinaryIO", spool)

    async def _open_local(self, part: Part, path: Path, stack: AsyncExitStack) -> BinaryIO:
        try:
            # Opened before it is verified, so it stays readable if garbage collection removes it.
            file = stack.enter_context(pa.OSFile(str(path)))
            size, digest = await finish(asyncio.to_thread(_measure, path, part.sha256 is not None))
        except FileNotFoundError:
            raise PartGoneError(part.path, self.destination.uri) from None
        _check(part, size, digest)
        return cast("BinaryIO", file)

    async def _open_cached(
        self, part: Part, cache: Cache, sha256: str, stack: AsyncExitStack
    ) -> BinaryIO:
        path = await finish(asyncio.to_thread(cache.find, sha256))
        if path is not None:
            with suppress(FileNotFoundError):  # evicted by another process in the meantime
                return cast("BinaryIO", stack.enter_context(pa.OSFile(str(path))))
        draft = stack.enter_context(cache.draft())
        await self._fetch(part, draft)
        await finish(asyncio.to_thread(cache.keep, draft, sha256))
        draft.seek(0)
        return cast("BinaryIO", draft)

    async def _fetch(self, part: Part, sink: IO[bytes]) -> None:
        digest, size = hashlib.sha256(), 0
        async for piece in self._stream(part):
            size += len(piece)
            if size > part.size_bytes:
                break  # it is already too large, however much follows
            await finish(asyncio.to_thread(_take, piece, sink, digest))
        _check(part, size, digest.hexdigest())
        sink.flush()

    async def _stream(self, part: Part) -> AsyncIterator[bytes]:
        """Yield the file from its path beside the manifest, or from its URI in the same storage."""
        for blobs, key in self._locations(part):
            try:
                with name_destination_on_error(self.destination.uri):
                    async for piece in blobs.stream(key):
                        yield piece
                return
            except BlobNotFoundError:
                continue
        raise PartGoneError(part.path, self.destination.uri)

    def _locations(self, part: Part) -> Iterable[tuple[BlobStore, str]]:
        yield self.destination.blobs, part.path
        folder, _, name = part.uri.rpartition("/")
        own = self.destination.uri
        # Never from another type of storage: a manifest must not lead its reader to local files.
        if name and not part.uri.startswith(own) and _scheme(folder) == _scheme(own):
            yield self.elsewhere(folder), name

    def _local_path(self, part: Part) -> Path | None:
        folder = local_folder(self.destination.uri)
        if folder is None:
            return None
        path = folder / part.path
        elsewhere = local_folder(part.uri)
        return path if path.exists() or not elsewhere else elsewhere


def _scheme(uri: str) -> str:
    return urlsplit(uri).scheme


def _measure(path: Path, hashed: bool) -> tuple[int, str | None]:
    return path.stat().st_size, digest_of(path) if hashed else None


def _take(piece: bytes, sink: IO[bytes], digest: hashlib._Hash) -> None:
    sink.write(piece)
    digest.update(piece)


def _check(part: Part, size: int, digest: str | None) -> None:
    if size != part.size_bytes:
        raise ArtifactCorruptError(
            f"file {part.path!r} has {'at least ' if size > part.size_bytes else ''}{size} bytes, "
            f"the manifest says {part.size_bytes}: restore it, or read another format of it"
        )
    if part.sha256 not in (None, digest):
        raise ArtifactCorruptError(
            f"file {part.path!r} has another SHA-256 than the manifest says: restore it, or read "
            "another format of it"
        )
