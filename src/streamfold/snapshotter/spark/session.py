"""The session of a writer: on this machine unless told otherwise, and fair between tables."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession

from streamfold.spark.runtime.session import open_session

_DEFAULTS = {
    # A long fold of one table must not hold up the diffs of the others.
    "spark.scheduler.mode": "FAIR",
    # A parcel is one row of many changes: batches of rows are bounded by their bytes.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(64 << 20),
    "spark.ui.showConsoleProgress": "false",
    # Milliseconds after which a quiet query says that it is caught up.
    "spark.sql.streaming.noDataProgressEventInterval": "2000",
    # A query whose server is away may be asking it: it ends by itself, and holds up no stop.
    "spark.sql.streaming.stopTimeout": "3s",
}


def writer_session(
    settings: Mapping[str, str] | None = None, *, verbose: bool = False
) -> SparkSession:
    """A session for a snapshot writer; `settings` win over its own, and so does spark-submit.

    What Spark prints is seen only where it is `verbose`.
    """
    session = open_session(
        "streamfold snapshotter", settings=settings, defaults=_DEFAULTS, quiet=not verbose
    )
    session.sparkContext.setLogLevel("WARN" if verbose else "ERROR")
    return session
