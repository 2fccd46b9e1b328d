"""Reads a range of a stream in a task: every record once and in order, or a specific error.

A read session avoids a round trip per batch and is about twice as fast as pages. Pages work on
every endpoint, and serve those without sessions over HTTP/1.1.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import urlencode

import httpx
import numpy as np

from streamfold.errors import StreamfoldError
from streamfold.http_client import cause_of
from streamfold.records.columns import BytesColumn, Columns, HeaderColumn, read_columns
from streamfold.spark.errors import DataLossError
from streamfold.spark.stream.client import (
    IO_TIMEOUT,
    PROTOBUF,
    Endpoint,
    RetryDeadline,
    ServerConnection,
    StreamCalls,
    TransientError,
    error_from_response,
    is_transient,
    read_body,
    stream_path,
)
from streamfold.wire.s2.errors import BadFrameError
from streamfold.wire.s2.frames import BODY_MAX, FRAME_MAX, FrameDecoder

_log = logging.getLogger(__name__)

#: Bytes of records per Arrow batch, exceeded by at most one frame. Large enough to make the fixed
#: cost of a batch, mostly Spark's, negligible.
PIECE = 3 << 20
_SESSION = "s2s/proto"
_UNWRITTEN = 416
#: Statuses that reject the request in any form: the endpoint would reject pages too.
_FINAL = frozenset({401, 403, 404, 409})
#: Bytes before a frame's body, and the flag bits of a compressed or final frame.
_HEAD, _UNUSUAL = 4, 0xE0


class SessionRefusedError(StreamfoldError):
    """The endpoint does not support read sessions. Read pages instead."""

    code = "session_refused"


def transfer(
    connection: ServerConnection, stream: str, at: int, end: int, sessions: bool
) -> Iterator[memoryview | bytes]:
    """Yield joined ReadBatches from `at` on. Each piece is valid until the next is requested."""
    if sessions:
        return _session(connection, stream, at, end)
    return _pages(connection, stream, at, end)


def _pages(connection: ServerConnection, stream: str, at: int, end: int) -> Iterator[bytes]:
    streams = StreamCalls(connection)
    while at < end and (page := streams.page_bytes(stream, at, end - at)):
        seq_nums = read_columns(page, headers=False, bodies=False).seq_nums
        if not len(seq_nums):
            return
        at = int(seq_nums[-1]) + 1
        yield page


def _session(connection: ServerConnection, stream: str, at: int, end: int) -> Iterator[memoryview]:
    query = urlencode({"seq_num": at, "count": end - at})
    headers = {"content-type": _SESSION, "accept": PROTOBUF}
    response = connection.open("GET", f"{stream_path(stream, 'records')}?{query}", headers)
    with closing(response):
        if response.status_code != 200 or _SESSION not in response.headers.get("content-type", ""):
            _check_opening(response.status_code, read_body(response), stream)
        else:
            yield from _Frames(response, stream).pieces()


def _check_opening(status: int, body: bytes, stream: str) -> None:
    """Raise the error of a session that did not open. Returns if there is nothing to read."""
    if status in _FINAL or is_transient(status, body):
        _check_ending(status, body, stream)
    elif status != _UNWRITTEN:
        raise SessionRefusedError(f"status {status}")


def _check_ending(status: int, body: bytes, stream: str) -> None:
    if status == _UNWRITTEN:
        return
    if is_transient(status, body):
        raise TransientError(f"the session ended with status {status}")
    raise error_from_response(f"a read of {stream!r}", status, body)


class _Frames:
    """Receives frame bodies contiguously into one reused buffer."""

    def __init__(self, response: httpx.Response, stream: str) -> None:
        self._arriving = response.iter_raw()
        #: Bytes that arrived but were not copied yet.
        self._rest = memoryview(b"")
        self._stream = stream
        # Not zeroed: zeroing would take longer than reading a small range.
        self._room = np.empty(PIECE + BODY_MAX, np.uint8).data
        self._head = memoryview(bytearray(_HEAD))
        self._filled = 0

    def pieces(self) -> Iterator[memoryview]:
        """Yield pieces of at least `PIECE` bytes, except the last.

        Yields all complete frames before raising a failure, so that nothing is fetched twice.
        """
        try:
            while self._receive_frame():
                if self._filled >= PIECE:
                    yield self._take_room()
        except TransientError:
            if self._filled:
                yield self._take_room()
            raise
        if self._filled:
            yield self._take_room()

    def _take_room(self) -> memoryview:
        piece, self._filled = self._room[: self._filled], 0
        return piece

    def _receive_frame(self) -> bool:
        """Receive one frame. Returns False at the end of the session."""
        got = self._receive(self._head)
        if got == 0:
            return False
        length, flag = int.from_bytes(self._head[:3], "big"), self._head[3]
        if got < _HEAD or flag & _UNUSUAL or not 1 <= length <= FRAME_MAX:
            return self._receive_unusual(length)
        self._receive_whole(self._room[self._filled : self._filled + length - 1])
        self._filled += length - 1
        return True

    def _receive_unusual(self, length: int) -> bool:
        """Receive a compressed frame, or the final frame, which says why the session ends."""
        body = memoryview(bytearray(max(0, min(length, FRAME_MAX) - 1)))
        self._receive_whole(body)
        decoder = FrameDecoder()
        decoder.feed(bytes(self._head) + bytes(body))
        try:
            frame = decoder.next_frame()
        except BadFrameError as error:
            raise TransientError(error.message) from error
        if frame is None or frame.terminal:
            if frame is not None:
                _check_ending(*frame.failure(), self._stream)
            return False
        self._room[self._filled : self._filled + len(frame.body)] = frame.body
        self._filled += len(frame.body)
        return True

    def _receive_whole(self, room: memoryview) -> None:
        if self._receive(room) < len(room):
            raise TransientError("the session ended within a frame")

    def _receive(self, room: memoryview) -> int:
        """Fill `room` and return the number of bytes received. Fewer only at the end of the session."""
        filled = 0
        while filled < len(room) and (self._rest or self._await_bytes()):
            piece = self._rest[: len(room) - filled]
            room[filled : filled + len(piece)] = piece
            self._rest = self._rest[len(piece) :]
            filled += len(piece)
        return filled

    def _await_bytes(self) -> bool:
        """Wait for more bytes. Returns False at the end of the session."""
        try:
            self._rest = memoryview(next(self._arriving, b""))
        except httpx.TransportError as error:
            raise TransientError(f"the session failed: {type(cause_of(error)).__name__}") from error
        return len(self._rest) > 0


@dataclass(frozen=True, slots=True)
class Range:
    """The half-open range of records `[start, end)` in a stream."""

    stream: str
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Wanted:
    """The columns to read, whether missing records are an error, and whether to try sessions."""

    headers: bool = True
    bodies: bool = True
    fail_on_data_loss: bool = True
    sessions: bool = True


def read_range(
    endpoint: Endpoint, part: Range, options: Wanted, io_timeout: float = IO_TIMEOUT
) -> Iterator[Columns]:
    """Yield every record of the range, once and in order, even if connections break.

    `io_timeout`: seconds to connect and to wait for the next bytes.
    """
    stream, at, end = part.stream, part.start, part.end
    deadline, sessions = RetryDeadline(endpoint.retry_timeout), options.sessions
    while at < end:
        began = at
        try:
            with ServerConnection(endpoint, io_timeout) as connection:
                for payload in transfer(connection, stream, at, end, sessions):
                    columns = read_columns(payload, headers=options.headers, bodies=options.bodies)
                    columns, at = within(columns, stream, at, end, options)
                    if len(columns.seq_nums):
                        deadline.reset()
                        yield columns
                if at < end:
                    at = _ended_early(StreamCalls(connection), stream, at, end, options)
        except SessionRefusedError:
            sessions = False
        except TransientError as error:
            # A proxy may block sessions: try pages too.
            sessions = options.sessions and (at > began or not sessions)
            deadline.wait(endpoint, error)


def within(
    columns: Columns, stream: str, at: int, end: int, options: Wanted
) -> tuple[Columns, int]:
    """Return the rows inside the range and the position after them, reporting missing records."""
    seq_nums = columns.seq_nums
    if not len(seq_nums):
        return columns, at
    expected = np.concatenate(([at], seq_nums[:-1] + 1))
    for hole in np.flatnonzero(seq_nums != expected).tolist():
        if int(expected[hole]) < end:
            first = int(seq_nums[hole])
            report_loss(stream, int(expected[hole]), min(first, end), first, options)
    rows = int(np.searchsorted(seq_nums, end))
    return cut(columns, rows), min(int(seq_nums[-1]) + 1, end)


def _ended_early(streams: StreamCalls, stream: str, at: int, end: int, options: Wanted) -> int:
    """Return where to continue after a read that ended before the range."""
    first = streams.first(stream, at)
    if at <= first < min(end, streams.tail(stream).seq_num):
        raise TransientError(f"the read ended at {at}, before the last record")
    report_loss(stream, at, end, first, options)
    return end


def report_loss(stream: str, start: int, end: int, first: int, options: Wanted) -> None:
    if options.fail_on_data_loss:
        raise DataLossError(stream, start, end, first)
    _log.warning(
        "records %d to %d of stream %r are gone, continuing without them", start, end - 1, stream
    )


def cut(columns: Columns, rows: int) -> Columns:
    """Return the first `rows` rows, without a copy."""
    if rows == len(columns.seq_nums):
        return columns
    headers, bodies = columns.headers, columns.bodies
    return Columns(
        columns.seq_nums[:rows],
        columns.timestamps[:rows],
        headers and HeaderColumn(headers.offsets[: rows + 1], headers.names, headers.values),
        bodies and BytesColumn(bodies.offsets[: rows + 1], bodies.content),
    )
