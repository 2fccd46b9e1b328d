"""The status of a table's writer, for `/status` and metrics."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from typing import Protocol

import msgspec


class State(enum.StrEnum):
    """The state of a table's writer."""

    STARTING = "starting"
    RUNNING = "running"
    #: After a transient failure, it retries from what is committed.
    RETRYING = "retrying"
    #: After a permanent failure, see `last_error`. Other tables continue.
    STOPPED = "stopped"
    #: Another writer took the table.
    FENCED = "fenced"
    #: Stopped on request, with everything flushed.
    CLOSED = "closed"

    @property
    def is_final(self) -> bool:
        return self in (State.STOPPED, State.FENCED, State.CLOSED)


class TableFailure(msgspec.Struct, frozen=True):
    """The current error; `code` is stable."""

    code: str
    message: str
    at: str


class ArtifactStatus(msgspec.Struct, frozen=True):
    """A committed artifact."""

    position: str
    at: str
    epoch: int
    size_bytes: int
    #: Rows of a base, changes of a diff.
    rows: int
    #: Why a base was written.
    reason: str | None = None


class DeadLetterStatus(msgspec.Struct, frozen=True):
    """Undecodable records, stored with the reason."""

    #: Since the table began.
    total: int
    #: A folder, or a stream.
    location: str
    #: The first of the last batch with any since this process started, and its reason.
    seq_num: int | None = None
    reason: str | None = None


class Counts(msgspec.Struct, frozen=True):
    """Counts since this process started."""

    bases: int = 0
    diffs: int = 0
    records: int = 0
    changes: int = 0
    dead_letters: int = 0
    ignored: int = 0
    failures: int = 0
    #: Transactions published in parts because no end arrived.
    transactions_cut: int = 0
    #: Failed writes of versions of the Delta log.
    delta_errors: int = 0
    #: By destination and by sink.
    destination_errors: dict[str, int] = {}
    event_errors: dict[str, int] = {}


class SparkCounts(msgspec.Struct, frozen=True):
    """Spark's work since this process started; a job of several tables counts for each."""

    jobs: int = 0
    tasks: int = 0
    #: Records taken in, and rows of folded bases; their bytes as Arrow data, and as files.
    rows: int = 0
    bytes: int = 0

    def plus(self, more: SparkCounts) -> SparkCounts:
        return SparkCounts(
            self.jobs + more.jobs,
            self.tasks + more.tasks,
            self.rows + more.rows,
            self.bytes + more.bytes,
        )


class TableStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One table, at one moment."""

    table: str
    stream: str
    state: State
    #: Whether the base is durable and the last update took in all that the stream held.
    ready: bool = False
    #: The last record that was read.
    position: int | None = None
    #: The manifest's positions, None before the first base.
    manifest_head: str | None = None
    #: Changes before this position are missing, because the stream had lost them when the archive
    #: began; None for a complete table.
    incomplete_before: str | None = None
    epoch: int | None = None
    #: Records of the stream that are not taken in, even while the table is stuck or stopped, and the
    #: age of the first of them; None while unknown.
    lag_records: int | None = None
    lag_seconds: float | None = None
    #: LSNs of PostgreSQL: the newest commit known from the stream, and the newest in the archive; the
    #: bytes of the log between them, and the age of what the archive lacks. None while unknown.
    source_position: str | None = None
    source_head: str | None = None
    source_lag_bytes: int | None = None
    source_lag_seconds: float | None = None
    #: Records read that are in no artifact yet, because they hold no change or have to wait.
    buffer_depth: int = 0
    #: The first record of a transaction that waits for its end.
    waiting_from: int | None = None
    rows_per_second: float = 0.0
    #: Changes since the base.
    churn_records: int = 0
    snapshot_age_seconds: float | None = None
    last_base: ArtifactStatus | None = None
    last_diff: ArtifactStatus | None = None
    last_error: TableFailure | None = None
    dead_letters: DeadLetterStatus | None = None
    #: Destinations that lack the last commit, with the reason.
    lagging_destinations: dict[str, str] = {}
    counts: Counts = Counts()
    spark: SparkCounts = SparkCounts()


class TableWriters(Protocol):
    """The tables of one process, for the HTTP server; called from any thread."""

    def statuses(self) -> dict[str, TableStatus]:
        """Return the status of all tables by name."""
        ...

    def spark(self) -> SparkCounts:
        """Return Spark's work for all tables; a job of several tables counts once."""
        ...

    def request_snapshot(self, table: str) -> Future[ArtifactStatus]:
        """Request a base; the result is set once it is committed.

        NotFoundError for a table of another process, ConflictError if the table writes no more bases.
        """
        ...
