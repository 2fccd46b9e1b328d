"""Appends a batch of rows to a stream exactly once, however often it is tried.

The last record of each append carries a header, the *marker*: which transaction, which batch of it,
which append of how many, and a digest of all so far. An append is atomic and carries `match_seq_num`,
so the last marker in the stream says what was appended, and no append can come between the check and
the append. This also stops a writer that was presumed dead.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from streamfold.errors import OutcomeUnknownError, SeqNumMismatchError
from streamfold.model.records import Header, Record
from streamfold.records.columns import Columns, encode_append, warm_up_columns
from streamfold.records.plain import parse_record
from streamfold.records.protobuf import fields, varint
from streamfold.spark.errors import ReplayChangedError
from streamfold.spark.stream.client import Connection, RetryDeadline, Streams
from streamfold.spark.stream.range_reads import Range, Wanted, read_range
from streamfold.spark.stream.rows import arrow_schema, record_batch

MARKER: Final = b"streamfold-txn"
#: Metered bytes that the longest marker adds to a record, with its header; ids are bounded by it.
MARKER_RESERVE: Final = 512
#: Records searched first, and the factor by which each further search reaches back.
_LOOK_FIRST, _LOOK_GROWTH = 1, 32
#: Records from which on a search is worth loading the compiled kernels.
_KERNEL_RECORDS: Final = 50_000
_MATCH_SEQ_NUM = b"\x10"
#: A number as markers have it; longer ones fit no stream.
_NUMBER = re.compile(r"[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Marker:
    """Append `index` of `count` that make up `batch`; `digest` covers it and all before it."""

    transaction: str
    batch: int
    index: int
    count: int
    digest: str

    def encode(self) -> bytes:
        return "\n".join(
            (self.transaction, str(self.batch), str(self.index), str(self.count), self.digest)
        ).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Marker | None:
        """Parse a marker; None for anything else."""
        parts = raw.decode(errors="replace").split("\n")
        if len(parts) != 5 or not all(_NUMBER.fullmatch(part) for part in parts[1:4]):
            return None
        return cls(parts[0], int(parts[1]), int(parts[2]), int(parts[3]), parts[4])


class Transaction:
    """Appends one batch to one stream. On the driver only, in one process at a time."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        name: str,
        batch: int,
        parts: Sequence[list[bytes]],
    ) -> None:
        self._connection = connection
        self._streams = Streams(connection)
        self._stream = stream
        self._name = name
        self._batch = batch
        self._parts = parts
        self._markers = _markers(name, batch, parts)

    def append(self) -> int:
        """Append what the stream lacks; returns how many appends that took."""
        deadline = RetryDeadline(self._connection.endpoint.retry_timeout)
        looked, done, appended = 0, 0, 0
        tail, found = self._find(looked)
        done = self._done(found)
        while done < len(self._parts):
            try:
                looked = tail
                tail = self._streams.append(self._stream, self._input(done, tail), tail)
                done, appended = done + 1, appended + 1
                deadline.reset()
            except SeqNumMismatchError:
                tail, found = self._find(looked)
                done = max(done, self._done(found))
            except OutcomeUnknownError as error:
                deadline.wait(self._connection.endpoint, error)
                tail, found = self._find(looked)
                done = max(done, self._done(found))
        return appended

    def _input(self, index: int, tail: int) -> bytes:
        before, last = self._parts[index]
        return before + _marked(last, self._markers[index]) + _MATCH_SEQ_NUM + varint(tail)

    def _find(self, since: int) -> tuple[int, Marker | None]:
        """Return the tail, and the last marker of this transaction at or after `since`."""
        tail = int(self._streams.tail(self._stream).seq_num)
        end, size = tail, _LOOK_FIRST
        while end > since:
            start = max(since, end - size)
            marker = self._last_marker(Range(self._stream, start, end))
            if marker is not None:
                return tail, marker
            end, size = start, size * _LOOK_GROWTH
        return tail, None

    def _last_marker(self, part: Range) -> Marker | None:
        if len(part) >= _KERNEL_RECORDS:
            warm_up_columns()
        last = None
        wanted = Wanted(bodies=False, fail_on_data_loss=False)
        for found in read_range(self._connection.endpoint, part, wanted):
            last = self._marker_in(found) or last
        return last

    def _marker_in(self, found: Columns) -> Marker | None:
        if found.headers is None or MARKER not in found.headers.names.content.tobytes():
            return None
        batch = record_batch(self._stream, found, arrow_schema(["headers"]))
        pairs = batch.column("headers").flatten()
        values = pc.struct_field(pairs, "value").filter(
            pc.equal(pc.struct_field(pairs, "name"), pa.scalar(MARKER))
        )
        markers = map(Marker.decode, reversed(values.to_pylist()))
        return next((m for m in markers if m is not None and m.transaction == self._name), None)

    def _done(self, found: Marker | None) -> int:
        """Return how many appends of this batch the stream already has."""
        if found is None or found.batch < self._batch:
            return 0
        if found.batch > self._batch:
            return len(self._parts)
        if found.index >= len(self._markers) or found != self._markers[found.index]:
            raise ReplayChangedError(self._stream, self._name, self._batch)
        return found.index + 1


def _markers(name: str, batch: int, parts: Sequence[list[bytes]]) -> list[Marker]:
    running = hashlib.blake2b(digest_size=12)
    markers = []
    for index, part in enumerate(parts):
        for piece in part:
            running.update(piece)
        markers.append(Marker(name, batch, index, len(parts), running.hexdigest()))
    return markers


def _marked(raw: bytes, marker: Marker) -> bytes:
    """Return the one record of an AppendInput with the marker as its last header."""
    ((_, start, end),) = fields(raw, 0, len(raw))
    record = parse_record(raw, start, end)
    headers = (*record.headers, Header(MARKER, marker.encode()))
    return encode_append(Record(record.body, headers, record.timestamp))
