"""Turns lines of standard input into records, and records into batches as large as S2 allows."""

from __future__ import annotations

import asyncio
import binascii
import os
import threading
from base64 import b64decode
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeAlias

import click
import msgspec

from streamfold.cli.exit_status import VerbFailedError

if TYPE_CHECKING:
    from s2_sdk import AppendInput, Record

#: Bytes per read; a pipe returns at most 64 KiB.
_CHUNK: Final = 1 << 20
#: Chunks read ahead of what is being sent.
_AHEAD: Final = 2
#: Bytes of one line: a record of 1 MiB with its headers, in base64 and JSON, is well below.
LINE_MAX: Final = 8 << 20


async def arriving_lines(descriptor: int) -> AsyncGenerator[list[bytes]]:
    """Yield lines without their newline, in groups as they arrive; the last needs no newline."""
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
    """Yield what a descriptor holds, to its end, read by a daemon thread.

    An event loop cannot wait for a file, and a read from a terminal cannot be cancelled: a daemon
    thread does not keep the process from ending.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(_AHEAD)

    def read() -> None:
        with suppress(RuntimeError):  # the loop is closed: the verb has ended
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


#: Records and metered bytes of one batch: S2's limits.
_BATCH_RECORDS: Final = 1000
_BATCH_BYTES: Final = 1 << 20

Headers: TypeAlias = list[tuple[bytes, bytes]]
#: Body, headers and timestamp of a line.
Parsed: TypeAlias = tuple[bytes, Headers, int | None]
Parser: TypeAlias = Callable[[bytes], Parsed]


class RecordLine(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A record as JSON, in the form in which `read` prints it."""

    body: str = ""
    headers: list[tuple[str, str]] = []
    timestamp: int | None = None
    #: Accepted and ignored: the append assigns another.
    seq_num: int | None = None


_DECODER: Final = msgspec.json.Decoder(RecordLine)


def line_parser(record_format: str) -> Parser:
    """Return the parser of lines in this format."""
    return {"text": _parse_text, "json": _parse_json, "base64": _parse_base64}[record_format]


def _parse_text(line: bytes) -> Parsed:
    return line, [], None


def _parse_json(line: bytes) -> Parsed:
    record = _DECODER.decode(line)
    headers = [(name.encode(), value.encode()) for name, value in record.headers]
    return record.body.encode(), headers, record.timestamp


def _parse_base64(line: bytes) -> Parsed:
    record = _DECODER.decode(line)
    headers = [(_bytes(name), _bytes(value)) for name, value in record.headers]
    return _bytes(record.body), headers, record.timestamp


def _bytes(text: str) -> bytes:
    return b64decode(text, validate=True)


def parse_headers(given: Sequence[str]) -> Headers:
    """Parse headers written NAME=VALUE."""
    headers = []
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise click.UsageError(f"header {text!r} must be written NAME=VALUE")
        headers.append((name.encode(), value.encode()))
    return headers


class Batcher:
    """Makes batches of lines, each matching the next seq_num if the first one does."""

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
        """Yield `lines` in as few batches as they fit into."""
        records: list[Record] = []
        size = 0
        for line in lines:
            self._lines += 1
            body, headers, timestamp = self._parse_line(line)
            metered = 8 + len(body)
            if headers:
                metered += sum(2 + len(name) + len(value) for name, value in headers)
            if metered > _BATCH_BYTES:
                raise self._refusal(f"has {metered} bytes, and a record may have {_BATCH_BYTES}")
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
