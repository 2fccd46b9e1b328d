"""Ingest errors. Each message names the way out.

InvalidError
├── SourceUnusableError         database, table or publication is not set up for ingest
└── RowTooLargeError            a row is larger than a record may be
ConflictError
└── SlotLostError               changes are lost, because the slot is gone or was moved: copy again
RetryLaterError
├── SourceUnavailableError      the database does not answer, or the slot is in use
│   └── SnapshotLostError       the first copy needs another snapshot
└── CopyStaleError              the next session copies the table again
"""

from __future__ import annotations

from streamfold.errors import ConflictError, InvalidError, RetryLaterError


class SourceUnusableError(InvalidError):
    code = "source_unusable"


class RowTooLargeError(InvalidError):
    code = "row_too_large"

    def __init__(
        self, table: str, key: str, column: str, size: int, limit: int, *, copying: bool = False
    ) -> None:
        # The change stays in the database's log even if the row is corrected.
        shorten = "shorten the value" + ("" if copying else ", and run once with --recopy")
        super().__init__(
            f"the row {key} of table {table} takes {size} bytes in a record, which may have {limit}, "
            f"most of them in column {column!r}: {shorten}; or publish the table without that column "
            f"(ALTER PUBLICATION … DROP TABLE {table}, then ADD TABLE {table} (…) with the other "
            "columns), and start again"
        )


class SlotLostError(ConflictError):
    code = "slot_lost"

    def __init__(self, slot: str, reason: str) -> None:
        super().__init__(
            f"replication slot {slot!r} {reason}: changes may be missing, so nothing was appended. "
            "Run `streamfold ingest postgres` once with --recopy, which copies the tables again"
        )


class SourceUnavailableError(RetryLaterError):
    code = "source_unavailable"


class SnapshotLostError(SourceUnavailableError):
    """Raised if a copy's connection cannot find the snapshot that another connection exported."""

    def __init__(self, database: str) -> None:
        super().__init__(
            f"{database} has lost the snapshot of the first copy, as it does when it restarts: the "
            "copy continues in another one"
        )


class CopyStaleError(RetryLaterError):
    """Raised if rows in the stream are outdated, or some of their changes were not sent."""

    code = "copy_stale"

    def __init__(self, table: str, reason: str) -> None:
        super().__init__(f"table {table} is copied again: {reason}")
        self.table = table
