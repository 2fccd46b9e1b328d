"""Reading files and folders as blobs: plain functions that `local` runs in threads."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from streamfold.blob.blob_store import BlobMeta, check_key
from streamfold.blob.local.durable_files import DRAFTS
from streamfold.errors import InvalidError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a folder: a blob with its key, or a folder whose name ends in a slash."""

    name: str
    meta: BlobMeta | None


def scan_folder(path: Path, folder: str) -> list[Entry]:
    """Return the entries of `path`, whose keys begin with `folder`, in the byte order of full keys.

    A folder counts with its slash, so that `a-b` comes before all of `a/` as it does in keys.
    """
    try:
        with os.scandir(path) as names:
            found = [_to_entry(name, folder) for name in names]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((entry for entry in found if entry), key=lambda entry: entry.name)


def stat_blob(path: Path, key: str) -> BlobMeta:
    """Return the metadata of the file at `path`."""
    return _to_meta(key, path.stat())


def read_with_etag(path: Path) -> tuple[bytes, str]:
    """Return the bytes of the file at `path` and their etag."""
    with path.open("rb") as file:
        etag = etag_of(os.fstat(file.fileno()))
        return file.read(), etag


def etag_of(status: os.stat_result) -> str:
    """Return an etag that differs for any two files of one name: `durable_files` sets their times."""
    return f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"'


def open_file(path: Path) -> int:
    """Return a descriptor for reading."""
    return os.open(path, os.O_RDONLY)


def read_full(descriptor: int, size: int) -> bytes:
    """Return the next `size` bytes, fewer only at the end."""
    pieces = []
    while size and (piece := os.read(descriptor, size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def read_range(path: Path, start: int, length: int) -> bytes:
    """Return `length` bytes from `start`, fewer only at the end."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(length)


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end even when cancelled, and only then pass the cancellation on.

    A thread cannot be stopped: closing a file under it could hit another file that got the same
    descriptor meanwhile.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                continue
        if not task.cancelled():
            task.exception()  # marks it as retrieved
        raise


def _to_entry(name: os.DirEntry[str], folder: str) -> Entry | None:
    key = folder + name.name
    if key == DRAFTS or name.is_symlink():
        return None
    try:
        check_key(key)
        if name.is_dir(follow_symlinks=False):
            return Entry(key + "/", None)
        return Entry(key, _to_meta(key, name.stat(follow_symlinks=False)))
    except (InvalidError, OSError):
        return None  # not written by us, or deleted meanwhile


def _to_meta(key: str, status: os.stat_result) -> BlobMeta:
    if not stat.S_ISREG(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "not a file", key)
    return BlobMeta(
        key=key,
        size=status.st_size,
        etag=etag_of(status),
        last_modified=datetime.fromtimestamp(status.st_mtime_ns / 1e9, UTC),
    )
