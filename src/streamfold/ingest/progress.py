"""What an ingester reports of itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class TableProgress:
    """How far a table is."""

    #: waiting, copying or following.
    state: str = "waiting"
    #: Of the first copy; the estimate is PostgreSQL's, -1 if it has none.
    rows_copied: int = 0
    rows_estimated: int = -1
    #: Since the process started.
    changes: int = 0


@dataclass(slots=True)
class IngestProgress:
    """How far an ingester is."""

    #: starting, copying, following or retrying.
    state: str = "starting"
    tables: dict[str, TableProgress] = field(default_factory=dict)
    #: Position that was confirmed to PostgreSQL.
    confirmed: str = "0/0"
    #: Unix seconds of the newest commit in the streams.
    committed_at: float = 0.0
    sessions: int = 0
    last_error: str = ""
