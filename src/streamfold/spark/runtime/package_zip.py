"""This very package as a file that Spark hands to executors: driver and tasks run the same code."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pyspark import SparkFiles
from pyspark.sql import SparkSession

import streamfold

#: Of the zip; Spark takes a file for a package by this ending.
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
    """Settings of a session whose executors import this package, before one that is installed there.

    They must be there when the session starts: data sources remember what was shipped when they were
    registered. `folder` must stay as long as the session, for executors that come later.
    """
    files = (settings.get(_PY_FILES), str(pack_package(folder)))
    return {**settings, _PY_FILES: ",".join(filter(None, files))}


def show_planners(spark: SparkSession) -> None:
    """Have Python processes beside the driver import the package that executors are sent, if any.

    Spark plans streaming sources in such processes, and forgets there what was shipped. On executors
    the path leads nowhere, and does no harm. Sources that are registered from now on know it.
    """
    package = SparkFiles.get(PACKAGE)
    if Path(package).exists():
        variables = spark.sparkContext.environment
        paths = (variables.get("PYTHONPATH"), package)
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def _names(home: Path) -> list[str]:
    files = (path.relative_to(home) for path in home.rglob("*") if path.is_file())
    return [path.as_posix() for path in files if "__pycache__" not in path.parts]
