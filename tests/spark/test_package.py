"""The package as a zip, which tasks import on machines that have no Streamfold."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from streamfold.spark.session import pack_package
from streamfold.zipped import PLATFORM

#: Decodes a payload by native code; `-P` and the path keep the installed package out.
USES_NATIVE = (
    "import streamfold; from streamfold.records.columns import read_columns; "
    "print(streamfold.__file__, read_columns(b'\\x0a\\x03\\x22\\x01a').bodies.content.tobytes())"
)


def run(
    package: Path, code: str = USES_NATIVE, **variables: str
) -> subprocess.CompletedProcess[str]:
    first = f"import sys; sys.path.insert(0, {str(package)!r}); "
    command = [sys.executable, "-P", "-c", first + code]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


def test_native_code_is_loaded_from_the_zip_and_leaves_no_file(tmp_path: Path) -> None:
    package, temporary = pack_package(tmp_path), tmp_path / "temporary"
    temporary.mkdir()
    done = run(package, TMPDIR=str(temporary))
    assert done.stdout.split() == [f"{package}/streamfold/__init__.py", "b'a'"], done.stderr
    assert list(temporary.iterdir()) == []


def test_a_zip_of_another_platform_is_refused_with_both_names(tmp_path: Path) -> None:
    package = pack_package(tmp_path)
    other = tmp_path / "other.zip"
    with zipfile.ZipFile(package) as packed, zipfile.ZipFile(other, "w") as target:
        for name in packed.namelist():
            foreign = name.endswith(PLATFORM)
            target.writestr(name, b"plan9-vax" if foreign else packed.read(name))
    done = run(other)
    assert done.returncode == 1
    assert "other.zip was packed on plan9-vax, and this machine is " in done.stderr


def test_a_zip_needs_its_native_part_only_for_what_uses_it(tmp_path: Path) -> None:
    code = "import sys, streamfold.follow; sys.exit('streamfold._native' in sys.modules)"
    assert run(pack_package(tmp_path), code).returncode == 0


def test_the_same_package_gives_the_same_zip(tmp_path: Path) -> None:
    first = pack_package(tmp_path).read_bytes()
    assert pack_package(tmp_path).read_bytes() == first
