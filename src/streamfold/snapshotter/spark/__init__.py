"""The snapshotter: publishes tables of change streams as archives, by Structured Streaming."""

from streamfold.snapshotter.spark.destinations import (
    DeadLetterFolder,
    DeadLetters,
    DeadLetterStream,
    DestinationSpec,
)
from streamfold.snapshotter.spark.errors_from_spark import QueryFailedError
from streamfold.snapshotter.spark.jobs import TableJob, table_jobs
from streamfold.snapshotter.spark.service import Snapshotter, snapshotter_session

__all__ = [
    "Snapshotter",
    "TableJob",
    "DestinationSpec",
    "DeadLetters",
    "DeadLetterFolder",
    "DeadLetterStream",
    "table_jobs",
    "snapshotter_session",
    "QueryFailedError",
]
