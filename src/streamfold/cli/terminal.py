"""Terminal output: colours, tables, and untrusted text made harmless.

Colours are only used at terminals, without NO_COLOR and unless TERM=dumb.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, TextIO

import click

#: Characters that control a terminal: control characters, including C1, and those that reorder
#: text.
_OBEYED: Final = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069"
_CONTROL: Final = re.compile(rf"[\t\n{_OBEYED}]")
#: The same for whole texts of ours, in which newlines, tabs and colours are allowed.
_UNEXPECTED: Final = re.compile(rf"\x1b\[[0-9;]*m|[{_OBEYED}]")
#: Colours by meaning.
_STYLES: Final[dict[str, Callable[[str], str]]] = {
    "ok": partial(click.style, fg="green"),
    "warning": partial(click.style, fg="yellow"),
    "failure": partial(click.style, fg="red", bold=True),
    "added": partial(click.style, fg="green"),
    "changed": partial(click.style, fg="yellow"),
    "heading": partial(click.style, bold=True),
    "faint": partial(click.style, dim=True),
}


def in_colour(stream: TextIO | None = None) -> bool:
    """Return whether text for `stream`, by default standard output, may be in colour."""
    shown = (stream or sys.stdout).isatty()
    return shown and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, meaning: str, stream: TextIO | None = None) -> str:
    """Colour text by its meaning if the stream supports it, else return it unchanged."""
    if not in_colour(stream):
        return text
    return _STYLES[meaning](text)


def inert(text: str) -> str:
    """Escape terminal control characters in text that others chose: names, messages, headers."""
    return _CONTROL.sub(_escaped, text)


def inert_text(data: bytes, *, colours: bool = True) -> bytes:
    """Escape terminal control characters in multi-line text, and bytes that are not UTF-8.

    With `colours`, keeps our own colour codes.
    """
    text = data.decode(errors="backslashreplace")
    return _UNEXPECTED.sub(
        lambda match: match[0] if colours and len(match[0]) > 1 else _escaped(match), text
    ).encode()


def _escaped(match: re.Match[str]) -> str:
    """Escape characters as JSON does, so that JSON stays valid."""
    return "".join(f"\\u{ord(character):04x}" for character in match[0])


def aligned(
    rows: Iterable[Sequence[str]],
    headings: Sequence[str] = (),
    right: Iterable[int] = (),
    room: int | None = None,
) -> list[str]:
    """Return rows as lines with columns of equal width, below their headings in bold.

    `right`: indices of numeric columns. `room`: characters per line. A cell too long for this moves
    only the cells after it in its own line.
    """
    cells = [[inert(cell) for cell in row] for row in rows]
    every = [list(headings), *cells] if headings else cells
    widths = _widths(list(zip(*every, strict=True)), room)
    numbers = frozenset(right)

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    lines = [styled(line(headings), "heading")] if headings else []
    return lines + [line(row) for row in cells]


def _widths(columns: Sequence[Sequence[str]], room: int | None) -> list[int]:
    """Return each column's width: of its longest cell, or of the longest cell with which lines fit."""
    lengths = [sorted({len(cell) for cell in column}) for column in columns]
    while room is not None and sum(each[-1] + 2 for each in lengths) - 2 > room:
        widest = max(lengths, key=lambda each: each[-1])
        if len(widest) == 1:
            break
        widest.pop()
    return [each[-1] for each in lengths]


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals on which a long command finishes its work and ends.

    A closing terminal sends SIGHUP, which is ignored if `nohup` started the command.
    """
    asked = (signal.SIGTERM, signal.SIGINT)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return asked if ignored else (*asked, signal.SIGHUP)
