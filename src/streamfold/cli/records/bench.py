"""`streamfold bench`: measures how fast a server acknowledges, delivers and returns records."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import click
import numpy as np

from streamfold.cli.connection import open_basin, verb
from streamfold.cli.json_output import Shape
from streamfold.cli.output import Output
from streamfold.cli.parameters import BasinType, ByteSize, Duration, FiniteFloat
from streamfold.cli.records.load import (
    MIB,
    RECORD_MAX,
    RECORD_MIN,
    Load,
    LoadMeasurement,
    LoadReader,
    LoadWriter,
    catch_up,
)
from streamfold.cli.terminal import aligned, styled

if TYPE_CHECKING:
    from s2_sdk import S2, S2Stream

#: Seconds between updates of the live table.
_INTERVAL = 0.5
#: Retention of an abandoned stream in seconds, and seconds of being empty after which it is
#: deleted.
_RETENTION, _MIN_AGE = 3600, 60
_PERCENTILES = (0, 50, 90, 99, 100)
_NAMES = ("min", "p50", "p90", "p99", "max")
_HEADINGS = ("", "records", "MiB", "seconds", "records/s", "MiB/s", *_NAMES)


@verb("bench", changes=True)
@click.argument("basin", required=False, type=BasinType(), metavar="[BASIN]")
@click.option("--storage-class", "-c", metavar="NAME", help="Storage class of the stream.")
@click.option(
    "--record-size",
    "-b",
    type=ByteSize(),
    default="8KiB",
    show_default=True,
    help="Metered bytes of a record, 128 to 1MiB.",
)
@click.option(
    "--target-mibps",
    "-t",
    type=FiniteFloat(min=0),
    default=1.0,
    show_default=True,
    help="MiB per second to append; 0 for as fast as the server goes.",
)
@click.option(
    "--duration",
    "-d",
    type=Duration(),
    default="10s",
    show_default=True,
    help="How long to append.",
)
@click.option(
    "--max-bytes", type=ByteSize(), default="1GiB", show_default=True, help="Append at most this."
)
@click.option(
    "--catchup-delay",
    "-w",
    type=Duration(),
    default="0s",
    show_default=True,
    help="Pause before the catch-up read: storage may have moved the records meanwhile.",
)
async def bench(
    s2: S2,
    output: Output,
    basin: str | None,
    storage_class: str | None,
    record_size: int,
    target_mibps: float,
    duration: int,
    max_bytes: int,
    catchup_delay: int,
) -> None:
    """Measure appends, a follower and a catch-up read, and verify all content.

    One session appends to a new stream while a follower reads it. A catch-up read then reads everything
    from the start. Latencies are in milliseconds: from append to ack, and from append to follower. The
    stream is deleted at the end. Without BASIN, the command creates a basin, and deletes it too.
    """
    if not RECORD_MIN <= record_size <= RECORD_MAX:
        raise click.UsageError(f"--record-size {record_size} must be {RECORD_MIN} to {RECORD_MAX}")
    if not duration or max_bytes < record_size:
        raise click.UsageError("--duration and --max-bytes must allow for one record at least")
    load = Load(record_size, target_mibps * MIB, duration, max_bytes)
    async with _temporary_stream(s2, basin, storage_class, output) as (name, stream):
        writer = LoadWriter(stream, load)
        follower = LoadReader(stream, writer)
        live = _Live(output, {"append": writer.measured, "follow": follower.measured})
        await _together(writer.run(), follower.run(), beside=live.run())
        if catchup_delay:
            output.note(f"waiting {catchup_delay} s before the catch-up read")
            await asyncio.sleep(catchup_delay)
        measurements = {
            "append": writer.measured,
            "follow": follower.measured,
            "catch_up": await catch_up(stream, writer.total.result()),
        }
    shape: Shape = {"stream": name, "record_bytes": record_size, "verified": True}
    shape |= {part: _shape(measured) for part, measured in measurements.items()}
    lines = _table({part.replace("_", "-"): measured for part, measured in measurements.items()})
    lines.append(
        f"every record was read twice, in order and unchanged: {writer.measured.records:,}"
    )
    output.show(shape, "\n".join(lines))


@asynccontextmanager
async def _temporary_stream(
    s2: S2, basin: str | None, storage_class: str | None, output: Output
) -> AsyncIterator[tuple[str, S2Stream]]:
    """Create a stream, and delete it however the block ends.

    Creates and deletes a basin if none is named.
    """
    from s2_sdk import StreamConfig, Timestamping, TimestampingMode

    home = basin or f"bench-{uuid4().hex[:16]}"
    name = f"bench/{uuid4()}"
    config = StreamConfig(
        storage_class=storage_class,
        retention_policy=_RETENTION,
        timestamping=Timestamping(TimestampingMode.CLIENT_REQUIRE, True),
        delete_on_empty_min_age=_MIN_AGE,
    )
    if basin is None:
        await s2.create_basin(home)
    try:
        streams = open_basin(s2, home)
        await streams.create_stream(name, config=config)
        try:
            output.note(f"appending to s2://{home}/{name}")
            yield f"s2://{home}/{name}", streams.stream(name)
        finally:
            await streams.delete_stream(name)
    finally:
        if basin is None:
            await s2.delete_basin(home)


async def _together(*work: Coroutine[Any, Any, None], beside: Coroutine[Any, Any, None]) -> None:
    """Wait until all `work` is done. Raises the first failure. Cancels `beside` at the end."""
    tasks = [asyncio.create_task(each) for each in work]
    extra = asyncio.create_task(beside)
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in (*tasks, extra):
            task.cancel()
        await asyncio.gather(*tasks, extra, return_exceptions=True)


class _Live:
    """Redraws the table in place if standard error is a terminal."""

    def __init__(self, output: Output, parts: dict[str, LoadMeasurement]) -> None:
        self._shown = sys.stderr.isatty() and not output.as_json
        self._parts = parts
        self._lines = 0

    async def run(self) -> None:
        while self._shown:
            try:
                await asyncio.sleep(_INTERVAL)
            finally:
                self._clear()
            lines = _table(self._parts)
            self._lines = len(lines)
            click.echo("\n".join(lines), err=True)

    def _clear(self) -> None:
        if self._lines:
            click.echo(f"\x1b[{self._lines}A\x1b[J", err=True, nl=False)
        self._lines = 0


def _shape(measured: LoadMeasurement) -> Shape:
    seconds = max(measured.seconds, 1e-9)
    shape: Shape = {
        "records": measured.records,
        "bytes": measured.size,
        "seconds": round(seconds, 6),
        "records_per_second": round(measured.records / seconds, 3),
        "mib_per_second": round(measured.size / MIB / seconds, 6),
    }
    if measured.latencies:
        shape["latency_ms"] = dict(zip(_NAMES, _percentiles(measured), strict=True))
    return shape


def _percentiles(measured: LoadMeasurement) -> Sequence[float]:
    values = np.percentile(np.array(measured.latencies), _PERCENTILES)
    return [round(float(value), 3) for value in values]


def _table(parts: dict[str, LoadMeasurement]) -> list[str]:
    rows = []
    for part, measured in parts.items():
        seconds = max(measured.seconds, 1e-9)
        latencies = (
            [f"{value:,.2f}" for value in _percentiles(measured)]
            if measured.latencies
            else ["-"] * len(_NAMES)
        )
        rows.append(
            (
                part,
                f"{measured.records:,}",
                f"{measured.size / MIB:,.1f}",
                f"{seconds:,.1f}",
                f"{measured.records / seconds:,.0f}",
                f"{measured.size / MIB / seconds:,.2f}",
                *latencies,
            )
        )
    lines = aligned(rows, _HEADINGS, right=range(1, len(_HEADINGS)))
    return [*lines, styled("latencies in ms", "faint")]
