"""The snapshotter's HTTP server."""

from streamfold.snapshotter.status.http_server import StatusServer
from streamfold.snapshotter.status.metrics import render_metrics
from streamfold.snapshotter.status.table_status import (
    ArtifactStatus,
    Counts,
    DeadLetterStatus,
    Failure,
    State,
    TableStatus,
    TableWriters,
)

__all__ = [
    "StatusServer",
    "render_metrics",
    "TableWriters",
    "TableStatus",
    "ArtifactStatus",
    "Counts",
    "DeadLetterStatus",
    "Failure",
    "State",
]
