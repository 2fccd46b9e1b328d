"""`make demo` runs in a terminal until Ctrl-C, and `make demo-check` verifies the table in CI."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path

import psutil

from tests.docs.terminal import Terminal

ROOT = Path(__file__).parents[2]


def test_the_demo_says_what_to_look_at_and_ends_cleanly_at_ctrl_c() -> None:
    with closing(Terminal(ROOT, os.environ)) as terminal:
        begin = len(terminal.shown)
        shown = terminal.start(
            f"{sys.executable} examples/live_table.py", "public.orders  following"
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
    assert not [p for p in psutil.process_iter(["cmdline"]) if folder in (p.info["cmdline"] or ())]
