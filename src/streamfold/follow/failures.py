"""What can be wrong with snapshots, as errors; each names the snapshot and the way out.

StorageError
├── DataCorruptError        SnapshotCorruptError      its bytes are not what was written
└── FormatUnsupportedError  SnapshotUnsupportedError  written by a newer version, or another codec
ConflictError
└── SnapshotAheadError      it covers records that the stream does not have
NotFoundError
└── HistoryTrimmedError     records are gone, and no snapshot covers them
RetryLaterError
└── SnapshotOutrunError     the stream moved on faster than the snapshot could be written
"""

from __future__ import annotations

from collections.abc import Sequence

from streamfold.errors import (
    ConflictError,
    DataCorruptError,
    FormatUnsupportedError,
    NotFoundError,
    RetryLaterError,
)


class SnapshotCorruptError(DataCorruptError):
    code = "snapshot_corrupt"

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            f"snapshot {name} is corrupt: {reason}; delete it, or restore from an earlier one"
        )


class SnapshotUnsupportedError(FormatUnsupportedError):
    code = "snapshot_unsupported"

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"snapshot {name} cannot be read here: {reason}")


class SnapshotAheadError(ConflictError):
    code = "snapshot_ahead"

    def __init__(self, name: str, cursor: int, tail: int) -> None:
        super().__init__(
            f"{name} covers records before {cursor}, but the stream's tail is {tail}: the stream was "
            "deleted and created again, or this is another stream; use the snapshots that belong "
            "to it, or delete these"
        )


class HistoryTrimmedError(NotFoundError):
    code = "history_trimmed"

    def __init__(self, first: int, problems: Sequence[str]) -> None:
        because = f" ({'; '.join(problems)})" if problems else ""
        super().__init__(
            f"the records before {first} are trimmed and no usable snapshot covers them{because}: "
            "name the place where its snapshots are kept"
        )


class SnapshotOutrunError(RetryLaterError):
    code = "snapshot_outrun"

    def __init__(self, attempts: int, cursor: int) -> None:
        super().__init__(
            f"other records were appended before the snapshot in each of {attempts} attempts, the last "
            f"at {cursor}: try when the stream is quieter, or keep snapshots outside the stream"
        )
