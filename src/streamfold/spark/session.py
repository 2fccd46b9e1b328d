"""This package as a zip that Spark sends to executors, so that driver and tasks run the same code.

Makes Spark sessions with settings that suit streams; other modules get theirs passed in. Spark runs
in this process, on a cluster with this process as its driver, or under spark-submit, which has
already started it.
"""

from __future__ import annotations

import logging
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext, SparkFiles
from pyspark.sql import SparkSession

import streamfold
from streamfold.spark.archive import StreamfoldArchiveSource
from streamfold.spark.errors import JavaEndedError
from streamfold.spark.java import last_lines, start_service, use_java
from streamfold.spark.stream.source import StreamfoldSource

logger = logging.getLogger(__name__)

#: Name of the zip; Spark recognizes a package by the extension.
PACKAGE: Final = "streamfold.zip"
_PY_FILES = "spark.submit.pyFiles"
#: The same for every file, so that the same code gives the same bytes.
_MOMENT = (1980, 1, 1, 0, 0, 0)
_CHECKPOINTS = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
_SETTINGS = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.shuffle.partitions": "16",
    # Three times faster than the default, and as safe on a local disk, where renames are atomic.
    "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINTS,
    "spark.driver.memory": "2g",
}
#: A local driver accepts no connections from other machines.
_LOCAL_SETTINGS = {
    # Executors of a cluster may lack the module, and print to files.
    "spark.python.daemon.module": "streamfold.spark_worker_daemon",
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
#: Halves the start-up time; shuffles and expressions of Spark's own take 50 % longer.
QUICK_JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData"
#: Failures of a task before its job fails: the default on clusters, but not of local sessions.
_TASK_FAILURES = 4


def pack_package(folder: Path) -> Path:
    """Write the package, without what it depends on, to a zip in `folder`, for `--py-files`."""
    (home,) = map(Path, streamfold.__path__)
    target = folder / PACKAGE
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(_names(home)):
            entry = zipfile.ZipInfo(f"{home.name}/{name}", _MOMENT)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, (home / name).read_bytes())
    return target


def with_package(settings: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return settings that make executors import this package instead of an installed one.

    They must be set when the session starts: data sources remember what was shipped when they were
    registered. `folder` must exist as long as the session, for executors that join later.
    """
    files = (settings.get(_PY_FILES), str(pack_package(folder)))
    return {**settings, _PY_FILES: ",".join(filter(None, files))}


def show_planners(spark: SparkSession) -> None:
    """Make Python processes on the driver import the package that executors get, if any.

    Spark plans streaming sources in such processes, without what was shipped. On executors the path
    does not exist, which is harmless. Applies to sources registered after this call.
    """
    package = SparkFiles.get(PACKAGE)
    if Path(package).exists():
        variables = spark.sparkContext.environment
        paths = (variables.get("PYTHONPATH"), package)
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def _names(home: Path) -> list[str]:
    files = (path.relative_to(home) for path in home.rglob("*") if path.is_file())
    return [path.as_posix() for path in files if "__pycache__" not in path.parts]


def local_session(
    name: str = "streamfold",
    *,
    cores: int | str = "*",
    quick: bool = False,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Start a session in this process with `format("streamfold")`; `quick` is for short work.

    Finds a Java, see `java`. Spark has one session per process: a second call returns the first.
    """
    java = {"spark.driver.extraJavaOptions": QUICK_JAVA} if quick else {}
    chosen = {"spark.master": _local_master(cores), **java, **(settings or {})}
    return open_session(name, settings=chosen)


def open_session(
    name: str = "streamfold",
    *,
    settings: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] | None = None,
    service: bool = False,
    quiet: bool = False,
) -> SparkSession:
    """Start a session with `format("streamfold")`, on `spark.master` of the settings.

    `service` keeps signals of the terminal from Java, and with `quiet` Spark's output from the
    terminal, too: see `java.start_service`.

    Without a master, Spark runs in this process; under spark-submit, its master and settings win over
    the defaults. On a cluster, workers run the Python that `PYSPARK_PYTHON` names, else
    `spark.pyspark.python`, else the one at this interpreter's path.
    """
    chosen = {**_submitted(), **(settings or {})}
    chosen.setdefault("spark.master", _local_master("*"))
    if not is_submitted():
        use_java()
        # `python3` on the PATH may lack what this process imports.
        os.environ.setdefault(
            "PYSPARK_PYTHON", chosen.get("spark.pyspark.python") or sys.executable
        )
    local = _LOCAL_SETTINGS if is_local(chosen["spark.master"]) else {}
    effective = {**_SETTINGS, **local, **(defaults or {}), **chosen}
    if service and not is_submitted():
        start_service(effective, quiet=quiet)
    builder = SparkSession.builder.appName(name)
    for key, value in effective.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    show_planners(session)
    return register(session)


def register(spark: SparkSession) -> SparkSession:
    """Register both formats, of streams and of archives; returns the session, for chaining."""
    spark.dataSource.register(StreamfoldSource)
    spark.dataSource.register(StreamfoldArchiveSource)
    return spark


def is_local(master: str) -> bool:
    """Return whether Spark runs in this process, so that executors need nothing sent."""
    return master.partition("[")[0] == "local"


def is_submitted() -> bool:
    """Return whether spark-submit started this process: Spark already runs, with its own settings."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def is_running(spark: SparkSession) -> bool:
    """Return whether Spark's Java process answers: a session is useless without it."""
    try:
        spark.sparkContext._jvm.System.nanoTime()
    except (OSError, Py4JError):
        return False
    return True


@contextmanager
def needing_java(spark: SparkSession) -> Iterator[None]:
    """Raise `JavaEndedError` for any failure in the block if the Java process has ended."""
    try:
        yield
    except (OSError, Py4JError):
        if is_running(spark):
            raise
        if lines := last_lines():
            logger.error("the last output of Java:\n%s", "\n".join(lines))
        raise JavaEndedError from None


def _submitted() -> dict[str, str]:
    """Return spark-submit's settings; empty without it."""
    if not is_submitted():
        return {}
    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def _local_master(cores: int | str) -> str:
    return f"local[{cores}]" if "," in str(cores) else f"local[{cores},{_TASK_FAILURES}]"
