"""Appends to the stream of one or several tables exactly once, and finds where its source stopped.

Records carry their source position in headers, so the stream itself shows how far it is. An ingester
first fences the stream with its own token, which stops every other ingester, and then reads the last
record. From then on only its own appends change the stream. Every append names the seq_num of its first
record, so a repeated append is rejected. After any failure the ingester starts again from here.

A stream of several tables is in commit order, and every body names its table. The last record belongs
to one table; the control stream has the positions of the others.

| header | value |
|---|---|
| `lsn` | position of the commit in the source's log; in the first copy, of its snapshot |
| `index` | number of the change within its commit, from 0, counted per stream |
| `copy` | in the first copy, instead of `index`: the number of rows so far, or `end` |
| `key` | in the last record of each append of the first copy: where to resume, as JSON |
| `snapshot` | in the last record of a copy that was resumed: position of its last snapshot |
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from streamfold.errors import ConflictError, FencingTokenMismatchError, InvalidError
from streamfold.extras import needing_extra
from streamfold.follow.clients.client import EncodedBatch, EncodedClient, StreamRecord
from streamfold.model.records import (
    BATCH_BYTES_MAX,
    BATCH_RECORDS_MAX,
    Header,
    Record,
    fence_record,
    metered_size,
    trim_record,
)

with needing_extra("client"):
    import s2_sdk

    from streamfold.follow.clients.s2 import S2Client, translate
    from streamfold.follow.clients.s2_internals import retire_silent_connections


LSN, INDEX, COPY, KEY, SNAPSHOT = b"lsn", b"index", b"copy", b"key", b"snapshot"
COPY_END: Final = b"end"
#: Records read at once, backwards from the tail. The last one is nearly always sufficient.
_LOOK_BACK: Final = 10


@dataclass(frozen=True, slots=True)
class Position:
    """The last change in a stream."""

    lsn: str
    #: -1 after the first copy, before any change.
    index: int


@dataclass(frozen=True, slots=True)
class CopyPosition:
    """An incomplete first copy."""

    #: Position of the snapshot in which it began. Later changes follow the copy.
    lsn: str
    rows: int
    #: Key of the last row as the source's text, or None before the first row.
    key: tuple[str, ...] | None


StreamState = Position | CopyPosition | None


def fencing_token() -> str:
    """Return a fencing token for one ingester session."""
    return f"ingest-{secrets.token_hex(8)}"


class TableStream:
    """Appends to one stream, as its only writer."""

    #: The table name in record bodies, or None in a stream of one table.
    table: str | None = None
    #: Whether the stream ever had records, even if they have been trimmed or have expired.
    has_history = False

    def __init__(self, client: EncodedClient, token: str) -> None:
        self._client = client
        self._token = token
        self._next = 0
        #: The last record that is not a command, and the first one that the last `trim` kept.
        self._last = self._first = 0
        self.state: StreamState = None
        #: The last record that is not a command, read by `take`.
        self.last: StreamRecord | None = None

    @property
    def name(self) -> str:
        return self._client.name

    @property
    def next_seq_num(self) -> int:
        return self._next

    async def take(self) -> None:
        """Fence all other ingesters, then find where the source stopped."""
        fenced = await self._client.append([fence_record(self._token)])
        self._next = fenced.end
        self.has_history = fenced.start > 0
        self.last = await self._last_record(fenced.start)
        self.state = None if self.last is None else _state_of(self.name, self.last)
        self._last = 0 if self.last is None else self.last.seq_num

    async def append(self, records: Sequence[Record]) -> None:
        """Append the records durably, in as many appends as needed.

        Raises ConflictError if another ingester has taken over. After any other error the outcome is
        unknown: `take` the stream again.
        """
        await self.append_encoded([EncodedBatch.of(part) for part in batches(records)])

    async def append_encoded(self, batches: Sequence[EncodedBatch]) -> None:
        """Append encoded batches. Raises like `append`."""
        try:
            self._next = await self._client.append_encoded(
                batches, match_seq_num=self._next, fencing_token=self._token
            )
        except FencingTokenMismatchError as error:
            raise ConflictError(
                f"another ingester has taken over stream {self.name!r}, so this one stops: run one "
                "ingester for each slot",
                code="ingest_fenced",
            ) from error
        self._last = self._next - 1

    def can_trim(self, keep_from: int) -> bool:
        """Return whether `trim` would remove more than the last one did."""
        return min(keep_from, self._last) > self._first

    async def trim(self, keep_from: int) -> None:
        """Trim the records before `keep_from`. Raises like `append`.

        The last record always stays, because it says where the source stopped.
        """
        last, first = self._last, min(keep_from, self._last)
        await self.append([trim_record(first)])
        self._last, self._first = last, first

    async def _last_record(self, end: int) -> StreamRecord | None:
        """Return the last record before `end` that is not a command."""
        while end > 0:
            start = max(0, end - _LOOK_BACK)
            records = await self._records(start, end)
            for record in reversed(records):
                if not _is_command(record):
                    return record
            if not records or records[0].seq_num > start:
                break  # earlier records were trimmed
            end = start
        return None

    async def _records(self, start: int, end: int) -> list[StreamRecord]:
        """Return all remaining records in [`start`, `end`).

        One peek returns at most 1 MiB, which large records exceed.
        """
        records: list[StreamRecord] = []
        while start < end:
            part = [r for r in await self._client.peek(start, end - start) if r.seq_num < end]
            if not part:
                break
            records += part
            start = part[-1].seq_num + 1
        return records


class SharedTableStream(TableStream):
    """One table in a stream of several tables. `shared` must already be taken."""

    has_history = True

    def __init__(self, shared: TableStream, table: str, state: StreamState) -> None:
        self._shared = shared
        self.table = table
        self.state = state

    @property
    def name(self) -> str:
        return self._shared.name

    @property
    def next_seq_num(self) -> int:
        return self._shared.next_seq_num

    def can_trim(self, keep_from: int) -> bool:
        return self._shared.can_trim(keep_from)

    async def trim(self, keep_from: int) -> None:
        await self._shared.trim(keep_from)

    async def append_encoded(self, batches: Sequence[EncodedBatch]) -> None:
        await self._shared.append_encoded(batches)


class _Named(msgspec.Struct, frozen=True):
    table: str | None = None


def table_of(record: StreamRecord) -> str | None:
    """Return the table named in a record of a shared stream."""
    return msgspec.json.decode(record.body, type=_Named).table


def _state_of(stream: str, record: StreamRecord) -> StreamState:
    headers = dict(record.headers)
    if LSN not in headers or not headers.keys() & {INDEX, COPY}:
        raise InvalidError(
            f"record {record.seq_num} of stream {stream!r} has no source position, so this ingester "
            "did not write it: name another prefix for the streams, or delete this one",
            code="stream_foreign",
        )
    lsn, copied = headers[LSN].decode(), headers.get(COPY)
    if copied is None:
        return Position(lsn, int(headers[INDEX]))
    if copied == COPY_END:
        return Position(lsn, -1)
    key = headers.get(KEY)
    resumed = None if key is None else tuple(msgspec.json.decode(key, type=list[str]))
    return CopyPosition(lsn, int(copied), resumed)


def is_copied(record: StreamRecord) -> bool:
    """Return whether the record belongs to a first copy."""
    return any(name == COPY for name, _ in record.headers)


def _is_command(record: StreamRecord) -> bool:
    return bool(record.headers) and not record.headers[0][0]


def batches(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    """Yield the records in runs that each fit into one append."""
    start, size = 0, 0
    for at, record in enumerate(records):
        weight = metered_size(record)
        if at > start and (at - start == BATCH_RECORDS_MAX or size + weight > BATCH_BYTES_MAX):
            yield records[start:at]
            start, size = at, 0
        size += weight
    if start < len(records):
        yield records[start:]


def change_headers(lsn: str, index: int) -> tuple[Header, ...]:
    return Header(LSN, lsn.encode()), Header(INDEX, b"%d" % index)


def copy_headers(lsn: str, rows: int, key: Sequence[str] | None = None) -> tuple[Header, ...]:
    headers = Header(LSN, lsn.encode()), Header(COPY, b"%d" % rows)
    return headers if key is None else (*headers, Header(KEY, msgspec.json.encode(key)))


def copy_end_headers(lsn: str, snapshot: str) -> tuple[Header, ...]:
    """Return the headers that end a copy. `snapshot` is the position of its last snapshot."""
    headers = Header(LSN, lsn.encode()), Header(COPY, COPY_END)
    return headers if snapshot == lsn else (*headers, Header(SNAPSHOT, snapshot.encode()))


_EXISTS = "resource_already_exists"


class StreamOpener(Protocol):
    """Opens the streams to which an ingester writes."""

    async def ensure(self, name: str) -> EncodedClient:
        """Open the stream, creating it if necessary."""
        ...


class BasinStreams:
    """Streams in a basin at any S2 endpoint."""

    def __init__(self, basin: s2_sdk.S2Basin) -> None:
        self._basin = basin

    async def ensure(self, name: str) -> EncodedClient:
        # Records must not expire, as they would after 7 days in most basins: the last one says where
        # the source stopped, and readers start from the first copy.
        config = s2_sdk.StreamConfig(retention_policy="infinite")
        try:
            await self._basin.create_stream(name, config=config)
        except s2_sdk.S2Error as error:
            if getattr(error, "code", "") != _EXISTS:
                retire_silent_connections(self._basin, error)
                raise translate(error) from error
        return S2Client(self._basin.stream(name))


def raise_if_cancelled() -> None:
    """Raise CancelledError if the current task was cancelled. Called between two appends.

    The S2 SDK uses `asyncio.wait_for` for each request. In Python 3.11, `wait_for` drops a
    cancellation that arrives together with the response. The task still counts it.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
