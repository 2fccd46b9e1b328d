"""Benchmarks state the syncs that strace counted, or that none were counted."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench.syncs import ALONE, counted, describe, parse
from bench.turns import Target

STRACE = shutil.which("strace") is not None
SUMMARY = """\
% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 79.89    0.003531          70        50           fdatasync
 17.08    0.000755         755         3         1 syncfs
------ ----------- ----------- --------- --------- ----------------
100.00    0.004286          80        53         1 total
"""
#: Writes a byte for each line of its input, acknowledges it, and syncs before that if told to.
_WRITER = """
import os, sys
target = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
for line in sys.stdin:
    os.write(target, b"x")
    if sys.argv[2] == "sync":
        os.fdatasync(target)
    print("ack", flush=True)
"""


@contextmanager
def writer(folder: Path, how: str) -> Iterator[tuple[int, Callable[[], None]]]:
    """A process that acknowledges writes: its pid, and what waits for one ack."""
    command = [sys.executable, "-c", _WRITER, str(folder / "data"), how]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]

        def append() -> None:
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ack\n"

        yield process.pid, append
        process.stdin.close()


def test_the_table_of_strace_is_read_with_and_without_errors() -> None:
    assert parse(SUMMARY) == {"fdatasync": 50, "syncfs": 3}
    assert parse("") == {}


@pytest.mark.parametrize(("how", "calls"), [("sync", {"fdatasync": 7}), ("none", {})])
def test_syncs_of_a_process_are_counted(tmp_path: Path, how: str, calls: dict[str, int]) -> None:
    with writer(tmp_path, how) as (pid, append), counted([pid]) as counts:
        for _ in range(7):
            append()
    expected = (calls, "") if STRACE else ({}, "strace is not installed")
    assert (counts.calls, counts.problem) == expected


@pytest.mark.parametrize(("how", "calls"), [("sync", f"{ALONE} fdatasync"), ("none", "no sync")])
def test_a_sentence_says_what_a_server_syncs(tmp_path: Path, how: str, calls: str) -> None:
    with writer(tmp_path, how) as (pid, append):

        def load() -> int:
            append()
            return 1

        sentence = describe(Target("server", "", pid), append, load)
    expected = f"server under strace, which slows it: {calls} for {ALONE} acks of one writer; "
    assert sentence.startswith(expected if STRACE else "server: strace is not installed")


def test_without_strace_a_sentence_says_that_nothing_was_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writer(tmp_path, "sync") as (pid, append):
        monkeypatch.setenv("PATH", str(tmp_path))
        sentence = describe(Target("server", "", pid), append, lambda: 1)
    assert sentence == "server: strace is not installed, so its syncs were not counted"


def test_a_process_that_is_gone_cannot_be_traced(tmp_path: Path) -> None:
    with writer(tmp_path, "none") as (pid, _):
        pass
    with counted([pid]) as counts:
        pass
    expected = "strace could not attach" if STRACE else "strace is not installed"
    assert counts.problem.startswith(expected)
    assert not counts.calls
