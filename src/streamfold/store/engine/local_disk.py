"""Makes SlateDB's files on local disk survive a power cut.

SlateDB writes files and renames them, but never syncs them (upstream defect 4): after a power cut any
file written in the last half minute may be whole, cut short, full of zeros or gone, independently of
files before and after it. Therefore:

1. Before a commit is acknowledged, its WAL file, all before it and the WAL folder are synced.
2. Tables and manifests are written in the background, and may be lost: that is harmless as long as an
   older manifest is whole, with every table it names and every WAL file after it. A *restore point* is
   such a manifest. To make one: checkpoint the database, which pins a manifest and its tables; sync
   all files; then write to `restore-point` the manifest's number, the last WAL file known to be synced
   and the id of this boot of the machine. A new database starts with an empty restore point.
3. SlateDB's collector would delete WAL files whose rows only an unsynced manifest covers. So it leaves
   WAL files alone, and this module deletes them once a restore point covers them.
4. On opening, a boot id other than the stored one means that the machine went down in between. Newer
   manifests than the restore point, and SlateDB's notes of compactions, cannot be trusted and are not
   needed. They are removed, and SlateDB replays the WAL from the restore point.
5. Before that, WAL files after the last one known to be synced are read through. Every acknowledged
   file is whole, and so are all before it; the first damaged file was never acknowledged, so it is
   moved away with all after it. An empty file is SlateDB's mark of a new writer. A valid mark was
   synced and stored before that writer's first ack, so an empty file found here is a damaged one.
   After a mere crash of the process the page cache is intact, and nothing is removed.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from slatedb.uniffi._slatedb_uniffi import slatedb as binding

from streamfold.errors import DataCorruptError, DeviceFailedError
from streamfold.store.engine.partial_io import PartialWrites, delete_slowly, shrink
from streamfold.store.engine.slatedb_binding import read_manifest
from streamfold.store.engine.slatedb_tables import table_files

logger = logging.getLogger(__name__)

_MARKER = "restore-point"
_LOCK = "restore-point.lock"
_CHECKPOINT = "streamfold-restore-point"
#: Folder for WAL files that a power cut damaged.
_SET_ASIDE = "set-aside"
#: Folder for second names of tables that SlateDB is about to delete.
_DELETED = "deleted"
#: Part of the message of an error that was a panic.
_PANIC = "panicked"
#: Seconds between checks whether another process has finished its restore point.
_LOCK_PAUSE = 0.02
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def sync_path(path: Path) -> None:
    """Return once the file or folder at `path` is on the device as it is now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def current_boot() -> str | None:
    """An id that changes whenever the machine starts; None where the system has none."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else None


def forget_restore_point(folder: Path) -> None:
    """Remove the restore point; call this before the database is opened without syncing."""
    if (folder / _MARKER).exists():
        (folder / _MARKER).unlink()
        sync_path(folder)


class LocalDisk:
    """The files of one database on local disk; `sync` and `boot` are arguments for tests."""

    def __init__(
        self,
        folder: Path,
        *,
        sync: Callable[[Path], None] = sync_path,
        boot: str | None = None,
    ) -> None:
        self._folder = folder
        self._sync_path = sync
        self._boot = boot or current_boot()
        self._next_wal = 0
        self._synced: set[Path] = set()
        self._lock = asyncio.Lock()

    async def repair(self, wal: Any) -> None:
        """Go back to the last restore point after a power cut; call this before opening.

        `wal` is SlateDB's reader of WAL files.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        async with self._alone():
            noted = await asyncio.to_thread(self._read_marker)
            if noted is None:
                await asyncio.to_thread(self._mark_new)
            elif self._boot is not None and noted["boot"] != self._boot:
                await asyncio.to_thread(self._go_back, noted["manifest"])
                await self._set_aside_spoilt(wal, noted["wal"] + 1)

    def _read_marker(self) -> dict[str, Any] | None:
        marker = self._folder / _MARKER
        if not marker.exists():
            return None
        try:
            noted: dict[str, Any] = json.loads(marker.read_text())
        except ValueError as error:
            raise DataCorruptError(f"{marker} cannot be read: {error}") from error
        return noted

    def _mark_new(self) -> None:
        """Write an empty restore point for a new database."""
        if not _numbered(self._folder / "manifest"):
            self._write_marker({"boot": self._boot, "manifest": 0, "wal": 0})

    def _go_back(self, manifest: int) -> None:
        manifests = {_number(path): path for path in _numbered(self._folder / "manifest")}
        if manifest and manifest not in manifests:
            raise DataCorruptError(
                f"{self._folder} needs manifest {manifest} after a power cut, but it is missing: "
                "restore the folder from a backup"
            )
        logger.warning(
            "the machine went down since %s was last in use: going back to manifest %d of %d; "
            "the log is replayed",
            self._folder,
            manifest,
            max(manifests, default=0),
        )
        for number, path in manifests.items():
            if number > manifest:
                path.unlink()
        for name in ("compactions", "gc"):
            if (folder := self._folder / name).exists():
                shutil.rmtree(folder)

    async def _set_aside_spoilt(self, wal: Any, first: int) -> None:
        """Keep the WAL files from `first` on up to the first damaged one; move the rest away."""
        last = first
        while _size(self._wal_path(last)):
            last += 1
        files = await wal.iterator(first)
        for number in range(first, last):
            try:
                await files.next()
            except (binding.Error.Data, binding.Error.Internal) as error:
                if not _is_damage(error):
                    raise
                last = number
                break
        await asyncio.to_thread(self._set_aside_from, last)

    def _set_aside_from(self, number: int) -> None:
        for path in _numbered(self._folder / "wal"):
            if _number(path) >= number:
                aside = self._folder / _SET_ASIDE
                aside.mkdir(exist_ok=True)
                path.replace(aside / path.name)
                logger.warning("%s was being written when the machine went down: moved away", path)

    def _sync(self, path: Path, before: Callable[[Path], None] | None = None) -> None:
        """Sync the file or folder, after `before`; an error of either means that the device failed."""
        try:
            if before is not None:
                before(path)
            self._sync_path(path)
        except (FileNotFoundError, PermissionError):
            raise
        except OSError as error:
            # The kernel may have dropped the pages and report success next time: never retry.
            raise DeviceFailedError(f"cannot sync {path}: {error.strerror}") from error

    async def take_over(self, admin: Any) -> None:
        """Sync everything that was found on opening, because it may be read from now on."""
        wal = await asyncio.to_thread(self._sync_found)
        self._next_wal = wal + 1
        async with self._alone():
            await self._make_restore_point(admin)

    def _sync_found(self) -> int:
        last = 0
        for path in _numbered(self._folder / "wal"):
            self._sync(path)
            last = max(last, _number(path))
        self._sync(self._folder / "wal")
        self._sync(self._folder)
        for folder in self._folder.parents:
            # Each parent up to the mount point of the file system may be as new as the store.
            if folder.stat().st_dev != self._folder.stat().st_dev:
                break
            with suppress(PermissionError):  # not readable for us, so not created by us
                self._sync(folder)
        return last

    async def sync_wal(self) -> None:
        """Return once every WAL file that exists now is on the device.

        WAL files are numbered without gaps, so the first one missing is the end.
        """
        async with self._lock:
            if self._wal_path(self._next_wal).exists():
                await asyncio.to_thread(self._sync_new_wal)

    def _sync_new_wal(self) -> None:
        number = self._next_wal
        while (path := self._wal_path(number)).exists():
            self._sync(path)
            number += 1
        self._sync(self._folder / "wal")
        self._next_wal = number

    async def collect(self, admin: Any, delete_replaced: Callable[[], Awaitable[None]]) -> None:
        """Make a restore point, and delete the files that it makes obsolete.

        `delete_replaced` has SlateDB delete tables and manifests that no checkpoint names. It deletes
        whole tables at once, for which commits would wait: a second name keeps each, until its space
        is freed in parts.
        """
        async with self._alone():
            manifest = await self._make_restore_point(admin)
            await asyncio.to_thread(self._keep_replaced, table_files(manifest))
            await delete_replaced()
            # An unsynced file must stay: the search for the next file to sync would end at the gap.
            covered = min(manifest.replay_after_wal_id, self._next_wal)
            await _finish_in_thread(self._delete_wal_below, covered)
        await asyncio.to_thread(self._delete_kept)

    def _keep_replaced(self, needed: set[str]) -> None:
        """Give each table that is not needed a second name."""
        folder = self._folder / _DELETED
        folder.mkdir(exist_ok=True)
        for path in _files(self._folder / "compacted"):
            if path.name not in needed:
                try:
                    (folder / path.name).hardlink_to(path)
                except FileExistsError:
                    continue  # from a collection that was interrupted
                except OSError as error:
                    logger.debug("%s is deleted at once: %s", path, error)
                    return  # this file system has no hard links

    def _delete_kept(self) -> None:
        kept = _files(self._folder / _DELETED)
        for path in kept:
            shrink(path)
        delete_slowly(kept)

    async def _make_restore_point(self, admin: Any) -> Any:
        former = await admin.list_checkpoints(_CHECKPOINT)
        options = binding.CheckpointOptions(lifetime_ms=None, source=None, name=_CHECKPOINT)
        made = await admin.create_detached_checkpoint(options)
        manifest = await read_manifest(admin, made.manifest_id)
        await _finish_in_thread(self._write_restore_point, made.manifest_id)
        for checkpoint in former:
            await admin.delete_checkpoint(checkpoint.id)
        return manifest

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Exclude the process that this one replaces, or that replaces it, while the context lasts."""
        handle = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not _locked(handle):  # noqa: ASYNC110  # the kernel sends no event for it
                await asyncio.sleep(_LOCK_PAUSE)
            yield
        finally:
            os.close(handle)

    def _write_restore_point(self, manifest: int) -> None:
        synced_wal = self._next_wal - 1
        present = set()
        write_parts = PartialWrites().write
        for name in ("compacted", "manifest"):
            files = set(_files(self._folder / name))
            for path in files - self._synced:
                self._sync_if_there(path, write_parts)
            present |= files
        self._synced = present
        for name in ("compacted", "manifest", "wal", ""):
            self._sync_if_there(self._folder / name)
        # Another process may have synced more: a new writer's mark must never count as damaged.
        former = self._read_marker() or {"wal": 0}
        wal = max(synced_wal, former["wal"])
        self._write_marker({"boot": self._boot, "manifest": manifest, "wal": wal})

    def _sync_if_there(self, path: Path, before: Callable[[Path], None] | None = None) -> None:
        try:
            self._sync(path, before)
        except FileNotFoundError:
            # SlateDB replaced it meanwhile. The checkpoint pins the files that matter.
            logger.debug("%s was deleted before it was synced", path)

    def _write_marker(self, noted: dict[str, Any]) -> None:
        draft = self._folder / f"{_MARKER}.new"
        draft.write_text(json.dumps(noted))
        self._sync(draft)
        draft.rename(self._folder / _MARKER)
        self._sync(self._folder)

    def _delete_wal_below(self, number: int) -> None:
        delete_slowly(path for path in _numbered(self._folder / "wal") if _number(path) < number)

    def _wal_path(self, number: int) -> Path:
        return self._folder / "wal" / f"{number:020d}.sst"


def _is_damage(error: Any) -> bool:
    """Whether reading a WAL file failed because of its content, and not because of the device.

    Where the last bytes of a file that is cut short are no offset in it, SlateDB's reader panics
    (upstream defect 19).
    """
    return isinstance(error, binding.Error.Data) or _PANIC in str(error)


async def _finish_in_thread(work: Callable[[int], None], number: int) -> None:
    """Run `work` to its end even if the caller is cancelled: the next caller must find it done.

    A restore point written after a newer one would name a manifest that may be deleted.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work, number))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _files(folder: Path) -> list[Path]:
    """Finished files: SlateDB's drafts have a '#' in their names."""
    if not folder.exists():
        return []
    return [path for path in folder.iterdir() if "#" not in path.name]


def _numbered(folder: Path) -> list[Path]:
    """Log files, or manifests; files of other programs are left alone."""
    return [path for path in _files(folder) if path.stem.isdecimal()]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _number(path: Path) -> int:
    return int(path.name.split(".")[0])
