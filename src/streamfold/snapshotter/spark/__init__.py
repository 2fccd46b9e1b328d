"""The snapshotter: publishes change streams as archives of tables, by Structured Streaming.

Imports names on first use, since each process in which Spark plans imports this package.
"""

from typing import TYPE_CHECKING

from streamfold.extras import lazy_exports

if TYPE_CHECKING:
    from streamfold.snapshotter.spark.destinations import (
        DeadLetterFolder,
        DeadLetters,
        DeadLetterStream,
        DestinationSpec,
    )
    from streamfold.snapshotter.spark.errors_from_spark import QueryFailedError
    from streamfold.snapshotter.spark.jobs import table_jobs
    from streamfold.snapshotter.spark.service import Snapshotter, snapshotter_session
    from streamfold.snapshotter.spark.table_job import TableJob
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "destinations": (
                "DeadLetterFolder", "DeadLetters", "DeadLetterStream", "DestinationSpec",
            ),
            "errors_from_spark": ("QueryFailedError",),
            "jobs": ("table_jobs",),
            "service": ("Snapshotter", "snapshotter_session"),
            "table_job": ("TableJob",),
        },
    )  # fmt: skip

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
