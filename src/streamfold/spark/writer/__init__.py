"""The snapshot writer: tables of change streams, published as archives by Structured Streaming."""

from streamfold.spark.writer.dead_letters import DeadLetterFolder, DeadLetters, DeadLetterStream
from streamfold.spark.writer.failures import QueryFailedError
from streamfold.spark.writer.job import TableJob
from streamfold.spark.writer.jobs import table_jobs
from streamfold.spark.writer.places import Place
from streamfold.spark.writer.service import SnapshotWriter
from streamfold.spark.writer.session import writer_session

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
