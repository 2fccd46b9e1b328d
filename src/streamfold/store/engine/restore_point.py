"""The restore point of a database on local disk, as the file `restore-point` notes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec

from streamfold.errors import DataCorruptError
from streamfold.undecodable import UNDECODABLE

MARKER: Final = "restore-point"
#: Log files that earlier builds, which note no number, may have written without a sync: two of commits,
#: and some that the reclaimer wrote one after the other.
_UNNOTED_IN_FLIGHT: Final = 8

_Number = Annotated[int, msgspec.Meta(ge=0)]


class RestorePoint(msgspec.Struct, frozen=True):
    """A manifest that is on the device with its tables and all log files up to `wal`."""

    #: The boot of the machine in which this was noted; None where the system has no id for it.
    boot: str | None
    #: The number of the manifest; 0 in a new database.
    manifest: _Number
    #: The last log file that is known to be synced.
    wal: _Number
    #: The opening that noted this; None if an earlier build did.
    epoch: _Number | None = None
    #: Empty log files up to `wal`: each writer that opens the database leaves one. None if an earlier
    #: build noted this.
    marks: tuple[_Number, ...] | None = None
    #: Log files that may be written before the first of them is synced.
    in_flight: _Number = _UNNOTED_IN_FLIGHT

    def is_mark(self, number: int) -> bool:
        """Whether log file `number` was empty when it was synced, as far as is known."""
        return number <= self.wal if self.marks is None else number in self.marks


def read_restore_point(folder: Path) -> RestorePoint | None:
    """The restore point of the database in `folder`; None if it has none."""
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
