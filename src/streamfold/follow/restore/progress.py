"""Restore progress, passed to a callback or drawn on a terminal. All commands share its bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

#: Seconds before the bar appears: a short restore shows nothing.
_DELAY = 1.0
#: Seconds between two updates of the bar.
_INTERVAL = 0.1
_WIDTH = 30


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of a restore."""

    #: "load" for a snapshot's bytes, "replay" for records, and "done" once at the end.
    phase: str
    done: int
    #: None if unknown.
    total: int | None


ProgressCallback = Callable[[Progress], None]


def draw_bar(out: TextIO, label: str, done: int, total: int | None, unit: str) -> None:
    """Draw a progress bar over the current line of a terminal."""
    share = min(1.0, done / total) if total else 0.0
    bar = "#" * round(share * _WIDTH)
    end = f"/{total:,}" if total else ""
    out.write(f"\r{label:6} [{bar:-<{_WIDTH}}] {share:4.0%} {done:,}{end} {unit}\x1b[K")
    out.flush()


class TerminalBar:
    """A progress bar on standard error, shown only on a terminal and only for long restores."""

    def __init__(
        self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out or sys.stderr
        self._clock = clock
        self._began = self._drawn_at = clock()
        self._shown = False

    def __call__(self, progress: Progress) -> None:
        now = self._clock()
        if progress.phase == "done":
            self._clear()
        elif now - self._began > _DELAY and now - self._drawn_at > _INTERVAL:
            self._drawn_at = now
            self._draw(progress)

    def _draw(self, progress: Progress) -> None:
        if not self._out.isatty():
            return
        unit = "bytes" if progress.phase == "load" else "records"
        draw_bar(self._out, progress.phase, progress.done, progress.total, unit)
        self._shown = True

    def _clear(self) -> None:
        if self._shown:
            self._out.write("\r\x1b[K")
            self._out.flush()
        self._shown = False
        self._began = self._clock()
