"""`streamfold read` and `tail`: print records as text or JSON lines, and follow new ones."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from streamfold.cli import json_output
from streamfold.cli.connection import encryption_option, open_stream, verb
from streamfold.cli.exit_status import OutputClosedError
from streamfold.cli.output import Output, output_closed
from streamfold.cli.parameters import (
    ByteSize,
    Duration,
    RecordFormatType,
    TimeType,
    stream_argument,
)
from streamfold.model.names import StreamRef

if TYPE_CHECKING:
    from s2_sdk import S2, ReadSession, SeqNum, SequencedRecord, TailOffset, Timestamp

#: Records: more than any stream has. A read session with a limit ends at the tail, and one without
#: waits there.
_NO_LIMIT: Final = (1 << 63) - 1
#: Seconds that a read session with a limit waits at the tail: S2's maximum.
_WAIT_MAX: Final = (1 << 32) - 1

_follow_option = click.option(
    "--follow", "-f", is_flag=True, help="Print new records as they arrive."
)
_format_option = click.option(
    "--format",
    "record_format",
    type=RecordFormatType(),
    help="Print bodies, JSON objects, or JSON objects with body and headers in base64.  "
    "[default: text, or json with --json]",
)


@verb("read")
@stream_argument
@click.option("--seq-num", type=click.IntRange(min=0), metavar="N", help="Start at this seq_num.")
@click.option("--timestamp", type=TimeType(), help="Start at this time (ms, or RFC 3339).")
@click.option("--tail-offset", type=click.IntRange(min=0), metavar="N",
              help="Start this many records before the tail.")  # fmt: skip
@click.option("--ago", type=Duration(), help="Start this long ago: 15m, 2h.")
@click.option("--limit-count", "-n", type=click.IntRange(min=0), metavar="N",
              help="At most this many records.")  # fmt: skip
@click.option("--limit-bytes", type=ByteSize(), help="At most this many metered bytes: 1MiB.")
@click.option("--until", type=TimeType(), help="Only records before this time.")
@click.option("--clamp", is_flag=True, help="Start at the tail if the start is beyond it.")
@_follow_option
@_format_option
@encryption_option
async def read(
    s2: S2,
    output: Output,
    ref: StreamRef,
    seq_num: int | None,
    timestamp: int | None,
    tail_offset: int | None,
    ago: int | None,
    limit_count: int | None,
    limit_bytes: int | None,
    until: int | None,
    clamp: bool,
    follow: bool,
    record_format: str | None,
    encryption_key_file: Path | None,
) -> None:
    """Print the records up to the tail, from the first one unless a start is given.

    With --follow, records are printed as they arrive, until a limit is reached or Ctrl-C.
    """
    start = _start(seq_num, timestamp, tail_offset, ago)
    printer = RecordPrinter(output, record_format)
    session = open_stream(s2, ref, encryption_key_file).read_session(
        start=start,
        clamp_to_tail=clamp or (seq_num is None and timestamp is None),
        until_timestamp=until,
        **_extent(limit_count, limit_bytes, follow=follow, limited=until is not None),
    )
    await _print(session, printer, None if follow else 0 if clamp else seq_num or 0)
    printer.note_if_empty()


@verb("tail")
@stream_argument
@click.option("--lines", "-n", default=10, show_default=True, type=click.IntRange(min=0),
              metavar="N", help="How many records.")  # fmt: skip
@_follow_option
@_format_option
@encryption_option
async def tail(
    s2: S2,
    output: Output,
    ref: StreamRef,
    lines: int,
    follow: bool,
    record_format: str | None,
    encryption_key_file: Path | None,
) -> None:
    """Print the last records and, with --follow, new ones as they arrive until Ctrl-C."""
    from s2_sdk import TailOffset

    printer = RecordPrinter(output, record_format)
    session = open_stream(s2, ref, encryption_key_file).read_session(
        start=TailOffset(lines), clamp_to_tail=True, **_extent(None, None, follow=follow)
    )
    await _print(session, printer, None if follow else 0)
    printer.note_if_empty()


def _start(
    seq_num: int | None, timestamp: int | None, tail_offset: int | None, ago: int | None
) -> SeqNum | Timestamp | TailOffset:
    from s2_sdk import SeqNum, TailOffset, Timestamp

    starts = [value for value in (seq_num, timestamp, tail_offset, ago) if value is not None]
    if len(starts) > 1:
        raise click.UsageError(
            "--seq-num, --timestamp, --tail-offset and --ago exclude each other: give one start"
        )
    if timestamp is not None:
        return Timestamp(timestamp)
    if ago is not None:
        return Timestamp(max(0, int((time.time() - ago) * 1000)))
    if tail_offset is not None:
        return TailOffset(tail_offset)
    return SeqNum(seq_num or 0)


def _extent(
    count: int | None, size: int | None, *, follow: bool, limited: bool = False
) -> dict[str, Any]:
    """Return how far to read: up to the limits and, unless following, not beyond the tail."""
    from s2_sdk import ReadLimit

    limited = limited or count is not None or size is not None
    if not limited and not follow:
        count = _NO_LIMIT
    return {"limit": ReadLimit(count, size), "wait": _WAIT_MAX if limited and follow else None}


class RecordPrinter:
    """Prints records in one format."""

    def __init__(self, output: Output, record_format: str | None) -> None:
        if output.as_json and record_format == "text":
            raise click.UsageError("--json and --format text exclude each other: choose one")
        self._output = output
        self._format = record_format or ("json" if output.as_json else "text")
        self._empty = True

    def note_if_empty(self) -> None:
        """Inform a person at a terminal that nothing was read."""
        if self._empty and self._output.at_terminal:
            self._output.note("No records.")

    def print(self, records: list[SequencedRecord]) -> None:
        self._empty = self._empty and not records
        if self._format == "text":
            self._print_bodies(records)
            return
        shape = json_output.record if self._format == "json" else json_output.record_in_base64
        self._output.show_objects(shape(record) for record in records)

    def _print_bodies(self, records: list[SequencedRecord]) -> None:
        """Print bodies, each with a newline, and note commands on standard error."""
        bodies = [record.body for record in records if not record.is_command_record()]
        self._output.show_bodies(bodies)
        if len(bodies) < len(records):
            for record in records:
                if record.is_command_record():
                    self._output.note(_command_text(record))


def _command_text(record: SequencedRecord) -> str:
    name = record.headers[0][1].decode(errors="replace")
    value = (
        int.from_bytes(record.body, "big")
        if name == "trim"
        else record.body.decode(errors="replace")
    )
    return f"record {record.seq_num} is a command: {name} {value!r}"


async def _print(session: ReadSession, printer: RecordPrinter, reached: int | None) -> None:
    """Print the session's records until it ends or the reader closes the output.

    A start beyond the tail is an error, unless the tail is at or after the seq_num `reached`. In
    that case there is nothing to print.
    """
    from streamfold.follow.clients.feed import cancel_until_done

    reading = asyncio.create_task(_print_all(session, printer, reached))
    unread = asyncio.create_task(output_closed())
    try:
        await asyncio.wait({reading, unread}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise OutputClosedError("the output was closed")
    finally:
        reading.cancel()
        unread.cancel()
        for task in (reading, unread, asyncio.create_task(session.close())):
            await cancel_until_done(task)
    await reading


async def _print_all(session: ReadSession, printer: RecordPrinter, reached: int | None) -> None:
    from s2_sdk import ReadUnwrittenError

    try:
        async for batch in session:
            printer.print(batch.records)
    except ReadUnwrittenError as error:
        if reached is None or error.tail.seq_num < reached:
            raise
