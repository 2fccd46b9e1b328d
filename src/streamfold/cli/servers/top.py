"""`streamfold top`: continuously shows a server's activity in a terminal."""

from __future__ import annotations

import os
import select
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from streamfold.cli.exit_status import VerbFailedError
from streamfold.cli.json_output import Shape
from streamfold.cli.output import Output
from streamfold.cli.parameters import FiniteFloat
from streamfold.cli.servers.server_metrics import Reading, read_metrics, view
from streamfold.cli.target import JSON_OPTION, TARGET_OPTIONS, Target, find_target
from streamfold.cli.terminal import aligned, inert, styled

#: Number of readings whose rates are drawn as a line.
_HISTORY = 60
_BARS = "▁▂▃▄▅▆▇█"
#: Maximum characters of a stream's name. With its rates, it fits into 80 columns.
_NAME_MAX = 48
#: The server counts the current window of 5 s and the one before.
_BUSIEST = "busiest streams, last 5 to 10 s"
#: Lines needed below the streams: a failure and the key to quit, each after an empty line.
_BELOW = 4
#: Maximum bytes of keys read at once.
_KEYS = 64
#: Moves to the top left, clears each line as it is written, and clears the rest of the screen.
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
#: Switches to the terminal's second screen, without a cursor, and cuts long lines instead of
#: wrapping them, which would scroll a narrow window. The first screen is then restored.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"


@click.command()
@click.option(
    "--interval",
    type=FiniteFloat(min=0.1, max=3600),
    default=2.0,
    show_default=True,
    help="Seconds between two readings.",
)
@click.option("--once", is_flag=True, help="Show one interval and end.")
def top(
    interval: float,
    once: bool,
    endpoint: str | None,
    token_file: Path | None,
    context: str | None,
    as_json: bool,
) -> None:
    """Show what a server is doing, until q or Ctrl-C.

    Reads the server's /metrics: rates of appends, latency of acks, followers, memory, storage; and
    /v1/busiest-streams: where most is appended. It waits for a server that goes away. Where standard
    output is not a terminal, one interval is shown.
    """
    target = find_target(endpoint, token_file, context)
    output = Output(as_json=as_json)
    before = read_metrics(target)
    if as_json or once or not sys.stdout.isatty():
        _print(output, target, before, interval, once=once or not as_json)
    else:
        with suppress(KeyboardInterrupt):  # one of the two ways to end it
            _Screen(target, interval).run(before)


top.params.extend((*TARGET_OPTIONS, JSON_OPTION))


def _print(output: Output, target: Target, before: Reading, interval: float, *, once: bool) -> None:
    while True:
        time.sleep(interval)
        now = read_metrics(target)
        shape = view(before, now)
        output.show(shape, "\n".join([*_lines(shape), *_busiest(shape["busiest"])]))
        if once:
            return
        before = now


class _Screen:
    """Draws the view on the whole terminal, and keeps going if the server goes away."""

    def __init__(self, target: Target, interval: float) -> None:
        self._target, self._interval = target, interval
        self._records: deque[float] = deque(maxlen=_HISTORY)
        self._acks: deque[float] = deque(maxlen=_HISTORY)
        self._shape: Shape | None = None
        self._trouble = ""

    def run(self, before: Reading) -> None:
        with _second_screen():
            while not self._draw_and_wait():
                try:
                    now = read_metrics(self._target)
                except VerbFailedError as error:
                    self._trouble = error.message
                    continue
                self._trouble = ""
                self._note(view(before, now))
                before = now

    def _note(self, shape: Shape) -> None:
        self._shape = shape
        self._records.append(_number(shape["records_per_second"]))
        acks = shape["ack_ms"]
        self._acks.append(acks["p99"] if isinstance(acks, dict) else 0.0)

    def _draw_and_wait(self) -> bool:
        """Draw, then wait until the next reading is due. Returns whether a key ended the program."""
        size = shutil.get_terminal_size()
        clock = time.strftime("%H:%M:%S")
        lines = [styled(f"streamfold top  {inert(self._target.account)}  {clock}", "heading"), ""]
        if self._shape is None:
            lines.append("reading…")
        else:
            lines += _lines(self._shape)
            lines += [
                "",
                f"records/s  {_line(self._records)}",
                f"ack p99    {_line(self._acks)}",
            ]
            # As many streams as fit.
            lines += _busiest(self._shape["busiest"])[: max(0, size.lines - len(lines) - _BELOW)]
        if self._trouble:
            trouble = f"trying again: {inert(self._trouble)}"  # in one line, like all others
            lines += ["", styled(trouble[: size.columns], "failure")]
        lines += ["", styled("q quits", "faint")]
        shown = "\r\n".join(line + _CLEAR_LINE for line in lines[: size.lines])
        sys.stdout.write(_HOME + shown + _CLEAR_REST)
        sys.stdout.flush()
        ready, _, _ = select.select([sys.stdin], [], [], self._interval)
        if not ready:
            return False
        pressed = os.read(sys.stdin.fileno(), _KEYS)
        return not pressed or b"q" in pressed.lower()  # nothing was read: the terminal is gone


@contextmanager
def _second_screen() -> Iterator[None]:
    """Draw on the terminal's second screen, with keys available as they are pressed."""
    import termios
    import tty

    settings = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    if settings is not None:
        tty.setcbreak(sys.stdin)
    sys.stdout.write(_ENTER)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        if settings is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)


def _lines(shape: Shape) -> list[str]:
    """Return the view as a table, followed by any problem in words."""
    rows = [
        ("appends", _per_second(shape["appends_per_second"]), "records",
         _per_second(shape["records_per_second"]), "bytes", _bytes(shape["bytes_per_second"], "/s")),
        ("ack p50", *_latency(shape["ack_ms"])),
        ("flush p50", *_latency(shape["flush_ms"])),
        ("commits", _per_second(shape["commits_per_second"]), "queued",
         _bytes(shape["queue_bytes"]), "waiting", _count(shape["queue_waiting"])),
        ("followers", _count(shape["followers"]), "connections", _count(shape["connections"]),
         "unread", _bytes(shape["unread_bytes"])),
        ("cpu", _percent(shape["cpu"]), "memory", _bytes(shape["memory_bytes"]), "up",
         _duration(shape["uptime_seconds"])),
        ("stored", _bytes(shape["stored_live_bytes"]), "on disk",
         _bytes(shape["stored_disk_bytes"]), "free", _bytes(shape["storage_free_bytes"])),
    ]  # fmt: skip
    lines = aligned(rows, right=(1, 3, 5))
    if shape["storage_full"]:
        full = "appends are refused: storage is full; free some, or trim streams"
        lines.append(styled(full, "failure"))
    if shape["storage_open"] == 0:
        lines.append(
            styled("storage failed and is being reopened: see the server's log", "failure")
        )
    return lines


def _busiest(streams: object) -> list[str]:
    """Return the busiest streams as a table, if there are any."""
    if not isinstance(streams, list) or not streams:
        return []
    rows = [
        (
            _clipped(f"{stream['basin']}/{stream['stream']}"),
            _per_second(stream["records_per_second"]),
            _bytes(stream["bytes_per_second"], "/s"),
        )
        for stream in streams
    ]
    return ["", *aligned(rows, (_BUSIEST, "records", "bytes"), right=(1, 2))]


def _clipped(name: str) -> str:
    """Shorten a name to fit a narrow terminal. Its end is more informative than its beginning."""
    name = inert(name)
    return name if len(name) <= _NAME_MAX else f"…{name[1 - _NAME_MAX :]}"


def _latency(latencies: object) -> Sequence[str]:
    if not isinstance(latencies, dict):
        return ("-", "p90", "-", "p99", "-")
    p50, p90, p99 = (f"{latencies[name]:,.2f} ms" for name in ("p50", "p90", "p99"))
    return (p50, "p90", p90, "p99", p99)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _per_second(value: object) -> str:
    return "-" if value is None else f"{_number(value):,.1f}/s"


def _count(value: object) -> str:
    return "-" if value is None else f"{_number(value):,.0f}"


def _percent(value: object) -> str:
    return "-" if value is None else f"{_number(value):.0%}"


def _bytes(value: object, suffix: str = "") -> str:
    if value is None:
        return "-"
    size = _number(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}{suffix}" if unit == "B" else f"{size:,.1f} {unit}{suffix}"
        size /= 1024
    return f"{size:,.1f} TiB{suffix}"


def _duration(value: object) -> str:
    if value is None:
        return "-"
    minutes, seconds = divmod(int(_number(value)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}h {minutes}m" if hours else f"{minutes}m {seconds}s"


def _line(values: Sequence[float]) -> str:
    """Return a line of bars, up to the largest value."""
    most = max(values, default=0.0)
    if most <= 0:
        return _BARS[0] * len(values)
    last = len(_BARS) - 1
    return "".join(_BARS[round(value / most * last)] for value in values) + f"  max {most:,.1f}"
