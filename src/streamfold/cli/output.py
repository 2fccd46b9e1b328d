"""Output of commands: JSON lines for programs or text for people, both on standard output."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from time import monotonic
from typing import TYPE_CHECKING

import click

from streamfold.cli.exit_status import ExitStatus, OutputClosedError, VerbFailedError
from streamfold.cli.json_output import Shape
from streamfold.cli.terminal import aligned, inert_text, styled

if TYPE_CHECKING:
    from msgspec.json import Encoder

#: Characters of a name in a listing, and rows whose columns are aligned together.
_NAME_WIDTH, _TABLE_ROWS = 32, 500
#: Seconds between two updates of a progress bar.
_DRAW_INTERVAL = 0.1


class Output:
    """Prints a command's results as JSON or as text."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        #: Whether a person reads the output: with headings, and without terminal control
        #: characters.
        self.at_terminal = sys.stdout.isatty()

    @cached_property
    def _encoder(self) -> Encoder:
        # Imported here, because a command that prints text should not wait for it.
        from msgspec.json import Encoder

        return Encoder()

    def show(self, shape: Mapping[str, object], text: str) -> None:
        """Print `shape` as a line of JSON, or `text`."""
        line = self._encoder.encode(shape) if self.as_json else text.encode()
        self.write(inert_text(line) if self.at_terminal else line, b"\n")

    def show_objects(self, shapes: Iterable[Shape]) -> None:
        """Print objects as JSON lines, even without --json."""
        lines = (self._encoder.encode(shape) + b"\n" for shape in shapes)
        self.write(*(map(inert_text, lines) if self.at_terminal else lines))

    def show_bodies(self, bodies: Iterable[bytes]) -> None:
        """Print record bodies, each with a newline: unchanged, except to a terminal."""
        if self.at_terminal:
            bodies = (inert_text(body, colours=False) for body in bodies)
        self.write(*(body + b"\n" for body in bodies))

    def write_lines(self, lines: Iterable[str]) -> None:
        """Print lines of text for people."""
        self.write(*(f"{line}\n".encode() for line in lines))

    def write(self, *parts: bytes) -> None:
        """Write bytes and flush them. Raises OutputClosedError if the reader has closed the output."""
        try:
            sys.stdout.buffer.write(b"".join(parts))
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            discard_the_rest()
            raise OutputClosedError("the output was closed") from None
        except OSError as error:
            discard_the_rest()
            raise VerbFailedError(
                "output", f"the output cannot be written: {error.strerror}"
            ) from error

    def note(self, text: str) -> None:
        """Print a note for people on standard error."""
        if not self.as_json:
            click.echo(inert_text(text.encode()) if sys.stderr.isatty() else text, err=True)


class ListingOutput:
    """Prints a listing: lines of JSON or text as they arrive, or columns at a terminal."""

    def __init__(self, output: Output, *headings: str, empty: str) -> None:
        """A listing without rows prints `empty` on standard error."""
        self._output = output
        self._headings: Sequence[str] = headings
        self._rows: list[tuple[str, ...]] = []
        self._empty = empty

    def add(self, shape: Shape, *cells: str) -> None:
        """Print a row. Its last cell is the state of the listed item, empty if that is normal."""
        self._empty = ""
        if self._output.as_json or not self._output.at_terminal:
            name, *others = cells
            text = "  ".join([f"{name:<{_NAME_WIDTH}}", *(cell for cell in others if cell)])
            self._output.show(shape, text)
            return
        self._rows.append(cells)
        if len(self._rows) == _TABLE_ROWS:
            self.close()

    def close(self) -> None:
        """Print the remaining rows, or that there are none."""
        if self._empty:
            self._output.note(self._empty)
        if not self._rows:
            return
        lines = aligned(self._rows, self._headings, room=shutil.get_terminal_size().columns)
        heading, lines = (lines[:1], lines[1:]) if self._headings else ([], lines)
        shown = [
            styled(line, "warning") if cells[-1] else line
            for line, cells in zip(lines, self._rows, strict=True)
        ]
        self._output.write_lines([*heading, *shown])
        self._headings, self._rows = (), []


def nothing_listed(what: str, prefix: str, start_after: str, names: str = "names") -> str:
    """Describe an empty listing and its filters."""
    limits = [f"whose {names} begin with {prefix!r}"] if prefix else []
    limits += [f"after {start_after!r}"] if start_after else []
    return " ".join([f"No {what}", *limits]) + "."


class ProgressBar:
    """Shows a command's progress on standard error, only if that is a terminal."""

    def __init__(
        self, label: str, total: int, unit: str = "bytes", *, least: int = 0, prints: bool = False
    ) -> None:
        """Show nothing if less than `least` is to be done.

        Also show nothing if the command `prints` lines to a terminal meanwhile, because the two
        would mix.
        """
        self.shown = total >= least and sys.stderr.isatty() and not (prints and sys.stdout.isatty())
        self.label = label
        self.total = total
        self.unit = unit
        self._done = 0
        self._drawn_at = 0.0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            self._draw()
            click.echo(err=True)

    def update(self, count: int) -> None:
        """Count `count` more units of the work as done."""
        self._done += count
        if self.shown and monotonic() - self._drawn_at > _DRAW_INTERVAL:
            self._drawn_at = monotonic()
            self._draw()

    def _draw(self) -> None:
        # Imported here, because only commands that draw a bar need the package.
        from streamfold.follow.restore.progress import draw_bar

        # A total may be too small: a file whose last line has no newline is a byte shorter.
        done = min(self._done, self.total) if self.total else self._done
        draw_bar(sys.stderr, self.label, done, self.total, self.unit)


async def output_closed() -> None:
    """Wait until the reader of standard output closes it, even if nothing is being written.

    Only pipes report this. For any other output, the wait never ends.
    """
    closed = asyncio.Event()
    descriptor = sys.stdout.fileno()
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        await closed.wait()
    loop = asyncio.get_running_loop()
    # A pipe's writing end becomes readable only when its reading end is closed.
    loop.add_reader(descriptor, closed.set)
    try:
        await closed.wait()
    finally:
        loop.remove_reader(descriptor)
    discard_the_rest()


def discard_the_rest() -> None:
    """Redirect standard output to /dev/null, so that the interpreter's last flush does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


def confirm(removal: str, *, yes: bool) -> None:
    """Return if the user confirms `removal`. Raises otherwise."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise VerbFailedError(
            "confirmation_missing",
            f"this would {removal}, and there is no terminal to ask at: give --yes to do it",
            ExitStatus.USAGE,
        )
    # asyncio's handler only cancels the task, which cannot end while the prompt waits.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        confirmed = click.confirm(f"This will {removal}. Continue?", err=True)
    finally:
        signal.signal(signal.SIGINT, handler)
    if not confirmed:
        raise VerbFailedError("declined", "nothing was removed: the answer was no")
