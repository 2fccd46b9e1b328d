"""Files of an archive on this machine: fetched, checked, and open for reading.

A file is used only when its size and its hash are those of the manifest. Local archives are read
directly, others through the cache or through temporary files.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
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
from streamfold.archive.read.cache import Cache, digest_of
from streamfold.blob import BlobStore, open_blob_store
from streamfold.blob.local.files import finish
from streamfold.errors import BlobNotFoundError, BlobUnavailableError, RetryLaterError

#: Bytes of an uncached file that stay in memory.
SPOOL_MEMORY = 8 << 20
#: Files that are fetched while others are read: enough to hide a round trip or two.
AHEAD = 4


class PartGoneError(RetryLaterError):
    """A file of the plan no longer exists: plan again from the current manifest."""

    code = "part_gone"

    def __init__(self, path: str, folder: str) -> None:
        super().__init__(
            f"file {path!r} is not in {folder}: it was collected since the manifest was read, or "
            "deleted otherwise; read the manifest again"
        )
        self.path = path


@dataclass(frozen=True, slots=True)
class PartFiles:
    """The files of one archive, to be opened by the manifest's parts."""

    destination: Destination
    cache: Cache | None = None
    #: Opens another folder of the same storage, for files whose URI is there.
    elsewhere: Callable[[str], BlobStore] = open_blob_store

    @asynccontextmanager
    async def open(self, part: Part) -> AsyncIterator[BinaryIO]:
        """Give a file that is complete and unchanged; `PartGoneError` if it does not exist."""
        async with AsyncExitStack() as stack:
            yield await self._open(part, stack)

    async def open_all(self, parts: Iterable[Part]) -> AsyncGenerator[tuple[Part, BinaryIO]]:
        """Give file after file, each until the next is asked for; some are fetched ahead."""
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
                # Its failure does not matter: the file is not going to be read.
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
            # Opened before it is checked: it stays readable if collection removes it.
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
            with suppress(FileNotFoundError):  # evicted by another process since
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
                break  # it is too large already, however much follows
            await finish(asyncio.to_thread(_take, piece, sink, digest))
        _check(part, size, digest.hexdigest())
        sink.flush()

    async def _stream(self, part: Part) -> AsyncIterator[bytes]:
        """Yield the file from its path beside the manifest, else from its URI in the same storage."""
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
        # Never in storage of another kind: a manifest must not lead its reader to local files.
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
