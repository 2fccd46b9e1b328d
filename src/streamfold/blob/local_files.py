"""Writes files that survive a power cut, and reads them as blobs.

Only this module calls fsync for blobs: neither obstore nor a plain `rename` does. A file system may
store a new name before its bytes, which leaves an empty file after a power cut, or lose the name or
its folder. Hence this order:

1. write the bytes to an unlisted draft and fsync it, so that no name ever leads to half a blob;
2. create missing folders and fsync their parents, so that the path is on disk;
3. give the draft its name, by rename (replaces) or by link (fails if the name exists; the kernel
   decides between processes);
4. fsync the folder of the name, and only then return.

A process killed between 1 and 3 leaves its draft in `DRAFTS`. Drafts are locked while being
written, and the lock is released when its process ends. The next process that opens the store
removes unlocked drafts.
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

#: Folder of unpublished files under the root. No key may begin with it.
DRAFTS = ".streamfold-drafts"
#: Lock file of compare-and-swap in `DRAFTS`.
LOCK = "lock"
#: Maximum number of folders remembered as synced. Bounds memory, not the number of folders.
KNOWN_FOLDERS_MAX = 10_000
#: Maximum bytes per write. Linux allocates page cache in pieces as large as a write, and on a
#: virtual machine, copying to pieces of 1 MiB or more may take five times as long.
WRITE_AT_ONCE = 512 << 10


class DurableTree:
    """A folder tree where published files are on disk, including their names and folders."""

    def __init__(self, root: Path, fsync: Fsync = os.fsync) -> None:
        self._root = root
        self._fsync = fsync
        # Folders whose entries are known to be on disk. Any other existing folder may have just been
        # created by a process that has not called fsync yet.
        self._folders = {root}
        self._secure_root()
        self._remove_dead_drafts()

    def open_draft(self) -> DraftFile:
        """Return a new file that no reader can see."""
        folder = self._root / DRAFTS
        while True:
            path = folder / uuid.uuid4().hex
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            except FileNotFoundError:
                folder.mkdir(exist_ok=True)
                continue
            draft = DraftFile(path, descriptor)
            if _try_lock(draft.descriptor) and os.fstat(draft.descriptor).st_nlink:
                return draft
            draft.close()  # another process removed it before it was locked

    def publish(self, draft: DraftFile, target: Path, *, replace: bool) -> None:
        """Make the draft the file at `target`. It is on disk when this returns.

        Without `replace`, raises `FileExistsError` if the name exists, once that name is itself on
        disk. Raises `BlobOutcomeUnknownError` if the file has its name, but perhaps not on disk.
        """
        # The kernel's timestamps are coarse: two files written within one tick and with the same inode
        # would look the same.
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
        """Exclude all other lock holders in all processes. Killing the process releases the lock."""
        import fcntl  # Windows lacks fcntl, but the package's other stores must still import there

        folder = self._root / DRAFTS
        folder.mkdir(exist_ok=True)
        # Each call opens the file, because a lock belongs to the open file description, so threads
        # exclude each other too. The file stays, or a third process could lock a deleted file.
        descriptor = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def secure_name(self, target: Path) -> None:
        """Sync the name of `target`, even if another process created it."""
        try:
            self._sync_folder(target.parent)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EINVAL):
                raise  # unless the file system is read-only, where nothing is pending

    def remove(self, target: Path) -> None:
        """Remove the file at `target`, if any. The removal is on disk when this returns."""
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
            # The winner may not have called fsync yet, and our caller relies on the name.
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
        # An existing root may be new too. Folders above it belong to the operator.
        with suppress(PermissionError):
            self._sync_folder(self._root.parent)

    def _secure_folder(self, folder: Path) -> None:
        missing = []
        while folder != self._root and (folder not in self._folders or not folder.is_dir()):
            missing.append(folder)
            folder = folder.parent
        for path in reversed(missing):
            _make_folder(path)
            self._sync_folder(path.parent)
            self._remember(path)

    def _remove_dead_drafts(self) -> None:
        """Remove drafts of killed processes, unless this process may only read."""
        folder = self._root / DRAFTS
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return
        for path in folder.iterdir():
            if path.name == LOCK:
                continue
            with suppress(
                FileNotFoundError, PermissionError
            ):  # published, removed, or owned by another user
                draft = DraftFile(path, os.open(path, os.O_WRONLY))
                if _try_lock(draft.descriptor):
                    draft.close()
                else:
                    os.close(draft.descriptor)

    def _remember(self, folder: Path) -> None:
        if len(self._folders) >= KNOWN_FOLDERS_MAX:
            self._folders.clear()
        self._folders.add(folder)

    def _sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._fsync(descriptor)
        finally:
            os.close(descriptor)


class DraftFile:
    """An unpublished file. `close` removes its draft name, whether published or not."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        #: Whether a rename has replaced its draft name.
        self.renamed = False

    def write(self, data: bytes | bytearray) -> None:
        """Append all of `data`."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self.descriptor, rest[:WRITE_AT_ONCE]) :]

    def close(self) -> None:
        """Remove the draft name, then close the file.

        Closing releases the lock, so the name must go first. If another process mistakes a new
        draft for a dead one, it holds the lock until it has removed the name, and the owner creates
        another draft.
        """
        try:
            if not self.renamed:
                with suppress(FileNotFoundError):  # another process mistook it for a dead draft
                    self.path.unlink()
        finally:
            os.close(self.descriptor)


def _try_lock(descriptor: int) -> bool:
    """Lock a file until it is closed. Returns False if it is locked elsewhere."""
    import fcntl  # Windows lacks fcntl, but the package's other stores must still import there

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
class FolderEntry:
    """A folder entry: a blob with its key, or a folder whose name ends in a slash."""

    name: str
    meta: BlobMeta | None


def scan_folder(path: Path, folder: str) -> list[FolderEntry]:
    """Return the entries of `path` in byte order of their keys, which begin with `folder`.

    Folders sort with their slash, so that `a-b` comes before `a/`, as in keys.
    """
    try:
        with os.scandir(path) as names:
            entries = [_to_entry(name, folder) for name in names]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((entry for entry in entries if entry), key=lambda entry: entry.name)


def stat_blob(path: Path, key: str) -> BlobMeta:
    """Return the metadata of the file at `path`."""
    return _to_meta(key, path.stat())


def read_with_etag(path: Path) -> tuple[bytes, str]:
    """Return the bytes of the file at `path` and their etag."""
    with path.open("rb") as file:
        etag = etag_of(os.fstat(file.fileno()))
        return file.read(), etag


def etag_of(status: os.stat_result) -> str:
    """Return an etag unique among files of one name, because `DurableTree` sets their times."""
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
    """Await `work` to its end even if cancelled, and only then raise the cancellation.

    A thread cannot be stopped, and closing its file could hit another file with the same descriptor.
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


def _to_entry(name: os.DirEntry[str], folder: str) -> FolderEntry | None:
    key = folder + name.name
    if key == DRAFTS or name.is_symlink():
        return None
    try:
        check_key(key)
        if name.is_dir(follow_symlinks=False):
            return FolderEntry(key + "/", None)
        return FolderEntry(key, _to_meta(key, name.stat(follow_symlinks=False)))
    except (InvalidError, OSError):
        return None  # not written by us, or deleted in the meantime


def _to_meta(key: str, status: os.stat_result) -> BlobMeta:
    if not stat.S_ISREG(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "not a file", key)
    return BlobMeta(
        key=key,
        size=status.st_size,
        etag=etag_of(status),
        last_modified=datetime.fromtimestamp(status.st_mtime_ns / 1e9, UTC),
    )
