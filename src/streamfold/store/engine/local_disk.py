"""Makes SlateDB's files on local disk survive a power cut.

After a power cut, any unsynced file written in the last half minute may be whole, truncated, full
of zeros or gone, independently of the files before and after it. Therefore:

1. The native module syncs each WAL file before giving it its name, and the WAL folder, before the
   commit is acknowledged.
2. Tables and manifests are written in the background and may be lost. That is harmless as long as an
   older manifest is whole, with every table it names and every WAL file after it. Such a manifest is
   a *restore point*. To create one, checkpoint the database, which pins a manifest and its tables;
   sync all files; then write to `restore-point` the manifest's number, the last WAL file known to be
   synced and the machine's boot id. A new database starts with an empty restore point.
3. SlateDB's collector would delete WAL files whose rows only an unsynced manifest covers. So it leaves
   WAL files alone, and this module deletes them once a restore point covers them.
4. On opening, a boot id that differs from the stored one means that the machine went down in between.
   Manifests newer than the restore point, and SlateDB's compaction notes, cannot be trusted and are
   not needed. They are removed, and SlateDB replays the WAL from the restore point. After a mere
   process crash the page cache is intact, and SlateDB replays the WAL from its newest manifest.
5. Before that, the WAL files to be replayed are checked (`wal_files.py`): none may be missing, or
   empty unless a writer left it so, and after a power cut each is read through. Each was whole on the
   device when it got its name, so damage means damage to acknowledged records. The opening is
   rejected, before anything is changed, unless the operator accepts the loss of exactly this file and
   all later ones. Earlier builds wrote up to `in_flight` files before syncing the first of them. In
   their logs, a damaged file among the last few, and any file after it, was never acknowledged, so
   they are moved away. So is the mark of an opening that ended before a restore point noted it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path

import msgspec

from streamfold.errors import DataCorruptError, DeviceFailedError, WriterFencedError
from streamfold.store.engine.freeze import frozen_log
from streamfold.store.engine.native import Admin, EngineError, SlateManifest, WalReader, message_of
from streamfold.store.engine.partial_io import PartialWrites, delete_slowly, shrink
from streamfold.store.engine.process_locks import exclusive
from streamfold.store.engine.wal_files import (
    MARKER,
    LogDamage,
    RestorePoint,
    RowsListener,
    WalFiles,
    describe,
    files_in,
    is_damage,
    numbered,
    read_restore_point,
)

logger = logging.getLogger(__name__)

_LOCK = "restore-point.lock"
_CHECKPOINT = "streamfold-restore-point"
#: Folder for second names of tables that SlateDB is about to delete.
_DELETED = "deleted"
#: Seconds allowed for another process to finish its restore point: it syncs everything written
#: since the previous one, which takes a slow device many seconds.
_LOCK_LIMIT = 60.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def sync_path(path: Path) -> None:
    """Sync the current contents of the file or folder at `path` to the device."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def current_boot() -> str | None:
    """Return an id that changes with each boot of the machine, or None if the system has none."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else None


def forget_restore_point(folder: Path) -> None:
    """Remove the restore point. Call this before opening the database without syncing."""
    if (folder / MARKER).exists():
        (folder / MARKER).unlink()
        sync_path(folder)


class LocalDisk:
    """The files of one database on local disk.

    `accept_loss` is the number of the log file that may be dropped, with all later ones, if it is
    damaged; `on_dropped` receives their rows. `sync`, `boot` and `lock_limit` are for tests.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sync: Callable[[Path], None] = sync_path,
        boot: str | None = None,
        accept_loss: int | None = None,
        on_dropped: RowsListener = lambda rows: None,
        lock_limit: float = _LOCK_LIMIT,
    ) -> None:
        self._folder = folder
        self._wal = WalFiles(folder)
        self._sync_path = sync
        self._boot = boot or current_boot()
        self._accept_loss = accept_loss
        self._on_dropped = on_dropped
        self._lock_limit = lock_limit
        self._epoch = 0
        #: The last log file that existed when this writer opened the database.
        self._taken_over = 0
        #: Empty log files left by this writer and earlier ones.
        self._marks: set[int] = set()
        self._synced: set[Path] = set()

    async def repair(self, admin: Admin, log: WalReader) -> None:
        """Check the log, and after a power cut revert to the last restore point.

        Call before opening.

        Raises DataCorruptError, without changing anything, if acknowledged records are damaged.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        async with self._alone():
            point = await asyncio.to_thread(read_restore_point, self._folder)
            if point is None:
                await asyncio.to_thread(self._mark_new)
                return
            rebooted = self._rebooted(point)
            read = rebooted or self._accept_loss is not None
            damage = await self._first_damage(admin, log, point, read=read)
            if damage is not None and damage.number == self._accept_loss:
                await self._tell_dropped(log, damage)
            elif damage is not None and not (rebooted and _in_flight(damage, point)):
                raise self._refusal(damage)
            if rebooted:
                await asyncio.to_thread(self._go_back, point.manifest)
            if damage is not None:
                await asyncio.to_thread(self._set_aside, damage, point)
            await asyncio.to_thread(self._delete_drafts)

    async def name_damage(self, admin: Admin, log: WalReader) -> None:
        """Raise DataCorruptError if a damaged log file explains why SlateDB could not be opened."""
        async with self._alone():
            point = await asyncio.to_thread(read_restore_point, self._folder)
            if point is not None:
                damage = await self._first_damage(admin, log, point, read=True)
                if damage is not None:
                    raise self._refusal(damage)

    def _rebooted(self, point: RestorePoint) -> bool:
        return self._boot is not None and point.boot != self._boot

    async def _first_damage(
        self, admin: Admin, log: WalReader, point: RestorePoint, *, read: bool
    ) -> LogDamage | None:
        newest = await self._manifest(admin, point)
        replayed = newest.replay_after if newest is not None else 0
        openings = 0.0
        if newest is not None and not self._rebooted(point):
            # Earlier builds did not record the number of openings.
            openings = math.inf if point.epoch is None else newest.writer_epoch - point.epoch
        return await self._wal.first_damage(log, point, replayed, openings, read=read)

    async def _manifest(self, admin: Admin, point: RestorePoint) -> SlateManifest | None:
        """Return the manifest from which SlateDB will replay the log, or None in a new database."""
        if not self._rebooted(point):
            return await admin.read_manifest()
        if point.manifest == 0:
            return None
        try:
            manifest = await admin.read_manifest(point.manifest)
        except EngineError as error:
            if not is_damage(error):
                raise
            fault = f"cannot be read ({message_of(error)})"
        else:
            if manifest is not None:
                return manifest
            fault = "is missing"
        raise DataCorruptError(
            f"{self._folder} needs manifest {point.manifest} after a power cut, but it {fault}: "
            "restore the folder from a backup"
        )

    def _refusal(self, damage: LogDamage) -> DataCorruptError:
        sizes = [size for size in self._wal.sizes(damage.number - 1).values() if size]
        return DataCorruptError(
            f"log file {self._wal.file(damage.number)} {damage.fault}, and its records were "
            f"acknowledged: restore the folder from a backup; or start with --accept-loss "
            f"{damage.number} to give up this file and all after it ({describe(sizes)}), which are "
            "then moved to the folder set-aside"
        )

    async def _tell_dropped(self, log: WalReader, damage: LogDamage) -> None:
        """Pass the readable rows of the dropped log files to `on_dropped`."""
        for number in range(damage.number, damage.last + 1):
            rows = await self._wal.read_rows(log, number)
            if rows is None:
                logger.error("what log file %s held is unknown", self._wal.file(number))
            else:
                self._on_dropped(rows)

    def _delete_drafts(self) -> None:
        """Delete drafts left by killed processes: tables of up to 64 MB that nothing else deletes.

        Drafts of log files that do not exist yet stay. If their writer is still alive, it is about to
        give the draft the file's name. By then, this process could have a draft of the same name: it
        would get the file's name, and the writer would acknowledge records that no file contains.
        """
        last = max(self._wal.numbers(), default=0)
        tables = self._folder / "compacted"
        delete_slowly(tables.glob("*#*"))
        delete_slowly(path for path in self._wal.path.glob("*#*") if _number(path) <= last)

    def _mark_new(self) -> None:
        """Write an empty restore point for a new database."""
        if numbered(self._folder / "manifest"):
            logger.warning(
                "%s has no restore point: it was last opened without syncs, or the file was removed; "
                "damage by a power cut before now cannot be told from what was never written",
                self._folder,
            )
        else:
            self._write_marker(RestorePoint(self._boot, 0, 0, 0, (), in_flight=0))

    def _go_back(self, manifest: int) -> None:
        manifests = {_number(path): path for path in numbered(self._folder / "manifest")}
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

    def _set_aside(self, damage: LogDamage, point: RestorePoint) -> None:
        """Move the damaged file and all later ones aside for inspection."""
        accepted = damage.number == self._accept_loss
        aside, sizes = self._wal.set_aside(damage.number)
        for path in (aside, aside.parent, self._wal.path, self._folder):
            self._sync(path)
        if damage.number <= point.wal:  # the log now ends before it, so this is not further damage
            marks = point.marks and tuple(mark for mark in point.marks if mark < damage.number)
            self._write_marker(msgspec.structs.replace(point, wal=damage.number - 1, marks=marks))
        for number, size in sizes.items():
            logger.log(
                logging.ERROR if accepted else logging.WARNING,
                "%s, with %d bytes, %s: moved to %s",
                self._wal.file(number),
                size,
                "is dropped as --accept-loss asks"
                if accepted
                else "was being written when the machine went down",
                aside,
            )

    def _sync(self, path: Path, before: Callable[[Path], None] | None = None) -> None:
        """Sync the file or folder, after calling `before`.

        An error from either means that the device failed.
        """
        try:
            if before is not None:
                before(path)
            self._sync_path(path)
        except (FileNotFoundError, PermissionError):
            raise
        except OSError as error:
            # The kernel may have dropped the pages and report success next time: never retry.
            raise DeviceFailedError(f"cannot sync {path}: {error.strerror}") from error

    async def take_over(self, admin: Admin, epoch: int) -> None:
        """Sync everything that existed on opening, because it may be read from now on."""
        self._epoch = epoch
        self._taken_over = await asyncio.to_thread(self._sync_found)
        async with self._alone():
            await self._make_restore_point(admin)

    def _sync_found(self) -> int:
        sizes = self._wal.sizes()
        for number in sizes:
            self._sync(self._wal.file(number))
        self._marks = {number for number, size in sizes.items() if not size}
        self._sync(self._wal.path)
        self._sync(self._folder)
        for folder in self._folder.parents:
            # Each parent up to the file system's mount point may be as new as the store.
            if folder.stat().st_dev != self._folder.stat().st_dev:
                break
            with suppress(PermissionError):  # if this process cannot read it, it did not create it
                self._sync(folder)
        return max(sizes, default=0)

    def _last_wal(self) -> int:
        """Return the last log file, synced like all before it.

        Raises if another writer created one.

        A writer that opens the database leaves an empty file, and files after that may not be
        synced.
        """
        sizes = self._wal.sizes(self._taken_over)
        if not all(sizes.values()):
            raise WriterFencedError
        return max(sizes, default=self._taken_over)

    async def collect(self, admin: Admin, delete_replaced: Callable[[], Awaitable[None]]) -> None:
        """Create a restore point, and delete the files that it makes obsolete.

        `delete_replaced` makes SlateDB delete tables and manifests that no checkpoint names. It
        deletes whole tables at once, which would stall commits, so a second name keeps each table
        until its space is freed in parts.
        """
        async with self._alone():
            manifest = await self._make_restore_point(admin)
            await asyncio.to_thread(self._keep_replaced, manifest.files)
            await delete_replaced()
            covered = manifest.replay_after
            if (needed := await frozen_log(admin)) is not None:
                covered = min(covered, needed)
            await _finish_in_thread(partial(self._delete_wal_below, covered))
        await asyncio.to_thread(self._delete_kept)

    def _keep_replaced(self, needed: set[str]) -> None:
        """Give each unneeded table a second name."""
        folder = self._folder / _DELETED
        folder.mkdir(exist_ok=True)
        for path in files_in(self._folder / "compacted"):
            if path.name not in needed:
                try:
                    (folder / path.name).hardlink_to(path)
                except FileExistsError:
                    continue  # left by an interrupted collection
                except OSError as error:
                    logger.debug("%s is deleted at once: %s", path, error)
                    return  # this file system has no hard links

    def _delete_kept(self) -> None:
        files = files_in(self._folder / _DELETED)
        for path in files:
            shrink(path)
        delete_slowly(files)

    async def finish(self) -> None:
        """Record that the whole log is synced. Call this after the database was closed.

        From then on, damage to any log file is recognized as damage.
        """
        async with self._alone():
            await _finish_in_thread(self._note_synced)

    def _note_synced(self) -> None:
        point = read_restore_point(self._folder)
        if point is not None and point.epoch == self._epoch:
            with suppress(WriterFencedError):
                self._write_marker(msgspec.structs.replace(point, wal=self._last_wal()))

    async def _make_restore_point(self, admin: Admin) -> SlateManifest:
        point = await asyncio.to_thread(read_restore_point, self._folder)
        if point is not None and (point.epoch or 0) > self._epoch:
            raise WriterFencedError
        newest = await admin.read_manifest()
        former = [] if newest is None else newest.checkpoints
        _, number = await admin.create_checkpoint(_CHECKPOINT)
        manifest = await admin.read_manifest(number)
        if manifest is None:
            raise DataCorruptError(
                f"{self._folder} has lost manifest {number}, which it had just now"
            )
        await _finish_in_thread(partial(self._write_restore_point, number))
        for checkpoint in former:
            if checkpoint.name == _CHECKPOINT:
                await admin.delete_checkpoint(checkpoint.id)
        return manifest

    def _alone(self) -> AbstractAsyncContextManager[None]:
        """Exclude the process that this one replaces, or that replaces it, while the context lasts."""
        return exclusive(self._folder / _LOCK, self._lock_limit)

    def _write_restore_point(self, manifest: int) -> None:
        synced_wal = self._last_wal()
        present = set()
        write_parts = PartialWrites().write
        for name in ("compacted", "manifest"):
            files = set(files_in(self._folder / name))
            for path in files - self._synced:
                self._sync_if_there(path, write_parts)
            present |= files
        self._synced = present
        for name in ("compacted", "manifest", "wal", ""):
            self._sync_if_there(self._folder / name)
        marks = tuple(sorted(mark for mark in self._marks if self._wal.file(mark).exists()))
        self._write_marker(
            RestorePoint(self._boot, manifest, synced_wal, self._epoch, marks, in_flight=0)
        )

    def _sync_if_there(self, path: Path, before: Callable[[Path], None] | None = None) -> None:
        try:
            self._sync(path, before)
        except FileNotFoundError:
            # SlateDB replaced it meanwhile. The checkpoint pins the files that matter.
            logger.debug("%s was deleted before it was synced", path)

    def _write_marker(self, point: RestorePoint) -> None:
        draft = self._folder / f"{MARKER}.new"
        draft.write_bytes(msgspec.json.encode(point))
        self._sync(draft)
        draft.rename(self._folder / MARKER)
        self._sync(self._folder)

    def _delete_wal_below(self, number: int) -> None:
        obsolete = [each for each in self._wal.numbers() if each < number]
        delete_slowly(map(self._wal.file, obsolete))


def _in_flight(damage: LogDamage, point: RestorePoint) -> bool:
    """Return whether a power cut alone explains the damage: nobody had awaited the file's sync."""
    return damage.number > point.wal and damage.last - damage.number < point.in_flight


async def _finish_in_thread(work: Callable[[], None]) -> None:
    """Run `work` to completion even if the caller is cancelled: the next caller must find it done.

    A restore point written after a newer one would name a manifest that may be deleted.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _number(path: Path) -> int:
    return int(path.name.split(".")[0])
