"""What people see at a terminal: colours, tables, and text from others, which has no effect there.

Colours are for terminals alone: not with NO_COLOR set, nor for TERM=dumb.
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

#: What a terminal would obey: control characters, C1 ones too, and those that reorder text.
_OBEYED: Final = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069"
_CONTROL: Final = re.compile(rf"[\t\n{_OBEYED}]")
#: The same in whole texts of ours, which have lines, tabs and colours.
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
    """Whether text for `stream`, standard output if there is none, may be in colour."""
    shown = (stream or sys.stdout).isatty()
    return shown and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, meaning: str, stream: TextIO | None = None) -> str:
    """Colour text by its meaning where that is seen, and return it as it is elsewhere."""
    if not in_colour(stream):
        return text
    return _STYLES[meaning](text)


def inert(text: str) -> str:
    """Escape what a terminal would obey, in text that others chose: names, messages, headers."""
    return _CONTROL.sub(_escaped, text)


def inert_text(data: bytes, *, colours: bool = True) -> bytes:
    """Escape what a terminal would obey in text of several lines; bytes that are not UTF-8, too.

    `colours` of our own stay.
    """
    text = data.decode(errors="backslashreplace")
    return _UNEXPECTED.sub(
        lambda match: match[0] if colours and len(match[0]) > 1 else _escaped(match), text
    ).encode()


def _escaped(match: re.Match[str]) -> str:
    """As JSON has it, so that JSON stays JSON."""
    return "".join(f"\\u{ord(character):04x}" for character in match[0])


def aligned(
    rows: Iterable[Sequence[str]],
    headings: Sequence[str] = (),
    right: Iterable[int] = (),
    room: int | None = None,
) -> list[str]:
    """Return rows as lines with columns of equal width, below their headings in bold.

    `right`: columns of numbers. `room`: characters of a line; cells that are too long for it move
    what follows them in their own line alone.
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
    """The width of each column: of its longest cell, or of the longest with which lines fit."""
    lengths = [sorted({len(cell) for cell in column}) for column in columns]
    while room is not None and sum(each[-1] + 2 for each in lengths) - 2 > room:
        widest = max(lengths, key=lambda each: each[-1])
        if len(widest) == 1:
            break
        widest.pop()
    return [each[-1] for each in lengths]


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals on which a long command finishes its work and ends.

    A terminal that closes sends SIGHUP, which counts unless `nohup` started the command.
    """
    asked = (signal.SIGTERM, signal.SIGINT)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return asked if ignored else (*asked, signal.SIGHUP)
