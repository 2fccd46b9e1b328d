"""This package as a zip that Spark sends to executors, so that driver and tasks run the same code."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pyspark import SparkFiles
from pyspark.sql import SparkSession

import streamfold

#: Name of the zip; Spark recognizes a package by the extension.
PACKAGE: Final = "streamfold.zip"
_PY_FILES = "spark.submit.pyFiles"
#: The same for every file, so that the same code gives the same bytes.
_MOMENT = (1980, 1, 1, 0, 0, 0)


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
    does not exist, which is harmless. Applies to sources that are registered after this call.
    """
    package = SparkFiles.get(PACKAGE)
    if Path(package).exists():
        variables = spark.sparkContext.environment
        paths = (variables.get("PYTHONPATH"), package)
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def _names(home: Path) -> list[str]:
    files = (path.relative_to(home) for path in home.rglob("*") if path.is_file())
    return [path.as_posix() for path in files if "__pycache__" not in path.parts]
