"""Finds damage among the log files of a database on local disk, and sets files aside.

SlateDB numbers its WAL files without gaps, and replays those after the last one that its tables cover.
A writer that opens the database leaves an empty file, the mark that fences the previous writer. SlateDB
takes every empty file for such a mark (upstream defect 20), and the last file for the end of the log:
without the checks here, the records of a file truncated to nothing would silently disappear.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec

from streamfold.errors import DataCorruptError
from streamfold.store.engine.engine import Op
from streamfold.store.engine.native import EngineError, WalReader, code_of, message_of
from streamfold.undecodable import UNDECODABLE

MARKER: Final = "restore-point"
#: Log files that the first builds, which did not record this number, may have written unsynced: two
#: from commits, and some that the reclaimer wrote one after another.
_UNNOTED_IN_FLIGHT: Final = 8

_Number = Annotated[int, msgspec.Meta(ge=0)]


class RestorePoint(msgspec.Struct, frozen=True):
    """A manifest that is on the device, with its tables and all log files up to `wal`."""

    #: The machine's boot id at that time; None if the system has none.
    boot: str | None
    #: The number of the manifest; 0 in a new database.
    manifest: _Number
    #: The last log file known to be synced.
    wal: _Number
    #: The epoch of the writer that wrote this; None if an earlier build did.
    epoch: _Number | None = None
    #: Empty log files up to `wal`: each writer that opens the database leaves one. None if an
    #: earlier build wrote this.
    marks: tuple[_Number, ...] | None = None
    #: Log files that may have been written before the first of them was synced. 0 now that each is
    #: synced before it gets its name.
    in_flight: _Number = _UNNOTED_IN_FLIGHT

    def is_mark(self, number: int) -> bool:
        """Return whether log file `number` was empty when it was synced, as far as is known."""
        return number <= self.wal if self.marks is None else number in self.marks


def read_restore_point(folder: Path) -> RestorePoint | None:
    """Return the restore point of the database in `folder`, or None if it has none."""
    marker = folder / MARKER
    try:
        content = marker.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(content, type=RestorePoint)
    except UNDECODABLE as error:
        raise DataCorruptError(
            f"{marker} is damaged ({error}): restore the folder from a backup; only if the machine "
            "has not gone down since the store was last in use, delete this file and start again"
        ) from error


#: Folder for log files that are not replayed.
_SET_ASIDE = "set-aside"
#: Minimum bytes of a log file that contains a row. The smallest has about 200. SlateDB treats files
#: of up to 10 bytes as empty.
_SHORTEST = 64
#: Part of the message of an error caused by a panic.
_PANIC = "panicked"

#: Receives the rows of a dropped log file.
RowsListener: TypeAlias = Callable[[Sequence[Op]], None]


@dataclass(frozen=True, slots=True)
class LogDamage:
    """The first log file that cannot be replayed."""

    number: int
    #: What is wrong with it, as the end of a sentence.
    fault: str
    #: The last log file that is not empty.
    last: int


class WalFiles:
    """The WAL files of the database in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / "wal"

    def file(self, number: int) -> Path:
        return self.path / f"{number:020d}.sst"

    def numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in numbered(self.path))

    def sizes(self, after: int = 0) -> dict[int, int]:
        """Return the bytes of each log file after `after`, while other processes may delete files."""
        sizes = {}
        for path in numbered(self.path):
            if (number := int(path.stem)) > after:
                sizes[number] = path.stat().st_size
        return sizes

    async def first_damage(
        self, reader: WalReader, point: RestorePoint, after: int, openings: float, *, read: bool
    ) -> LogDamage | None:
        """Return the first damaged file after `after`. `reader` is used only if `read` is set.

        `openings` is the maximum number of marks that writers may have left since the restore
        point.
        """
        sizes = self.sizes(after)
        damage = _unwritten(sizes, point, after, openings)
        if not read:
            return damage
        end = max(sizes, default=after) if damage is None else damage.number - 1
        last = max((number for number, size in sizes.items() if size), default=after)
        fault = await first_unreadable(reader, after + 1, end)
        return LogDamage(*fault, last) if fault else damage

    async def read_rows(self, reader: WalReader, number: int) -> list[Op] | None:
        """Return the rows of a file, or None if it cannot be read."""
        if not self.file(number).exists() or not self.file(number).stat().st_size:
            return None
        try:
            rows = await reader.rows(number)
        except EngineError as error:
            if not is_damage(error):
                raise
            return None
        return [(row.key, row.value) for row in rows]

    def set_aside(self, first: int) -> tuple[Path, dict[int, int]]:
        """Move the files from `first` on to a new folder. Returns the folder and their sizes.

        Moves the last file first, so that after an interruption the log looks no less damaged.
        """
        sizes = {number: self.file(number).stat().st_size for number in self._from(first)}
        base = self._folder / _SET_ASIDE
        aside = (
            base / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{first}-{os.urandom(2).hex()}"
        )
        aside.mkdir(parents=True)
        for number in sorted(sizes, reverse=True):
            path = self.file(number)
            path.rename(aside / path.name)
        return aside, sizes

    def _from(self, first: int) -> list[int]:
        return [number for number in self.numbers() if number >= first]


def _unwritten(
    sizes: dict[int, int], point: RestorePoint, after: int, openings: float
) -> LogDamage | None:
    """Return the first file that is missing, truncated, or empty although no writer left it so."""
    written = max((number for number, size in sizes.items() if size), default=after)
    # The next writer's mark fences a writer. So only further marks follow a mark that the restore
    # point does not know because its writer ended too soon.
    unknown = {number for number in sizes if number > max(written, point.wal)}
    for number in range(after + 1, max(after, point.wal, *sizes) + 1):
        if number not in sizes:
            return LogDamage(number, "is missing", written)
        if 0 < sizes[number] < _SHORTEST:
            return LogDamage(number, f"has only {sizes[number]} bytes", written)
        if sizes[number] or point.is_mark(number):
            continue
        if number not in unknown or len(unknown) > openings:
            return LogDamage(number, "is empty", written)
    return None


async def first_unreadable(reader: WalReader, first: int, last: int) -> tuple[int, str] | None:
    """Return the first log file from `first` to `last` that `reader` cannot read, and why."""
    for number in range(first, last + 1):
        try:
            await reader.check(number)
        except EngineError as error:
            if not is_damage(error):
                raise
            return number, f"cannot be read ({message_of(error)})"
    return None


def is_damage(error: BaseException) -> bool:
    """Return whether a file was unreadable because of its content rather than the device.

    SlateDB's reader panics if a file is truncated so that its last bytes are not a valid offset
    (upstream defect 19).
    """
    return code_of(error) in ("data", "panic") or _PANIC in message_of(error)


def files_in(folder: Path) -> list[Path]:
    """Return the finished files in `folder`. SlateDB's drafts have a '#' in their names."""
    if not folder.exists():
        return []
    return [path for path in folder.iterdir() if "#" not in path.name]


def numbered(folder: Path) -> list[Path]:
    """Return log files or manifests, ignoring files of other programs."""
    return [path for path in files_in(folder) if path.stem.isdecimal()]


def describe(sizes: Iterable[int]) -> str:
    """Describe a number of files and their total bytes."""
    listed = list(sizes)
    return f"{len(listed)} file{'' if len(listed) == 1 else 's'} with {sum(listed)} bytes"
