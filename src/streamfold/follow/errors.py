"""What can be wrong with snapshots, as errors; each names the snapshot and the way out.

StorageError
├── DataCorruptError        SnapshotCorruptError      its bytes are not what was written
└── FormatUnsupportedError  SnapshotUnsupportedError  written by a newer version, or another codec
ConflictError
├── SnapshotAheadError      it covers records that the stream does not have
└── SnapshotFoldError       its state was made by another fold
NotFoundError
└── HistoryTrimmedError     records are gone, and no snapshot covers them
RetryLaterError
└── SnapshotOutrunError     the stream was trimmed by others faster than a snapshot could be written
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from streamfold.errors import (
    ConflictError,
    DataCorruptError,
    FormatUnsupportedError,
    NotFoundError,
    RetryLaterError,
)

#: Why records at the beginning of a stream are gone, and how to keep them.
GONE: Final = "trimmed or older than the stream's retention"
KEEPING: Final = (
    "Streams keep records for 7 days unless their retention says otherwise: create those that are "
    "folded from the start with an infinite one, as in `streamfold create-stream NAME "
    "--retention-policy infinite`, or take snapshots before records expire."
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


class SnapshotFoldError(ConflictError):
    code = "snapshot_fold_mismatch"

    def __init__(self, name: str, made_with: str, fold: str) -> None:
        super().__init__(
            f"snapshot {name} was made with the fold {made_with!r}, not with {fold!r}: use the fold "
            "that made it, or keep the snapshots of each fold in a location of their own"
        )


class HistoryTrimmedError(NotFoundError):
    code = "history_trimmed"

    def __init__(self, first: int, problems: Sequence[str]) -> None:
        because = f" ({'; '.join(problems)})" if problems else ""
        super().__init__(
            f"the records before {first} are gone, {GONE}, and no usable snapshot covers them"
            f"{because}: name the location of the stream's snapshots. {KEEPING}"
        )


class SnapshotOutrunError(RetryLaterError):
    code = "snapshot_outrun"

    def __init__(self, attempts: int, cursor: int) -> None:
        super().__init__(
            f"others trimmed the stream during each of {attempts} attempts to write a snapshot, the "
            f"last at {cursor}: try again, or let only one snapshot taker trim the stream"
        )
