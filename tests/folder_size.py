"""Measures a folder while another thread or process deletes files in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def stored_bytes(*folders: Path) -> int:
    """The bytes of all files below the folders; files deleted during the count do not count."""
    return sum(_size(path) for folder in folders for path in _files(folder))


def _files(folder: Path) -> Iterator[Path]:
    return (Path(parent) / name for parent, _, names in os.walk(folder) for name in names)


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
