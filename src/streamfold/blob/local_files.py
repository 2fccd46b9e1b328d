"""Files that survive a power cut, and how they are read as blobs.

This is the one module that calls fsync for blobs. Neither obstore nor a plain `rename` does this. A
file system may write the new name to disk before the bytes under it, and leave an empty file after
a power cut, or forget the name, or the folder that it is in. So, in this order:

1. write the bytes to a draft that no listing shows, and fsync it: no name ever leads to half a blob;
2. create missing folders, and fsync the parent of each: the path to the blob is on disk;
3. give the draft its name, by rename (replaces) or by link (fails if the name is taken; the kernel
   decides between processes);
4. fsync the folder that holds the name. Only then does the call return.

A process that is killed between 1 and 3 leaves its draft in `DRAFTS`. Drafts are locked while they are
written, and a lock ends with its process: the next process that opens the store removes unlocked ones.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from streamfold.blob.blob_store import BlobMeta, check_key
from streamfold.errors import BlobOutcomeUnknownError, InvalidError

Fsync = Callable[[int], None]

#: Folder under the root that holds files not yet published; no key may begin with it.
DRAFTS = ".streamfold-drafts"
#: File in `DRAFTS` that compare-and-swap locks.
LOCK = "lock"
#: Folders remembered as being on disk: a bound on memory, not on folders.
KNOWN_FOLDERS_MAX = 10_000
#: Bytes that are written at once at most. Linux gives a file memory in pieces as large as what is
#: written at once; on a virtual machine, a copy to pieces of 1 MiB or more may take five times as long.
WRITE_AT_ONCE = 512 << 10


class DurableTree:
    """A folder tree in which a published file is on disk, with its name and all of its folders."""

    def __init__(self, root: Path, fsync: Fsync = os.fsync) -> None:
        self._root = root
        self._fsync = fsync
        # Folders whose own entry is known to be on disk. One that exists but is not in here may
        # just have been created by another process that has not yet called fsync.
        self._known = {root}
        self._secure_root()
        self._remove_dead_drafts()

    def open_draft(self) -> Draft:
        """Return a new file that no reader can see."""
        folder = self._root / DRAFTS
        while True:
            path = folder / uuid.uuid4().hex
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            except FileNotFoundError:
                folder.mkdir(exist_ok=True)
                continue
            draft = Draft(path, descriptor)
            if _try_lock(draft.descriptor) and os.fstat(draft.descriptor).st_nlink:
                return draft
            draft.close()  # a process that opens the store removed it before it was locked

    def publish(self, draft: Draft, target: Path, *, replace: bool) -> None:
        """Make the draft the file at `target`, on disk when this returns.

        Raises `FileExistsError` if the name is taken and `replace` is not set, once that name is
        itself on disk; `BlobOutcomeUnknownError` if the name is given but may not be on disk.
        """
        # The kernel's own timestamps are coarse: two files written within one tick, the second in
        # the first one's inode, would look the same.
        stamp = time.time_ns()
        os.utime(draft.descriptor, ns=(stamp, stamp))
        self._fsync(draft.descriptor)
        self._secure_folder(target.parent)
        if replace:
            draft.path.replace(target)
            draft.renamed = True
        else:
            self._link(draft.path, target)
        self._sync_effect(target)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude every other holder, in this process and in others; a kill releases the lock."""
        import fcntl  # Windows has none: other stores of this package must import there all the same

        folder = self._root / DRAFTS
        folder.mkdir(exist_ok=True)
        # Each call opens the file anew: a lock belongs to the opening, so threads exclude each
        # other too. The file stays, or a third one could lock a file that is not there any more.
        descriptor = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def secure_name(self, target: Path) -> None:
        """Return when the name of `target` is on disk, even if another process created it."""
        try:
            self._sync_folder(target.parent)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EINVAL):
                raise  # these two: a read-only file system, on which nothing is pending

    def remove(self, target: Path) -> None:
        """Remove the file at `target`, if any; on disk when this returns."""
        if not target.is_file():
            return
        target.unlink(missing_ok=True)
        self._sync_effect(target)

    def _link(self, draft: Path, target: Path) -> None:
        try:
            target.hardlink_to(draft)
        except FileExistsError:
            if target.is_dir():
                raise IsADirectoryError(errno.EISDIR, "is a folder", str(target)) from None
            # The winner may not have called fsync yet, and our caller will act on this.
            self._sync_folder(target.parent)
            raise

    def _sync_effect(self, target: Path) -> None:
        try:
            self._sync_folder(target.parent)
        except OSError as error:
            raise BlobOutcomeUnknownError(
                f"{target} was changed, but its folder cannot be synced to disk "
                f"({error.strerror}): a power cut may undo the change"
            ) from error

    def _secure_root(self) -> None:
        folders = [self._root, *self._root.parents]
        for path in reversed([folder for folder in folders if not folder.exists()]):
            _make_folder(path)
            self._sync_folder(path.parent)
        # An existing root may be as new; folders above it are the operator's.
        with suppress(PermissionError):
            self._sync_folder(self._root.parent)

    def _secure_folder(self, folder: Path) -> None:
        missing = []
        while folder != self._root and (folder not in self._known or not folder.is_dir()):
            missing.append(folder)
            folder = folder.parent
        for path in reversed(missing):
            _make_folder(path)
            self._sync_folder(path.parent)
            self._remember(path)

    def _remove_dead_drafts(self) -> None:
        """Remove the drafts of processes that were killed, unless this one may only read."""
        folder = self._root / DRAFTS
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return
        for path in folder.iterdir():
            if path.name == LOCK:
                continue
            with suppress(
                FileNotFoundError, PermissionError
            ):  # published, removed, or another user's
                draft = Draft(path, os.open(path, os.O_WRONLY))
                if _try_lock(draft.descriptor):
                    draft.close()
                else:
                    os.close(draft.descriptor)

    def _remember(self, folder: Path) -> None:
        if len(self._known) >= KNOWN_FOLDERS_MAX:
            self._known.clear()
        self._known.add(folder)

    def _sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._fsync(descriptor)
        finally:
            os.close(descriptor)


class Draft:
    """An unpublished file; `close` removes its draft name, published or not."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        #: Whether it has another name instead of its draft name.
        self.renamed = False

    def write(self, data: bytes | bytearray) -> None:
        """Append all of `data`."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self.descriptor, rest[:WRITE_AT_ONCE]) :]

    def close(self) -> None:
        """Remove the draft name, and close the file.

        In this order, because closing ends the lock: whoever takes a new draft for that of a dead
        process holds it until the name is gone, and its maker makes another.
        """
        try:
            if not self.renamed:
                with suppress(FileNotFoundError):  # another process took it for a dead one's
                    self.path.unlink()
        finally:
            os.close(self.descriptor)


def _try_lock(descriptor: int) -> bool:
    """Lock a file until it is closed; False if another opening of it is locked."""
    import fcntl  # Windows has none: other stores of this package must import there all the same

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_folder(path: Path) -> None:
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a file is in the way", str(path)) from None


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
    """Return an etag that differs for any two files of one name: `DurableTree` sets their times."""
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
