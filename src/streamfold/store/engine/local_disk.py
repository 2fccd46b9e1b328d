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
   needed. They are removed, and SlateDB replays the WAL from the restore point. After a mere crash of
   the process the page cache is intact, and SlateDB replays the WAL from its newest manifest.
5. Before that, the WAL files to be replayed are checked (`wal_files.py`): none may be missing, or empty
   unless a writer left it so, and after a power cut each is read through. Damage after the restore
   point's last synced file may be due to the power cut, but only close to the end of the log: each
   commit writes one WAL file, `commits_in_flight` of them at a time, and the reclaimer one more. A
   damaged file with more than that from it to the end was synced before the last one was begun. So if
   it is among the last few, it was never acknowledged, and neither was any after it: they are moved
   away. Any other damage is damage to acknowledged records. The opening is refused, before anything
   is changed, unless the operator accepts the loss of this very file and all after it.
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
from typing import Any

import msgspec
from slatedb.uniffi._slatedb_uniffi import slatedb as binding

from streamfold.errors import DataCorruptError, DeviceFailedError, WriterFencedError
from streamfold.store.engine.freeze import frozen_log
from streamfold.store.engine.partial_io import PartialWrites, delete_slowly, shrink
from streamfold.store.engine.process_locks import exclusive
from streamfold.store.engine.restore_point import MARKER, RestorePoint, read_restore_point
from streamfold.store.engine.slatedb_binding import read_manifest
from streamfold.store.engine.slatedb_tables import table_files
from streamfold.store.engine.wal_files import (
    LogDamage,
    RowsListener,
    WalFiles,
    describe,
    files_in,
    is_damage,
    numbered,
)

logger = logging.getLogger(__name__)

_LOCK = "restore-point.lock"
_CHECKPOINT = "streamfold-restore-point"
#: Folder for second names of tables that SlateDB is about to delete.
_DELETED = "deleted"
#: Log files that may be written before the first of them is synced, with the default settings: two of
#: commits and one of the reclaimer.
_IN_FLIGHT = 3
#: Seconds that another process may take to finish its restore point: it syncs what it has written since
#: the one before, which takes a slow device many seconds.
_LOCK_LIMIT = 60.0
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
    if (folder / MARKER).exists():
        (folder / MARKER).unlink()
        sync_path(folder)


class LocalDisk:
    """The files of one database on local disk; `sync`, `boot` and `lock_limit` are for tests.

    `in_flight` log files may be written before the first of them is synced. `accept_loss` is the number
    of the log file from which on all may be dropped if it is damaged; `on_dropped` gets their rows.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sync: Callable[[Path], None] = sync_path,
        boot: str | None = None,
        in_flight: int = _IN_FLIGHT,
        accept_loss: int | None = None,
        on_dropped: RowsListener = lambda rows: None,
        lock_limit: float = _LOCK_LIMIT,
    ) -> None:
        self._folder = folder
        self._wal = WalFiles(folder)
        self._sync_path = sync
        self._boot = boot or current_boot()
        self._in_flight = in_flight
        self._accept_loss = accept_loss
        self._on_dropped = on_dropped
        self._lock_limit = lock_limit
        self._epoch = 0
        self._next_wal = 0
        #: Empty log files, which this writer and those before it left.
        self._marks: set[int] = set()
        #: Whether another writer has left its mark.
        self._fenced = False
        self._synced: set[Path] = set()
        self._lock = asyncio.Lock()

    async def repair(self, admin: Any, wal: Any) -> None:
        """Check the log, and go back to the last restore point after a power cut; call before opening.

        `wal` is SlateDB's reader of WAL files. DataCorruptError if acknowledged records are damaged;
        then nothing was changed.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        async with self._alone():
            point = await asyncio.to_thread(read_restore_point, self._folder)
            if point is None:
                await asyncio.to_thread(self._mark_new)
                return
            rebooted = self._rebooted(point)
            read = rebooted or self._accept_loss is not None
            damage = await self._first_damage(admin, wal, point, read=read)
            if damage is not None and damage.number == self._accept_loss:
                await self._tell_dropped(wal, damage)
            elif damage is not None and not (rebooted and _in_flight(damage, point)):
                raise self._refusal(damage)
            if rebooted:
                await asyncio.to_thread(self._go_back, point.manifest)
            if damage is not None:
                await asyncio.to_thread(self._set_aside, damage, point)

    async def name_damage(self, admin: Any, wal: Any) -> None:
        """Raise DataCorruptError if a log file is damaged: SlateDB could not be opened."""
        async with self._alone():
            point = await asyncio.to_thread(read_restore_point, self._folder)
            if point is not None:
                damage = await self._first_damage(admin, wal, point, read=True)
                if damage is not None:
                    raise self._refusal(damage)

    def _rebooted(self, point: RestorePoint) -> bool:
        return self._boot is not None and point.boot != self._boot

    async def _first_damage(
        self, admin: Any, wal: Any, point: RestorePoint, *, read: bool
    ) -> LogDamage | None:
        newest = await self._manifest(admin, point)
        replayed = newest.replay_after_wal_id if newest is not None else 0
        openings = 0.0
        if newest is not None and not self._rebooted(point):
            # Earlier builds did not note how many there were.
            openings = math.inf if point.epoch is None else newest.writer_epoch - point.epoch
        return await self._wal.first_damage(wal, point, replayed, openings, read=read)

    async def _manifest(self, admin: Any, point: RestorePoint) -> Any:
        """The manifest from which SlateDB will replay the log; None in a new database."""
        if not self._rebooted(point):
            return await read_manifest(admin)
        if point.manifest == 0:
            return None
        try:
            manifest = await read_manifest(admin, point.manifest)
        except (binding.Error.Data, binding.Error.Internal, binding.InternalError) as error:
            if not is_damage(error):
                raise
            fault = f"cannot be read ({getattr(error, 'message', error)})"
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

    async def _tell_dropped(self, wal: Any, damage: LogDamage) -> None:
        """Pass on what is in those files that can be read."""
        for number in range(damage.number, damage.last + 1):
            rows = await self._wal.read_rows(wal, number)
            if rows is None:
                logger.error("what log file %s held is unknown", self._wal.file(number))
            else:
                self._on_dropped(rows)

    def _mark_new(self) -> None:
        """Write an empty restore point for a new database."""
        if numbered(self._folder / "manifest"):
            logger.warning(
                "%s has no restore point: it was last opened without syncs, or the file was removed; "
                "damage by a power cut before now cannot be told from what was never written",
                self._folder,
            )
        else:
            self._write_marker(RestorePoint(self._boot, 0, 0, 0, (), self._in_flight))

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
        """Move the damaged file and all after it away, for whoever wants to look at them."""
        accepted = damage.number == self._accept_loss
        aside, sizes = self._wal.set_aside(damage.number)
        for path in (aside, aside.parent, self._wal.path, self._folder):
            self._sync(path)
        if damage.number <= point.wal:  # the log ends before it now: that is no further damage
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

    async def take_over(self, admin: Any, epoch: int) -> None:
        """Sync everything that was found on opening, because it may be read from now on."""
        self._epoch = epoch
        wal = await asyncio.to_thread(self._sync_found)
        self._next_wal = wal + 1
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
            # Each parent up to the mount point of the file system may be as new as the store.
            if folder.stat().st_dev != self._folder.stat().st_dev:
                break
            with suppress(PermissionError):  # not readable for us, so not created by us
                self._sync(folder)
        return max(sizes, default=0)

    async def sync_wal(self) -> None:
        """Return once every WAL file that exists now is on the device.

        WAL files are numbered without gaps, so the first one missing is the end.
        """
        async with self._lock:
            if self._wal.file(self._next_wal).exists():
                await asyncio.to_thread(self._sync_new_wal)

    def _sync_new_wal(self) -> None:
        number = self._next_wal
        while (path := self._wal.file(number)).exists():
            self._sync(path)
            self._fenced |= not path.stat().st_size
            number += 1
        self._sync(self._wal.path)
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
            if (needed := await frozen_log(admin)) is not None:
                covered = min(covered, needed)
            await _finish_in_thread(partial(self._delete_wal_below, covered))
        await asyncio.to_thread(self._delete_kept)

    def _keep_replaced(self, needed: set[str]) -> None:
        """Give each table that is not needed a second name."""
        folder = self._folder / _DELETED
        folder.mkdir(exist_ok=True)
        for path in files_in(self._folder / "compacted"):
            if path.name not in needed:
                try:
                    (folder / path.name).hardlink_to(path)
                except FileExistsError:
                    continue  # from a collection that was interrupted
                except OSError as error:
                    logger.debug("%s is deleted at once: %s", path, error)
                    return  # this file system has no hard links

    def _delete_kept(self) -> None:
        kept = files_in(self._folder / _DELETED)
        for path in kept:
            shrink(path)
        delete_slowly(kept)

    async def finish(self) -> None:
        """Note that the whole log is synced; call this after the database was closed.

        From then on, damage to any log file is known to be damage.
        """
        await self.sync_wal()
        async with self._alone():
            await _finish_in_thread(self._note_synced)

    def _note_synced(self) -> None:
        point = read_restore_point(self._folder)
        if point is not None and point.epoch == self._epoch and not self._fenced:
            self._write_marker(msgspec.structs.replace(point, wal=self._next_wal - 1))

    async def _make_restore_point(self, admin: Any) -> Any:
        point = await asyncio.to_thread(read_restore_point, self._folder)
        if self._fenced or (point is not None and (point.epoch or 0) > self._epoch):
            raise WriterFencedError
        former = await admin.list_checkpoints(_CHECKPOINT)
        options = binding.CheckpointOptions(lifetime_ms=None, source=None, name=_CHECKPOINT)
        made = await admin.create_detached_checkpoint(options)
        manifest = await read_manifest(admin, made.manifest_id)
        await _finish_in_thread(partial(self._write_restore_point, made.manifest_id))
        for checkpoint in former:
            await admin.delete_checkpoint(checkpoint.id)
        return manifest

    def _alone(self) -> AbstractAsyncContextManager[None]:
        """Exclude the process that this one replaces, or that replaces it, while the context lasts."""
        return exclusive(self._folder / _LOCK, self._lock_limit)

    def _write_restore_point(self, manifest: int) -> None:
        synced_wal = self._next_wal - 1
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
            RestorePoint(self._boot, manifest, synced_wal, self._epoch, marks, self._in_flight)
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
    """Whether a power cut alone explains the damage: nobody waited for a sync of the file yet."""
    return damage.number > point.wal and damage.last - damage.number < point.in_flight


async def _finish_in_thread(work: Callable[[], None]) -> None:
    """Run `work` to its end even if the caller is cancelled: the next caller must find it done.

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
