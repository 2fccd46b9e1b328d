"""Snapshot errors. Each message names the snapshot and the way out.

StorageError
├── DataCorruptError        SnapshotCorruptError      the bytes differ from those written
└── FormatUnsupportedError  SnapshotUnsupportedError  written by a newer version or another codec
ConflictError
└── SnapshotAheadError      the snapshot covers records that the stream does not have
NotFoundError
└── HistoryTrimmedError     records are gone and no usable snapshot covers them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from streamfold.errors import (
    ConflictError,
    DataCorruptError,
    FormatUnsupportedError,
    NotFoundError,
)

#: Explains why a stream's first records are gone, and how to retain them.
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


class HistoryTrimmedError(NotFoundError):
    code = "history_trimmed"

    def __init__(self, first: int, problems: Sequence[str]) -> None:
        because = f" ({'; '.join(problems)})" if problems else ""
        super().__init__(
            f"the records before {first} are gone, {GONE}, and no usable snapshot covers them"
            f"{because}: name the location of the stream's snapshots. {KEEPING}"
        )
