"""Appends a batch of rows to a stream exactly once, however often it is retried.

The last record of each append carries a header, the *marker*. It names the transaction, its batch,
and the append's index and count, with a digest of the batch so far. Appends are atomic and carry
`match_seq_num`. So the last marker in the stream shows how much was appended, and nothing can be
appended between the check and the append. This also stops a writer that was presumed dead.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from streamfold._native import append_records
from streamfold.errors import ConflictError, OutcomeUnknownError, SeqNumMismatchError
from streamfold.model.records import Header, Record
from streamfold.records.columns import Columns
from streamfold.records.protobuf import encode_append, varint
from streamfold.spark.stream.client import RetryDeadline, ServerConnection, StreamCalls
from streamfold.spark.stream.range_reads import Range, Wanted, read_range
from streamfold.spark.stream.rows import arrow_schema, record_batch

MARKER: Final = b"streamfold-txn"
#: Metered bytes that the longest marker adds to a record, header included. This limits ids.
MARKER_RESERVE: Final = 512
#: Records in the first search for a marker, and the growth factor of each further search.
_LOOK_FIRST, _LOOK_GROWTH = 1, 32
_MATCH_SEQ_NUM = b"\x10"
#: A number in a marker. No stream reaches longer numbers.
_NUMBER = re.compile(r"[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Marker:
    """Marks append `index` of the `count` in `batch`. `digest` covers it and all earlier ones."""

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
        """Parse a marker, or return None for anything else."""
        parts = raw.decode(errors="replace").split("\n")
        if len(parts) != 5 or not all(_NUMBER.fullmatch(part) for part in parts[1:4]):
            return None
        return cls(parts[0], int(parts[1]), int(parts[2]), int(parts[3]), parts[4])


class Transaction:
    """Appends one batch to one stream. Runs only on the driver, in one process at a time."""

    def __init__(
        self,
        connection: ServerConnection,
        stream: str,
        name: str,
        batch: int,
        parts: Sequence[list[bytes]],
    ) -> None:
        self._connection = connection
        self._streams = StreamCalls(connection)
        self._stream = stream
        self._name = name
        self._batch = batch
        self._parts = parts
        self._markers = _markers(name, batch, parts)

    def append(self) -> int:
        """Append the missing parts and return how many were appended."""
        deadline = RetryDeadline(self._connection.endpoint.retry_timeout)
        looked, done, appended = 0, 0, 0
        tail, marker = self._find(looked)
        done = self._done(marker)
        while done < len(self._parts):
            try:
                looked = tail
                tail = self._streams.append(self._stream, self._input(done, tail), tail)
                done, appended = done + 1, appended + 1
                deadline.reset()
            except SeqNumMismatchError:
                tail, marker = self._find(looked)
                done = max(done, self._done(marker))
            except OutcomeUnknownError as error:
                deadline.wait(self._connection.endpoint, error)
                tail, marker = self._find(looked)
                done = max(done, self._done(marker))
        return appended

    def _input(self, index: int, tail: int) -> bytes:
        before, last = self._parts[index]
        return before + _marked(last, self._markers[index]) + _MATCH_SEQ_NUM + varint(tail)

    def _find(self, since: int) -> tuple[int, Marker | None]:
        """Return the tail and this transaction's last marker at or after `since`, if any."""
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
        last = None
        options = Wanted(bodies=False, fail_on_data_loss=False)
        for columns in read_range(self._connection.endpoint, part, options):
            last = self._marker_in(columns) or last
        return last

    def _marker_in(self, columns: Columns) -> Marker | None:
        if columns.headers is None or MARKER not in columns.headers.names.content.tobytes():
            return None
        batch = record_batch(self._stream, columns, arrow_schema(["headers"]))
        pairs = batch.column("headers").flatten()
        values = pc.struct_field(pairs, "value").filter(
            pc.equal(pc.struct_field(pairs, "name"), pa.scalar(MARKER))
        )
        markers = map(Marker.decode, reversed(values.to_pylist()))
        return next((m for m in markers if m is not None and m.transaction == self._name), None)

    def _done(self, marker: Marker | None) -> int:
        """Return how many of this batch's appends are already in the stream."""
        if marker is None or marker.batch < self._batch:
            return 0
        if marker.batch > self._batch:
            return len(self._parts)
        if marker.index >= len(self._markers) or marker != self._markers[marker.index]:
            raise ConflictError(
                f"batch {self._batch} of {self._name!r} was partly appended to stream "
                f"{self._stream!r}, and now has other rows, or the same in another order: give the "
                "option orderBy, or make the query deterministic; nothing more was appended",
                code="replay_changed",
            )
        return marker.index + 1


def _markers(name: str, batch: int, parts: Sequence[list[bytes]]) -> list[Marker]:
    running = hashlib.blake2b(digest_size=12)
    markers = []
    for index, part in enumerate(parts):
        for piece in part:
            running.update(piece)
        markers.append(Marker(name, batch, index, len(parts), running.hexdigest()))
    return markers


def _marked(raw: bytes, marker: Marker) -> bytes:
    """Return an AppendInput's only record with the marker added as its last header."""
    ((timestamp, headers, body),) = append_records(raw)
    marked = (*starmap(Header, headers), Header(MARKER, marker.encode()))
    return encode_append(Record(body, marked, timestamp))
