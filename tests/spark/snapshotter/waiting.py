"""Waits for other threads and processes, and fails with the last state seen."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Seconds: far above what anything takes on a busy machine.
TIMEOUT = 240.0


def wait_for(look: Callable[[], T], accept: Callable[[T], bool], seconds: float = TIMEOUT) -> T:
    """Return what `look` sees as soon as `accept` says yes to it."""
    end = time.monotonic() + seconds
    while True:
        seen = look()
        if accept(seen):
            return seen
        assert time.monotonic() < end, f"not within {seconds} s: {seen}"
        time.sleep(0.1)
