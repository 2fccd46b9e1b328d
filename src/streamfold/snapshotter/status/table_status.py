"""What a table's writer says of itself; `/status` shows it, and metrics are made of it."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from typing import Protocol

import msgspec


class State(enum.StrEnum):
    """Where a table's writer is."""

    STARTING = "starting"
    RUNNING = "running"
    #: Something failed that may pass: it goes on by itself, from what is committed.
    RETRYING = "retrying"
    #: Something failed that will not pass by itself: see `last_error`. The others go on.
    STOPPED = "stopped"
    #: Another writer took the table.
    FENCED = "fenced"
    #: Stopped on request, with everything flushed.
    CLOSED = "closed"

    @property
    def is_final(self) -> bool:
        return self in (State.STOPPED, State.FENCED, State.CLOSED)


class Failure(msgspec.Struct, frozen=True):
    """What goes wrong at the moment, in a sentence; `code` is stable."""

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


class Counts(msgspec.Struct, frozen=True):
    """Since this process began."""

    bases: int = 0
    diffs: int = 0
    records: int = 0
    changes: int = 0
    dead_letters: int = 0
    ignored: int = 0
    failures: int = 0
    #: Transactions that were published in parts, because no end came.
    transactions_cut: int = 0
    #: By destination and by sink.
    destination_errors: dict[str, int] = {}
    event_errors: dict[str, int] = {}


class TableStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One table, at one moment."""

    table: str
    stream: str
    state: State
    #: Whether the base is durable and everything known to be there is taken in.
    ready: bool = False
    #: The last record that was looked at.
    position: int | None = None
    #: What the manifest says, None before the first base.
    manifest_head: str | None = None
    epoch: int | None = None
    lag_records: int | None = None
    lag_seconds: float | None = None
    #: Records that were looked at, and are in no artifact yet: they held no change, or have to wait.
    buffer_depth: int = 0
    #: The first record of a transaction whose end is waited for.
    waiting_from: int | None = None
    rows_per_second: float = 0.0
    #: Changes since the base.
    churn_records: int = 0
    snapshot_age_seconds: float | None = None
    last_base: ArtifactStatus | None = None
    last_diff: ArtifactStatus | None = None
    last_error: Failure | None = None
    #: Destinations that lack the last commit, and why.
    lagging_destinations: dict[str, str] = {}
    counts: Counts = Counts()


class TableWriters(Protocol):
    """The tables of one process, as the service sees them; called from any thread."""

    def statuses(self) -> dict[str, TableStatus]:
        """All tables by name."""
        ...

    def request_snapshot(self, table: str) -> Future[ArtifactStatus]:
        """Have a base written soon; the result is there once it is committed.

        NotFoundError for a table that is not of this process, ConflictError when none will come.
        """
        ...
