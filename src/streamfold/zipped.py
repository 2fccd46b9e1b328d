"""Loads the native module from a zipped package, as Spark sends it to executors.

Python cannot load extensions from a zip, so this uses a temporary file and then deletes it.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final
from zipimport import zipimporter

#: The extension module in the package, and the file that names its platform.
EXTENSION: Final = "_native.abi3.so"
PLATFORM: Final = "_native.platform"
_NAME: Final = "streamfold._native"


class _TemporaryLoader(ExtensionFileLoader):
    """Deletes the file's folder once the module is loaded."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        try:
            return super().create_module(spec)
        finally:
            shutil.rmtree(Path(self.path).parent)


class NativeFinder:
    """Finds the extension in the zip of `package`."""

    def __init__(self, package: zipimporter) -> None:
        self._package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _NAME:
            return None
        # `prefix` is the folder in the zip from which the package itself was imported.
        folder = f"{self._package.archive}/{self._package.prefix}streamfold"
        packed = self._package.get_data(f"{folder}/{PLATFORM}").decode()
        if packed != (here := sysconfig.get_platform()):
            raise ImportError(
                f"{self._package.archive} was packed on {packed}, and this machine is {here}: pack it "
                "on a machine like those that run tasks, or install streamfold on them, and send no zip"
            )
        target_file = Path(tempfile.mkdtemp(prefix="streamfold-")) / EXTENSION
        target_file.write_bytes(self._package.get_data(f"{folder}/{EXTENSION}"))
        loader = _TemporaryLoader(name, str(target_file))
        return spec_from_file_location(name, target_file, loader=loader)


def install(package: zipimporter) -> None:
    """Make the native module of `package` importable."""
    sys.meta_path.append(NativeFinder(package))
