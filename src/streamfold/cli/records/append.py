"""`streamfold append`: turns standard input into records, acknowledged in order."""

from __future__ import annotations

import asyncio
import binascii
import os
import stat
import threading
from base64 import b64decode
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, BinaryIO, Final, Literal, TypeAlias

import click
import msgspec

from streamfold.cli import json_output
from streamfold.cli.connection import condition_options, encryption_option, open_stream, verb
from streamfold.cli.exit_status import VerbFailedError
from streamfold.cli.output import Output, ProgressBar
from streamfold.cli.parameters import RecordFormatType, stream_argument
from streamfold.model.names import StreamRef

if TYPE_CHECKING:
    from s2_sdk import S2, AppendAck, AppendInput, AppendSession, BatchSubmitTicket, Record

#: Bytes per read. A pipe returns at most 64 KiB.
_CHUNK: Final = 1 << 20
#: Chunks read ahead of what is being sent.
_AHEAD: Final = 2
#: Maximum bytes of a line. A record of 1 MiB with headers, in base64 and JSON, is well below this.
LINE_MAX: Final = 8 << 20
#: Maximum records and metered bytes of a batch: S2's limits.
_BATCH_RECORDS: Final = 1000
_BATCH_BYTES: Final = 1 << 20
#: Bytes of a file from which a progress bar is drawn.
_BAR_BYTES: Final = 8 << 20
Headers: TypeAlias = list[tuple[bytes, bytes]]
#: Body, headers and timestamp of a line.
Parsed: TypeAlias = tuple[bytes, Headers, int | None]
Parser: TypeAlias = Callable[[bytes], Parsed]
#: Unacknowledged metered bytes: enough to keep a distant server busy.
_UNACKED_BYTES: Final = 16 << 20
#: Unacknowledged batches, which bounds the many small batches that slow input creates.
_UNACKED_BATCHES: Final = 256


async def arriving_lines(descriptor: int) -> AsyncGenerator[list[bytes]]:
    """Yield lines without their newline, in groups as they arrive. The last line needs no newline."""
    rest = b""
    async for chunk in _chunks(descriptor):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > LINE_MAX:
            raise VerbFailedError(
                "invalid", f"a line of input has more than {LINE_MAX} bytes: no record is that long"
            )
        if lines:
            yield lines
    if rest:
        yield [rest]


async def _chunks(descriptor: int) -> AsyncGenerator[bytes]:
    """Yield a descriptor's content to its end, as read by a daemon thread.

    An event loop cannot wait for a file, and a read from a terminal cannot be cancelled. A daemon
    thread does not keep the process from ending.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(_AHEAD)

    def read() -> None:
        with suppress(RuntimeError):  # the loop is closed: the command has ended
            while True:
                room.acquire()
                try:
                    chunk: bytes | OSError = os.read(descriptor, _CHUNK)
                except OSError as error:
                    chunk = error
                loop.call_soon_threadsafe(arrived.put_nowait, chunk)
                if not chunk or isinstance(chunk, OSError):
                    return

    threading.Thread(target=read, name="input", daemon=True).start()
    while chunk := await arrived.get():
        if isinstance(chunk, OSError):
            raise VerbFailedError("input", f"the input cannot be read: {chunk.strerror}")
        room.release()
        yield chunk


class RecordLine(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A record as JSON, in the form that `read` prints."""

    body: str = ""
    headers: list[tuple[str, str]] = []
    timestamp: int | None = None
    #: Accepted but ignored, because the append assigns another.
    seq_num: int | None = None
    #: Marks a record whose body, header names and header values are in base64.
    encoding: Literal["base64"] | None = None


_DECODER: Final = msgspec.json.Decoder(RecordLine)


def line_parser(record_format: str) -> Parser:
    """Return the parser for lines in this format."""
    return {"text": _parse_text, "json": _parse_json, "json-base64": _parse_base64}[record_format]


def _parse_text(line: bytes) -> Parsed:
    return line, [], None


def _parse_json(line: bytes) -> Parsed:
    record = _DECODER.decode(line)
    if record.encoding == "base64":
        return _decoded(record)
    headers = [(name.encode(), value.encode()) for name, value in record.headers]
    return record.body.encode(), headers, record.timestamp


def _parse_base64(line: bytes) -> Parsed:
    return _decoded(_DECODER.decode(line))


def _decoded(record: RecordLine) -> Parsed:
    headers = [(_bytes(name), _bytes(value)) for name, value in record.headers]
    return _bytes(record.body), headers, record.timestamp


def _bytes(text: str) -> bytes:
    return b64decode(text, validate=True)


def parse_headers(texts: Sequence[str]) -> Headers:
    """Parse headers written as NAME=VALUE."""
    headers = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise click.UsageError(f"header {text!r} must be written NAME=VALUE")
        headers.append((os.fsencode(name), os.fsencode(value)))  # the argument's own bytes
    return headers


class Batcher:
    """Makes batches of lines. Each batch matches the next seq_num if the first one has a condition."""

    def __init__(
        self,
        parse: Parser,
        headers: Headers,
        match_seq_num: int | None,
        fencing_token: str | None,
    ) -> None:
        from s2_sdk import AppendInput, Record

        self._input, self._record = AppendInput, Record
        self._parse = parse
        self._headers = headers
        self._match_seq_num = match_seq_num
        self._fencing_token = fencing_token
        self._lines = 0

    def batches(self, lines: Sequence[bytes]) -> Iterator[AppendInput]:
        """Yield `lines` in as few batches as possible."""
        records: list[Record] = []
        size = 0
        for line in lines:
            self._lines += 1
            body, headers, timestamp = self._parse_line(line)
            metered = 8 + len(body)
            if headers:
                metered += sum(2 + len(name) + len(value) for name, value in headers)
            if metered > _BATCH_BYTES:
                raise self._refusal(
                    f"has {metered} metered bytes, and a record may have {_BATCH_BYTES}"
                )
            if len(records) == _BATCH_RECORDS or size + metered > _BATCH_BYTES:
                yield self._batch(records)
                records, size = [], 0
            records.append(self._record(body, headers, timestamp))
            size += metered
        if records:
            yield self._batch(records)

    def _parse_line(self, line: bytes) -> Parsed:
        try:
            body, headers, timestamp = self._parse(line)
        except (msgspec.DecodeError, binascii.Error, ValueError) as error:
            raise self._refusal(f"is not a record: {error}") from None
        return body, self._headers + headers if self._headers else headers, timestamp

    def _batch(self, records: list[Record]) -> AppendInput:
        batch = self._input(records, self._match_seq_num, self._fencing_token)
        if self._match_seq_num is not None:
            self._match_seq_num += len(records)
        return batch

    def _refusal(self, what: str) -> VerbFailedError:
        return VerbFailedError("invalid", f"line {self._lines} of the input {what}")


@verb("append", changes=True)
@stream_argument
@click.option(
    "--format",
    "record_format",
    type=RecordFormatType(),
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
    if source.isatty():
        output.note("Each line becomes a record when you press Enter. Ctrl-D ends the input.")
    progress = AppendCounts()
    try:
        async with stream.append_session(
            max_unacked_bytes=_UNACKED_BYTES, max_unacked_batches=_UNACKED_BATCHES
        ) as session:
            with ProgressBar("append", _file_bytes(source), least=_BAR_BYTES) as bar:
                await append_all(session, _batches(source, batcher, bar), progress)
    finally:
        progress.report(output)


@dataclass(slots=True)
class AppendCounts:
    """Counts acknowledged appends."""

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
        """Print the counts, as JSON on standard output or as text on standard error."""
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
                f"acknowledged: {self.records} record{'s' * (self.records != 1)} in "
                f"{self.batches} batch{'es' * (self.batches != 1)}, seq_num "
                f"{first.start.seq_num} to {last.end.seq_num - 1}, {perf_counter() - self.since:.2f} s"
            )
        else:
            output.note("acknowledged: nothing")


def _file_bytes(source: BinaryIO) -> int:
    """Return the size of a file, or 0 for input without a known end."""
    status = os.fstat(source.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


async def _batches(
    source: BinaryIO, batcher: Batcher, bar: ProgressBar
) -> AsyncIterator[AppendInput]:
    async with aclosing(arriving_lines(source.fileno())) as groups:
        async for lines in groups:
            for batch in batcher.batches(lines):
                yield batch
            bar.update(sum(len(line) + 1 for line in lines))


async def append_all(
    session: AppendSession, batches: AsyncIterator[AppendInput], progress: AppendCounts
) -> None:
    """Send `batches` and record their acknowledgements concurrently.

    Stops at the first failure, after waiting for the outcome of everything already sent.
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
    tickets: asyncio.Queue[BatchSubmitTicket | None], progress: AppendCounts
) -> None:
    while (ticket := await tickets.get()) is not None:
        progress.note(await ticket)
