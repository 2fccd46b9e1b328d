"""What can be wrong with a source of changes, as errors; each names the way out.

InvalidError
├── SourceUnusableError         the database, a table or a publication is not set up for ingest
├── ForeignStreamError          the stream has records that another program wrote
└── RowTooLargeError            a row is larger than a record may be
ConflictError
├── SlotLostError               changes are lost, because the slot is gone or was moved: copy again
└── IngestFencedError           another ingester has taken over: stop
RetryLaterError
├── SourceUnavailableError      the database does not answer, or the slot is in use
│   └── SnapshotLostError       the first copy needs another snapshot
└── CopyStaleError              a table has to be copied again, which the next session does
"""

from __future__ import annotations

from streamfold.errors import ConflictError, InvalidError, RetryLaterError


class SourceUnusableError(InvalidError):
    code = "source_unusable"


class ForeignStreamError(InvalidError):
    code = "stream_foreign"

    def __init__(self, stream: str, seq_num: int) -> None:
        super().__init__(
            f"record {seq_num} of stream {stream!r} has no source position, so this ingester did not "
            "write it: name another prefix for the streams, or delete this one"
        )


class RowTooLargeError(InvalidError):
    code = "row_too_large"

    def __init__(
        self, table: str, key: str, column: str, size: int, limit: int, *, copying: bool = False
    ) -> None:
        # A change stays in the database's log, whatever becomes of the row.
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


class IngestFencedError(ConflictError):
    code = "ingest_fenced"

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"another ingester has taken over stream {stream!r}, so this one stops: run one ingester "
            "for each slot"
        )


class SourceUnavailableError(RetryLaterError):
    code = "source_unavailable"


class SnapshotLostError(SourceUnavailableError):
    """The connection of a copy does not find the snapshot that another connection exported."""

    def __init__(self, database: str) -> None:
        super().__init__(
            f"{database} has lost the snapshot of the first copy, as it does when it restarts: the "
            "copy continues in another one"
        )


class CopyStaleError(RetryLaterError):
    """Rows that the stream has would look different now, or changes of them were not sent."""

    code = "copy_stale"

    def __init__(self, table: str, reason: str) -> None:
        super().__init__(f"table {table} is copied again: {reason}")
        self.table = table
