"""`make demo` runs in a terminal until Ctrl-C, and `make demo-check` verifies the table in CI."""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil

from tests.docs.terminal import Terminal

ROOT = Path(__file__).parents[2]


def test_the_demo_says_what_to_look_at_and_ends_cleanly_at_ctrl_c() -> None:
    with closing(Terminal(ROOT, os.environ)) as terminal:
        begin = len(terminal.shown)
        shown = terminal.start(
            f"{sys.executable} examples/live_table.py",
            # A status that is shown once a second may be seen late.
            *(f"public.orders  {state}" for state in ("following", "publishing")),
        )
        (folder,) = {word for word in shown.split() if word.endswith("/archive")}
        assert "/console#/tables/public.orders" in shown
        terminal.interrupt()
        shown = terminal.shown[begin:]
    # Spark may have started by then, on a quick machine.
    endings = ("stopped before the first base was written", "equal to those in the database")
    assert any(text in shown for text in endings), shown
    assert "[failed:" not in shown, shown
    assert not Path(folder).parent.exists()
    deadline = time.monotonic() + 60
    while left := [p for p in psutil.process_iter(["cmdline"]) if folder in _words(p)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _words(process: psutil.Process) -> list[str]:
    words: list[str] = process.info["cmdline"] or []
    return words
