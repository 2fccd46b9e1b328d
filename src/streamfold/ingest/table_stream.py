"""The stream of a table, or of several: where the source was left, and appends that happen once.

The stream alone says how far its source has come: records carry the source's position in headers.
An ingester first takes the stream with a fencing token of its own, which stops every other one, and
then reads the last record: from there on nothing but its own appends changes the stream. Every append
names the seq_num of its first record, so a repeated one is refused. After any failure the ingester
starts again from here.

A stream of several tables has one order, that of commits, and every body names its table. Its last
record belongs to one of the tables; what is known of the others is in the control stream.

| header | value |
|---|---|
| `lsn` | position of the commit in the source's log; in the first copy, of its snapshot |
| `index` | number of the change within its commit, from 0: among those of this table, or of all |
| `copy` | in the first copy, instead of `index`: rows so far, or `end` after the last |
| `key` | in the last record of an append of the first copy: where to resume, as JSON |
| `snapshot` | in the last record of a copy that was resumed: position of its last snapshot |
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from streamfold.errors import FencingTokenMismatchError
from streamfold.follow.clients.client import (
    EncodedAppends,
    EncodedBatch,
    StreamClient,
    StreamRecord,
)
from streamfold.ingest.errors import ForeignStreamError, IngestFencedError
from streamfold.model.records import (
    BATCH_BYTES_MAX,
    BATCH_RECORDS_MAX,
    Header,
    Record,
    fence_record,
    metered_size,
    trim_record,
)

LSN, INDEX, COPY, KEY, SNAPSHOT = b"lsn", b"index", b"copy", b"key", b"snapshot"
COPY_END: Final = b"end"
#: Records to look at, from the tail backwards, at once: nearly always the last one decides.
_LOOK_BACK: Final = 10


@dataclass(frozen=True, slots=True)
class Position:
    """The last change in a stream."""

    lsn: str
    #: -1 after the first copy, before any change.
    index: int


@dataclass(frozen=True, slots=True)
class CopyPosition:
    """A first copy that is not complete."""

    #: Of the snapshot in which it began: changes from there on follow the copy.
    lsn: str
    rows: int
    #: Key of the last row, in the source's own text; None before the first.
    key: tuple[str, ...] | None


StreamState = Position | CopyPosition | None


def fencing_token() -> str:
    """Return a token for one run of an ingester."""
    return f"ingest-{secrets.token_hex(8)}"


class TableStream:
    """Appends to one stream, as its only writer."""

    #: The name that bodies give the table; None in a stream with one table.
    table: str | None = None
    #: Whether the stream ever had records, which may have been trimmed or expired since.
    has_history = False

    def __init__(self, client: StreamClient, token: str) -> None:
        self._client = client
        self._token = token
        self._next = 0
        #: The last record, commands aside; and the first that the last `trim` kept.
        self._last = self._first = 0
        self.state: StreamState = None
        #: The last record, commands aside, as it was found by `take`.
        self.last: StreamRecord | None = None

    @property
    def name(self) -> str:
        return self._client.name

    @property
    def next_seq_num(self) -> int:
        return self._next

    async def take(self) -> None:
        """Fence all others, then find where the source was left."""
        fenced = await self._client.append([fence_record(self._token)])
        self._next = fenced.end
        self.has_history = fenced.start > 0
        self.last = await self._last_record(fenced.start)
        self.state = None if self.last is None else _state_of(self.name, self.last)
        self._last = 0 if self.last is None else self.last.seq_num

    async def append(self, records: Sequence[Record]) -> None:
        """Append the records durably, in as many appends as they need.

        Raises IngestFencedError if another ingester has taken over. After other errors the outcome is
        unknown: `take` the stream again.
        """
        await self.append_each(list(batches(records)))

    async def append_each(self, parts: Sequence[Sequence[Record]]) -> None:
        """Append parts that one append each can take, as `append` does."""
        try:
            if len(parts) > 1 and self.takes_encoded:
                await self.append_encoded([EncodedBatch.of(part) for part in parts])
                return
            for part in parts:
                done = await self._client.append(
                    part, match_seq_num=self._next, fencing_token=self._token
                )
                self._next = done.end
                self._last = self._next - 1
        except FencingTokenMismatchError as error:
            raise IngestFencedError(self.name) from error

    def can_trim(self, keep_from: int) -> bool:
        """Return whether `trim` would remove more than the last one did."""
        return min(keep_from, self._last) > self._first

    async def trim(self, keep_from: int) -> None:
        """Trim the records before `keep_from`, as `append` does.

        The last record stays, whatever `keep_from` is: it says where the source was left.
        """
        first = min(keep_from, self._last)
        try:
            done = await self._client.append(
                [trim_record(first)], match_seq_num=self._next, fencing_token=self._token
            )
        except FencingTokenMismatchError as error:
            raise IngestFencedError(self.name) from error
        self._next, self._first = done.end, first

    @property
    def takes_encoded(self) -> bool:
        """Whether `append_encoded` can be used."""
        return isinstance(self._client, EncodedAppends)

    async def append_encoded(self, batches: Sequence[EncodedBatch]) -> None:
        """Append batches that are encoded already, as `append` does."""
        assert isinstance(self._client, EncodedAppends)  # noqa: S101 - callers look
        try:
            self._next = await self._client.append_encoded(
                batches, match_seq_num=self._next, fencing_token=self._token
            )
            self._last = self._next - 1
        except FencingTokenMismatchError as error:
            raise IngestFencedError(self.name) from error

    async def _last_record(self, end: int) -> StreamRecord | None:
        """Return the last record before `end`, commands aside."""
        while end > 0:
            start = max(0, end - _LOOK_BACK)
            found = await self._records(start, end)
            for record in reversed(found):
                if not _is_command(record):
                    return record
            if not found or found[0].seq_num > start:
                break  # what is before it was trimmed
            end = start
        return None

    async def _records(self, start: int, end: int) -> list[StreamRecord]:
        """Return all records from `start` up to `end` that are not trimmed.

        A peek returns 1 MiB at most, which large records exceed.
        """
        found: list[StreamRecord] = []
        while start < end:
            part = [r for r in await self._client.peek(start, end - start) if r.seq_num < end]
            if not part:
                break
            found += part
            start = part[-1].seq_num + 1
        return found


class SharedTableStream(TableStream):
    """One table of a stream that has several; `shared` is taken."""

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

    async def append_each(self, parts: Sequence[Sequence[Record]]) -> None:
        await self._shared.append_each(parts)

    def can_trim(self, keep_from: int) -> bool:
        return self._shared.can_trim(keep_from)

    async def trim(self, keep_from: int) -> None:
        await self._shared.trim(keep_from)

    @property
    def takes_encoded(self) -> bool:
        return self._shared.takes_encoded

    async def append_encoded(self, batches: Sequence[EncodedBatch]) -> None:
        await self._shared.append_encoded(batches)


class _Named(msgspec.Struct, frozen=True):
    table: str | None = None


def table_of(record: StreamRecord) -> str | None:
    """Return the table that a record of a stream with several tables names."""
    return msgspec.json.decode(record.body, type=_Named).table


def _state_of(stream: str, record: StreamRecord) -> StreamState:
    headers = dict(record.headers)
    if LSN not in headers or not headers.keys() & {INDEX, COPY}:
        raise ForeignStreamError(stream, record.seq_num)
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
    """Yield the records in runs that one append can take."""
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
    """`snapshot` is the position of the last snapshot that rows were copied in."""
    headers = Header(LSN, lsn.encode()), Header(COPY, COPY_END)
    return headers if snapshot == lsn else (*headers, Header(SNAPSHOT, snapshot.encode()))
