"""Stores blobs as files under one folder, published by `streamfold.blob.local_files`.

obstore's local store is unsuitable: it renames before files can be synced, lists in no order, and
reserves names that end in `#` and digits.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from streamfold.blob.blob_store import (
    DEFAULT_CHUNK_SIZE,
    BlobChangedError,
    BlobMeta,
    BlobStore,
    check_chunk_size,
    check_key,
    check_prefix,
    check_range,
)
from streamfold.blob.destinations import DestinationType, refuse_options
from streamfold.blob.local_files import (
    DRAFTS,
    DraftFile,
    DurableTree,
    Fsync,
    etag_of,
    finish,
    open_file,
    read_full,
    read_range,
    read_with_etag,
    scan_folder,
    stat_blob,
)
from streamfold.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobUnavailableError,
    InvalidError,
)
from streamfold.extensions import Options

P = ParamSpec("P")
T = TypeVar("T")

#: Bytes gathered from an iterator before a thread writes them, because handing small pieces to a
#: thread costs more than writing them. Smaller blobs are written in one step, with no file open
#: while bytes arrive.
WRITE_BUFFER = 1024 * 1024


class LocalBlobStore(BlobStore):
    """Stores blobs in files below `root`, created if missing. Needs hard links and POSIX rename.

    A listing holds the names of one folder per level in memory. Empty folders remain, and a blob
    whose key is a folder's name raises `InvalidError`. Symbolic links are not listed.
    Compare-and-swap uses `flock`, which a network file system must support.
    """

    def __init__(self, root: Path, *, fsync: Fsync = os.fsync) -> None:
        self._root = root.absolute()
        try:
            self._tree = DurableTree(self._root, fsync)
            self._require_root()
        except OSError as error:
            raise BlobUnavailableError(
                f"folder {self._root} cannot be used ({error.strerror}): choose another one, or "
                "remove the cause"
            ) from error

    def __repr__(self) -> str:
        return f"LocalBlobStore({str(self._root)!r})"

    async def put(self, key: str, data: bytes | AsyncIterator[bytes]) -> None:
        target = self._path(key)
        if isinstance(data, bytes):
            await self._change(key, self._write, target, data, True)
        else:
            await self._put_pieces(key, target, data)

    async def put_if_absent(self, key: str, data: bytes) -> str:
        target = self._path(key)
        return await self._change(key, self._write, target, data, False)

    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        return await self._change(key, self._swap, key, self._path(key), data, etag)

    async def get_with_etag(self, key: str) -> tuple[bytes, str]:
        return await self._read(key, self._read_version, self._path(key))

    async def get(self, key: str) -> bytes:
        return await self._read(key, self._path(key).read_bytes)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(key, start, length)
        return await self._read(key, read_range, self._path(key), start, length)

    async def stream(self, key: str, chunk_size: int = DEFAULT_CHUNK_SIZE) -> AsyncIterator[bytes]:
        check_chunk_size(chunk_size)
        path = self._path(key)
        opened: list[int] = []  # filled even if the caller is cancelled first
        try:
            # An open file retains its content even if another is renamed over it.
            await self._read(key, lambda: opened.append(open_file(path)))
            while piece := await self._read(key, read_full, opened[0], chunk_size):
                yield piece
        finally:
            for descriptor in opened:
                os.close(descriptor)

    async def head(self, key: str) -> BlobMeta:
        return await self._read(key, stat_blob, self._path(key), key)

    async def list(self, prefix: str = "") -> AsyncIterator[BlobMeta]:
        check_prefix(prefix)
        folder, slash, _ = prefix.rpartition("/")
        async for meta in self._list_folder(folder + slash, prefix):
            yield meta

    async def delete(self, key: str) -> None:
        await self._change(key, self._tree.remove, self._path(key))

    def _path(self, key: str) -> Path:
        check_key(key)
        if key.split("/")[0] == DRAFTS:
            raise InvalidError(f"blob key {key!r} begins with {DRAFTS!r}, which the store uses")
        return self._root / key

    def _write(self, target: Path, data: bytes | bytearray, replace: bool) -> str:
        draft = self._tree.open_draft()
        try:
            draft.write(data)
            self._tree.publish(draft, target, replace=replace)
            return etag_of(os.fstat(draft.descriptor))
        finally:
            draft.close()

    def _read_version(self, path: Path) -> tuple[bytes, str]:
        version = read_with_etag(path)
        self._tree.secure_name(path)
        return version

    def _swap(self, key: str, target: Path, data: bytes, etag: str) -> str:
        # The kernel has no compare-and-rename, so swaps take a lock.
        with self._tree.locked():
            try:
                current = etag_of(target.stat()) if target.is_file() else None
            except FileNotFoundError:
                current = None
            if current is None:
                raise BlobNotFoundError(
                    f"blob {key!r} does not exist in {self._root}: not replaced"
                )
            if current != etag:
                raise BlobChangedError(
                    f"blob {key!r} in {self._root} is no longer the one that was read: it was not "
                    "replaced; read it again"
                )
            return self._write(target, data, True)

    async def _put_pieces(self, key: str, target: Path, pieces: AsyncIterator[bytes]) -> None:
        async with aclosing(_gathered(pieces)) as buffers:
            first = await anext(buffers, bytearray())
            if len(first) < WRITE_BUFFER:
                await self._change(key, self._write, target, first, True)
                return
            drafts: list[DraftFile] = []  # filled even if the caller is cancelled first
            try:
                await self._change(key, lambda: drafts.append(self._tree.open_draft()))
                await self._change(key, drafts[0].write, first)
                del first
                async for buffer in buffers:
                    await self._change(key, drafts[0].write, buffer)
                await self._change(key, self._tree.publish, drafts[0], target, replace=True)
            finally:
                for draft in drafts:
                    draft.close()

    async def _list_folder(self, folder: str, prefix: str) -> AsyncIterator[BlobMeta]:
        for entry in await self._read(folder, scan_folder, self._root / folder, folder):
            if entry.meta is not None and entry.name.startswith(prefix):
                yield entry.meta
            elif entry.meta is None and _overlap(entry.name, prefix):
                async for meta in self._list_folder(entry.name, prefix):
                    yield meta

    async def _read(self, key: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in a thread, translating file errors to read errors."""
        try:
            return await finish(asyncio.to_thread(work, *args, **kwargs))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._require_root()
            raise BlobNotFoundError(f"blob {key!r} does not exist in {self._root}") from None
        except OSError as error:
            raise BlobUnavailableError(
                f"cannot read {key!r} in {self._root}: {error.strerror}"
            ) from error

    async def _change(self, key: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in a thread, translating file errors to those of an ineffective write."""
        try:
            return await finish(asyncio.to_thread(work, *args, **kwargs))
        except (IsADirectoryError, NotADirectoryError):
            self._require_root()
            raise InvalidError(
                f"blob key {key!r} is a folder in {self._root}, or is below a blob: "
                "a local store cannot hold both; choose another key"
            ) from None
        except FileExistsError:
            raise BlobExistsError(
                f"blob {key!r} exists already in {self._root}: it was not replaced"
            ) from None
        except OSError as error:
            raise BlobUnavailableError(
                f"blob {key!r} was not written to {self._root}: {error.strerror}"
            ) from error

    def _require_root(self) -> None:
        """Raise if the root exists but is not a folder."""
        if self._root.exists() and not self._root.is_dir():
            raise BlobUnavailableError(
                f"{self._root} is a file, not a folder: name a folder, or remove the file"
            )


async def _gathered(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytearray]:
    """Yield the bytes of `pieces` in buffers of at least `WRITE_BUFFER`, the last one shorter."""
    buffer = bytearray()
    async for piece in pieces:
        buffer += piece
        if len(buffer) >= WRITE_BUFFER:
            yield buffer
            buffer = bytearray()
    if buffer:
        yield buffer


def _overlap(folder: str, prefix: str) -> bool:
    return folder.startswith(prefix) or prefix.startswith(folder)


class FolderOptions(Options, frozen=True, kw_only=True):
    path: Annotated[str, msgspec.Meta(description="folder, for all tables")]


def _open(url: str, options: Mapping[str, Any]) -> LocalBlobStore:
    refuse_options(url, options)
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InvalidError(f"blob store URL {url!r} must name an absolute folder: file:///folder")
    return LocalBlobStore(Path(unquote(parts.path)))


LOCAL = DestinationType(
    id="local",
    summary="a folder on local disk",
    options=FolderOptions,
    locate=lambda options: Path(options.path).expanduser().absolute().as_uri(),
    open=_open,
)
