"""Sessions with settings that suit streams; everywhere else they are passed in.

Three ways lead to one: Spark in this process, a cluster that this process is the driver of, and
spark-submit, which has started Spark already and was told where.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from streamfold.spark.archive import StreamfoldArchiveSource
from streamfold.spark.errors import JavaEndedError
from streamfold.spark.runtime.java import last_lines, start_quietly, use_java
from streamfold.spark.runtime.package_zip import show_planners
from streamfold.spark.stream.source import StreamfoldSource

logger = logging.getLogger(__name__)

_CHECKPOINTS = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
_SETTINGS = {
    # Python workers over TCP wait 45 ms per batch for a delayed acknowledgement.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.shuffle.partitions": "16",
    # Three times faster than the default, and as safe on a local disk, where renames are atomic.
    "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINTS,
    "spark.driver.memory": "2g",
}
#: Where nobody else has to reach the driver, nobody can.
_LOCAL_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
#: Start in half the time; bulk work takes half as long again.
_QUICK_JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData"
#: How often a task may fail before its job does: what clusters have, and local sessions have not.
_TASK_FAILURES = 4


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
    java = {"spark.driver.extraJavaOptions": _QUICK_JAVA} if quick else {}
    chosen = {"spark.master": _local_master(cores), **java, **(settings or {})}
    return open_session(name, settings=chosen)


def open_session(
    name: str = "streamfold",
    *,
    settings: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> SparkSession:
    """A session that knows `format("streamfold")`, on `spark.master` of the settings.

    `quiet` keeps what Spark prints from the terminal, see `java_output`.

    Without one, it is in this process; under spark-submit, it is where that was told, and what that
    was told wins over defaults. Elsewhere workers run the Python that `PYSPARK_PYTHON` names, else
    `spark.pyspark.python`, else the one at the path of this one.
    """
    chosen = {**_submitted(), **(settings or {})}
    chosen.setdefault("spark.master", _local_master("*"))
    if not is_submitted():
        use_java()
        # `python3` of the PATH may know nothing of what this process imports.
        os.environ.setdefault(
            "PYSPARK_PYTHON", chosen.get("spark.pyspark.python") or sys.executable
        )
    local = _LOCAL_SETTINGS if is_local(chosen["spark.master"]) else {}
    effective = {**_SETTINGS, **local, **(defaults or {}), **chosen}
    if quiet and not is_submitted():
        start_quietly(effective)
    builder = SparkSession.builder.appName(name)
    for key, value in effective.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    show_planners(session)
    return register(session)


def register(spark: SparkSession) -> SparkSession:
    """Teach a session both formats, of streams and of archives; the same session, for chaining."""
    spark.dataSource.register(StreamfoldSource)
    spark.dataSource.register(StreamfoldArchiveSource)
    return spark


def is_local(master: str) -> bool:
    """Whether all of Spark is in this process, so that nothing has to reach executors."""
    return master.partition("[")[0] == "local"


def is_submitted() -> bool:
    """Whether spark-submit started this process: Spark runs already, with settings of its own."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def is_running(spark: SparkSession) -> bool:
    """Whether Spark's Java process answers: without it a session is of no more use."""
    try:
        spark.sparkContext._jvm.System.nanoTime()
    except (OSError, Py4JError):
        return False
    return True


@contextmanager
def needing_java(spark: SparkSession) -> Iterator[None]:
    """Raise `JavaEndedError` for whatever goes wrong in the block because the process is gone."""
    try:
        yield
    except (OSError, Py4JError):
        if is_running(spark):
            raise
        if lines := last_lines():
            logger.error("the last output of Java:\n%s", "\n".join(lines))
        raise JavaEndedError from None


def _submitted() -> dict[str, str]:
    """What spark-submit was told; nothing where there is none."""
    if not is_submitted():
        return {}
    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def _local_master(cores: int | str) -> str:
    return f"local[{cores}]" if "," in str(cores) else f"local[{cores},{_TASK_FAILURES}]"
