"""What verbs print: JSON lines for programs, text for people, both on standard output."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Iterable, Mapping
from time import monotonic

import click
import msgspec

from streamfold.cli.exit_status import ExitStatus, OutputClosedError, VerbFailedError
from streamfold.cli.json_output import Shape

#: Seconds between two updates of a progress bar.
_DRAW_INTERVAL = 0.1


class Output:
    """Prints what a verb found, as JSON or as text."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._encoder = msgspec.json.Encoder()

    def show(self, shape: Mapping[str, object], text: str) -> None:
        """Print `shape` as a line of JSON, or `text`."""
        self.write(self._encoder.encode(shape) if self.as_json else text.encode(), b"\n")

    def show_objects(self, shapes: Iterable[Shape]) -> None:
        """Print JSON lines, even without --json."""
        self.write(*(self._encoder.encode(shape) + b"\n" for shape in shapes))

    def write_lines(self, lines: Iterable[str]) -> None:
        """Print lines for people."""
        self.write(*(f"{line}\n".encode() for line in lines))

    def write(self, *parts: bytes) -> None:
        """Write bytes and flush them; OutputClosedError if the reader has closed the output."""
        try:
            sys.stdout.buffer.write(b"".join(parts))
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            _discard_the_rest()
            raise OutputClosedError("the output was closed") from None

    def note(self, text: str) -> None:
        """Print a note for people on standard error."""
        if not self.as_json:
            click.echo(text, err=True)


class ProgressBar:
    """Shows how much of a verb's work is done, on standard error and only if that is a terminal."""

    def __init__(self, label: str, total: int, unit: str = "bytes", *, least: int = 0) -> None:
        """With less than `least` to do, nothing is shown."""
        self._shown = total >= least and sys.stderr.isatty()
        self.label = label
        self.total = total
        self.unit = unit
        self._done = 0
        self._drawn_at = 0.0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._draw()
            click.echo(err=True)

    def update(self, count: int) -> None:
        """Count more of the work as done."""
        self._done += count
        if self._shown and monotonic() - self._drawn_at > _DRAW_INTERVAL:
            self._drawn_at = monotonic()
            self._draw()

    def _draw(self) -> None:
        # Here, because only verbs that draw a bar need the package.
        from streamfold.follow.restore.progress import draw_bar

        draw_bar(sys.stderr, self.label, self._done, self.total, self.unit)


async def output_closed() -> None:
    """Return when the reader of standard output closes it, even if nothing is being written.

    Only a pipe reports this; for anything else the wait never ends.
    """
    closed = asyncio.Event()
    descriptor = sys.stdout.fileno()
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        await closed.wait()
    loop = asyncio.get_running_loop()
    # The writing end of a pipe becomes readable only when the reading end is closed.
    loop.add_reader(descriptor, closed.set)
    try:
        await closed.wait()
    finally:
        loop.remove_reader(descriptor)
    _discard_the_rest()


def _discard_the_rest() -> None:
    """Redirect standard output to /dev/null, so that the interpreter's last flush does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


def confirm(removal: str, *, yes: bool) -> None:
    """Return if the user confirms `removal`, and raise otherwise."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise VerbFailedError(
            "confirmation_missing",
            f"this would {removal}, and there is no terminal to ask at: give --yes to do it",
            ExitStatus.USAGE,
        )
    if not click.confirm(f"This will {removal}. Continue?", err=True):
        raise VerbFailedError("declined", "nothing was removed: the answer was no")
