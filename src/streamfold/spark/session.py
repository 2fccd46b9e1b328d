"""Spark sessions with settings that suit streams, and the package zip that executors import.

Only this module creates sessions. Other modules receive theirs as arguments. Spark runs in this
process, on a cluster with this process as its driver, or under spark-submit, which has already
started it. Spark sends the zip to executors, so that driver and tasks run the same code.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext, SparkFiles
from pyspark.sql import SparkSession

import streamfold
from streamfold import _native
from streamfold.spark.archive import StreamfoldArchiveSource
from streamfold.spark.errors import JavaEndedError
from streamfold.spark.java import last_lines, light_processes, start_service, use_java
from streamfold.spark.stream.source import StreamfoldSource
from streamfold.zipped import EXTENSION, PLATFORM

logger = logging.getLogger(__name__)

#: Name of the zip. Spark recognizes a package by this extension.
PACKAGE: Final = "streamfold.zip"
_PY_FILES = "spark.submit.pyFiles"
#: Timestamp of every zip entry, which makes identical code give identical bytes.
_MOMENT = (1980, 1, 1, 0, 0, 0)
_CHECKPOINTS = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
_SETTINGS = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.shuffle.partitions": "16",
    # Three times as fast as the default, and as safe on local disks, where renames are atomic.
    "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINTS,
    "spark.driver.memory": "2g",
}
#: Settings of a local driver, which accepts no connections from other machines.
_LOCAL_SETTINGS = {
    # Not on clusters: executors there may lack the module, and print to files.
    "spark.python.daemon.module": "streamfold.spark_worker_daemon",
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
#: Halves the start-up time, but Spark's own shuffles and expressions take 50% longer.
QUICK_JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData"
#: Task failures before the job fails: Spark's default on clusters, but not in local sessions.
_TASK_FAILURES = 4


def pack_package(folder: Path) -> Path:
    """Write the package, without its dependencies, to a zip in `folder` for `--py-files`.

    The zip runs only on machines with this platform, see `zipped`.
    """
    (home,) = map(Path, streamfold.__path__)
    target = folder / PACKAGE
    contents = {name: (home / name).read_bytes() for name in _names(home)}
    contents[EXTENSION] = Path(_native.__file__).read_bytes()
    contents[PLATFORM] = sysconfig.get_platform().encode()
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in sorted(contents.items()):
            entry = zipfile.ZipInfo(f"{home.name}/{name}", _MOMENT)
            # Stored uncompressed: every process that loads the extension reads it from the zip.
            entry.compress_type = zipfile.ZIP_STORED if name == EXTENSION else zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return target


def with_package(settings: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return settings that make executors import this package instead of an installed one.

    Apply them when the session starts: a data source remembers the files that were shipped before
    its registration. `folder` must outlive the session, for executors that join later.
    """
    files = (settings.get(_PY_FILES), str(pack_package(folder)))
    return {**settings, _PY_FILES: ",".join(filter(None, files))}


def show_planners(spark: SparkSession) -> None:
    """Make Python processes on the driver import the shipped package, if there is one.

    Spark plans streaming sources in these processes, without the shipped files. On executors the
    path does not exist, which is harmless. Applies only to sources registered after this call.
    """
    package = SparkFiles.get(PACKAGE)
    if Path(package).exists():
        variables = spark.sparkContext.environment
        paths = (variables.get("PYTHONPATH"), package)
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def _names(home: Path) -> list[str]:
    files = (path.relative_to(home) for path in home.rglob("*") if path.is_file())
    return [
        path.as_posix()
        for path in files
        if "__pycache__" not in path.parts and path.suffix != ".so"
    ]


def local_session(
    name: str = "streamfold",
    *,
    cores: int | str = "*",
    quick: bool = False,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Start a session in this process with both formats registered. `quick` suits short jobs.

    Selects a Java runtime as described in `java`. Spark has one session per process, so a second
    call returns the first session.
    """
    java = {"spark.driver.extraJavaOptions": QUICK_JAVA} if quick else {}
    chosen = {"spark.master": local_master(cores), **java, **(settings or {})}
    return open_session(name, settings=chosen)


def open_session(
    name: str = "streamfold",
    *,
    settings: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] | None = None,
    service: bool = False,
    quiet: bool = False,
) -> SparkSession:
    """Start a session with both formats registered, on the `spark.master` in the settings.

    `service` shields Java from terminal signals. With `quiet`, it also keeps Spark's output off the
    terminal, see `java.start_service`.

    Without a master, Spark runs in this process. Under spark-submit, its master and settings
    override `defaults`. On a cluster, workers run the Python named by `PYSPARK_PYTHON`, else by
    `spark.pyspark.python`, else the one at this interpreter's path.
    """
    chosen = {**_submitted(), **(settings or {})}
    chosen.setdefault("spark.master", (defaults or {}).get("spark.master", local_master("*")))
    if not is_submitted():
        use_java()
        # `python3` on the PATH may lack what this process imports.
        os.environ.setdefault(
            "PYSPARK_PYTHON", chosen.get("spark.pyspark.python") or sys.executable
        )
    local = _LOCAL_SETTINGS if is_local(chosen["spark.master"]) else {}
    effective = {**_SETTINGS, **local, **(defaults or {}), **chosen}
    builder = SparkSession.builder.appName(name)
    for key, value in effective.items():
        builder = builder.config(key, value)
    with light_processes(service=service) if local else nullcontext():
        if service and not is_submitted():
            start_service(effective, quiet=quiet)
        session = builder.getOrCreate()
    show_planners(session)
    return register(session)


def register(spark: SparkSession) -> SparkSession:
    """Register the stream and archive formats. Returns the session, for chaining."""
    spark.dataSource.register(StreamfoldSource)
    spark.dataSource.register(StreamfoldArchiveSource)
    return spark


def is_local(master: str) -> bool:
    """Return whether Spark runs in local mode, so that nothing must be sent to executors."""
    return master.partition("[")[0] == "local"


def is_submitted() -> bool:
    """Return whether spark-submit started this process. If so, Spark already runs, as submitted."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def is_running(spark: SparkSession) -> bool:
    """Return whether Spark's Java process responds: without it, a session is useless."""
    try:
        spark.sparkContext._jvm.System.nanoTime()
    except (OSError, Py4JError):
        return False
    return True


@contextmanager
def needing_java(spark: SparkSession) -> Iterator[None]:
    """Raise JavaEndedError instead of an OSError or Py4JError if the Java process has exited."""
    try:
        yield
    except (OSError, Py4JError):
        if is_running(spark):
            raise
        if lines := last_lines():
            logger.error("the last output of Java:\n%s", "\n".join(lines))
        raise JavaEndedError from None


def _submitted() -> dict[str, str]:
    """Return spark-submit's settings, or none without it."""
    if not is_submitted():
        return {}
    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def local_master(cores: int | str) -> str:
    """Return the local-mode master URL for `cores` concurrent tasks."""
    return f"local[{cores}]" if "," in str(cores) else f"local[{cores},{_TASK_FAILURES}]"
