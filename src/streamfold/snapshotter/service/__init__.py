"""The HTTP side of a snapshot writer."""

from streamfold.snapshotter.service.http import StatusServer
from streamfold.snapshotter.service.metrics import render_metrics
from streamfold.snapshotter.service.status import (
    ArtifactStatus,
    Counts,
    Failure,
    State,
    TableStatus,
    Writers,
)

__all__ = [
    "StatusServer",
    "render_metrics",
    "Writers",
    "TableStatus",
    "ArtifactStatus",
    "Counts",
    "Failure",
    "State",
]
