"""`streamfold append`: standard input becomes records, in batches, acknowledged in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, BinaryIO, Final

import click

from streamfold.cli import json_output
from streamfold.cli.connection import verb
from streamfold.cli.output import Output
from streamfold.cli.parameters import StreamRef, stream_argument
from streamfold.cli.records.input_records import Batcher, arriving_lines, line_parser, parse_headers
from streamfold.cli.records.options import condition_options, encryption_option, open_stream

if TYPE_CHECKING:
    from s2_sdk import S2, AppendAck, AppendInput, AppendSession, BatchSubmitTicket

#: Metered bytes sent and not acknowledged: enough to keep a distant server busy.
_UNACKED_BYTES: Final = 16 << 20
#: Batches sent and not acknowledged: bounds the many small ones that a trickle of input makes.
_UNACKED_BATCHES: Final = 256


@verb("append", changes=True)
@stream_argument
@click.option(
    "--format",
    "record_format",
    type=click.Choice(["text", "json", "base64"]),
    default="text",
    show_default=True,
    help="What a line is: a body; a JSON object; one with body and headers in base64.",
)
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    help="Header for every record; may be given several times.",
)
@click.option(
    "--input",
    "source",
    type=click.File("rb"),
    default="-",
    metavar="FILE",
    help="Read a file instead of standard input.",
)
@condition_options
@click.option(
    "--at-least-once",
    is_flag=True,
    help="Repeat appends of unknown outcome instead of stopping: records may be appended twice.",
)
@encryption_option
async def append(
    s2: S2,
    output: Output,
    ref: StreamRef,
    record_format: str,
    headers: tuple[str, ...],
    source: BinaryIO,
    match_seq_num: int | None,
    fencing_token: str | None,
    at_least_once: bool,
    encryption_key_file: Path | None,
) -> None:
    """Append the lines of standard input, each as a record.

    Lines are sent as they arrive, in batches. The last line of output says how much was acknowledged,
    even if the append fails or is interrupted.
    """
    if at_least_once and match_seq_num is not None:
        raise click.UsageError(
            "--at-least-once and --match-seq-num exclude each other: "
            "a repeated append would no longer match"
        )
    parse, every = line_parser(record_format), parse_headers(headers)
    batcher = Batcher(parse, every, match_seq_num, fencing_token)
    stream = open_stream(s2, ref, encryption_key_file)
    progress = Progress()
    try:
        async with stream.append_session(
            max_unacked_bytes=_UNACKED_BYTES, max_unacked_batches=_UNACKED_BATCHES
        ) as session:
            await append_all(session, _batches(source, batcher), progress)
    finally:
        progress.report(output)


@dataclass(slots=True)
class Progress:
    """Counts what has been acknowledged."""

    records: int = 0
    batches: int = 0
    first: AppendAck | None = None
    last: AppendAck | None = None
    since: float = field(default_factory=perf_counter)

    def note(self, ack: AppendAck) -> None:
        self.first = self.first or ack
        self.last = ack
        self.batches += 1
        self.records += ack.end.seq_num - ack.start.seq_num

    def report(self, output: Output) -> None:
        """Print the counts: as JSON on standard output, or as text on standard error."""
        first, last = self.first, self.last
        if output.as_json:
            start = json_output.position(first.start) if first else None
            end, tail = (
                (json_output.position(last.end), json_output.position(last.tail))
                if last
                else (None,) * 2
            )
            output.show_objects(
                [{"records": self.records, "batches": self.batches,
                  "start": start, "end": end, "tail": tail}]
            )  # fmt: skip
        elif first and last:
            output.note(
                f"acknowledged: {self.records} records in {self.batches} batches, seq_num "
                f"{first.start.seq_num} to {last.end.seq_num - 1}, {perf_counter() - self.since:.2f} s"
            )
        else:
            output.note("acknowledged: nothing")


async def _batches(source: BinaryIO, batcher: Batcher) -> AsyncIterator[AppendInput]:
    async with aclosing(arriving_lines(source.fileno())) as groups:
        async for lines in groups:
            for batch in batcher.batches(lines):
                yield batch


async def append_all(
    session: AppendSession, batches: AsyncIterator[AppendInput], progress: Progress
) -> None:
    """Send `batches` and note their acknowledgements, concurrently.

    Stops at the first failure. Waits for everything sent before, however it ends.
    """
    tickets: asyncio.Queue[BatchSubmitTicket | None] = asyncio.Queue()
    sending = asyncio.create_task(_send(session, batches, tickets))
    acknowledging = asyncio.create_task(_acknowledge(tickets, progress))
    try:
        await asyncio.wait({sending, acknowledging}, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        tickets.put_nowait(None)
        await acknowledging
    await sending


async def _send(
    session: AppendSession,
    batches: AsyncIterator[AppendInput],
    tickets: asyncio.Queue[BatchSubmitTicket | None],
) -> None:
    async for batch in batches:
        tickets.put_nowait(await session.submit(batch))
    tickets.put_nowait(None)


async def _acknowledge(
    tickets: asyncio.Queue[BatchSubmitTicket | None], progress: Progress
) -> None:
    while (ticket := await tickets.get()) is not None:
        progress.note(await ticket)
