"""Spark in this process, with settings that suit streams; everywhere else sessions are passed in."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from pyspark.sql import SparkSession

from streamfold.spark.java import use_java
from streamfold.spark.source import StreamfoldSource

_CHECKPOINTS = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
_SETTINGS = {
    "spark.ui.enabled": "false",
    # Python workers over TCP wait 45 ms per batch for a delayed acknowledgement.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.shuffle.partitions": "16",
    # Three times faster than the default, and as safe on a local disk, where renames are atomic.
    "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINTS,
    "spark.driver.memory": "2g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
#: Start in half the time; bulk work takes half as long again.
_QUICK_JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData"


def local_session(
    name: str = "streamfold",
    *,
    cores: int | str = "*",
    quick: bool = False,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """A session in this process that knows `format("streamfold")`; `quick` is for short work.

    Finds a Java, see `java`. Spark has one session per process: a second call returns the first.
    """
    use_java()
    # Workers run what this process runs: `python3` of the PATH may know nothing of this package.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(f"local[{cores}]").appName(name)
    java = {"spark.driver.extraJavaOptions": _QUICK_JAVA} if quick else {}
    for key, value in {**_SETTINGS, **java, **(settings or {})}.items():
        builder = builder.config(key, value)
    return register(builder.getOrCreate())


def register(spark: SparkSession) -> SparkSession:
    """Teach a session `format("streamfold")`; the same session, for chaining."""
    spark.dataSource.register(StreamfoldSource)
    return spark
