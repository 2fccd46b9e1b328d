"""The snapshot writer: tables of change streams, published as archives by Structured Streaming."""

from streamfold.snapshotter.spark.dead_letters import (
    DeadLetterFolder,
    DeadLetters,
    DeadLetterStream,
)
from streamfold.snapshotter.spark.destinations import Place
from streamfold.snapshotter.spark.errors_from_spark import QueryFailedError
from streamfold.snapshotter.spark.jobs import TableJob, table_jobs
from streamfold.snapshotter.spark.service import SnapshotWriter, writer_session

__all__ = [
    "SnapshotWriter",
    "TableJob",
    "Place",
    "DeadLetters",
    "DeadLetterFolder",
    "DeadLetterStream",
    "table_jobs",
    "writer_session",
    "QueryFailedError",
]
