"""Reads a range of a stream in a task: every record once and in order, or an error that says why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from streamfold.records.columns import BytesColumn, Columns, HeaderColumn, read_columns
from streamfold.spark.errors import DataLossError
from streamfold.spark.stream.client import Streams
from streamfold.spark.stream.connection import Connection, Endpoint, RetryDeadline, TransientError
from streamfold.spark.stream.transfer import SessionRefusedError, transfer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Range:
    """Records `start` to `end` of a stream, half-open."""

    stream: str
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which columns to read, and whether missing records are an error."""

    headers: bool = True
    bodies: bool = True
    fail_on_data_loss: bool = True
    sessions: bool = True


def read_range(endpoint: Endpoint, wanted_range: Range, wanted: Wanted) -> Iterator[Columns]:
    """Yield every record of the range, once and in order, even if connections break."""
    stream, at, end = wanted_range.stream, wanted_range.start, wanted_range.end
    deadline, sessions = RetryDeadline(endpoint.retry_timeout), wanted.sessions
    while at < end:
        began = at
        try:
            with Connection(endpoint) as connection:
                for payload in transfer(connection, stream, at, end, sessions):
                    found = read_columns(payload, headers=wanted.headers, bodies=wanted.bodies)
                    found, at = _within(found, stream, at, end, wanted)
                    if len(found.seq_nums):
                        deadline.reset()
                        yield found
                if at < end:
                    at = _ended_early(Streams(connection), stream, at, end, wanted)
        except SessionRefusedError:
            sessions = False
        except TransientError as error:
            # A proxy may not let sessions through: try pages, too.
            sessions = wanted.sessions and (at > began or not sessions)
            deadline.wait(endpoint, error)


def _within(found: Columns, stream: str, at: int, end: int, wanted: Wanted) -> tuple[Columns, int]:
    """Return the rows of `found` that belong to the range, and the position after them."""
    seq_nums = found.seq_nums
    if not len(seq_nums):
        return found, at
    expected = np.concatenate(([at], seq_nums[:-1] + 1))
    for hole in np.flatnonzero(seq_nums != expected).tolist():
        if int(expected[hole]) < end:
            first = int(seq_nums[hole])
            _lost(stream, int(expected[hole]), min(first, end), first, wanted)
    rows = int(np.searchsorted(seq_nums, end))
    return cut(found, rows), min(int(seq_nums[-1]) + 1, end)


def _ended_early(streams: Streams, stream: str, at: int, end: int, wanted: Wanted) -> int:
    """Return where to continue after a read that ended before the range did."""
    first = streams.first(stream, at)
    if at <= first < min(end, streams.tail(stream).seq_num):
        raise TransientError(f"the read ended at {at}, before the last record")
    _lost(stream, at, end, first, wanted)
    return end


def _lost(stream: str, start: int, end: int, first: int, wanted: Wanted) -> None:
    if wanted.fail_on_data_loss:
        raise DataLossError(stream, start, end, first)
    _log.warning(
        "records %d to %d of stream %r are gone, continuing without them", start, end - 1, stream
    )


def cut(found: Columns, rows: int) -> Columns:
    """Return the first `rows` rows, without a copy."""
    if rows == len(found.seq_nums):
        return found
    headers, bodies = found.headers, found.bodies
    return Columns(
        found.seq_nums[:rows],
        found.timestamps[:rows],
        headers and HeaderColumn(headers.offsets[: rows + 1], headers.names, headers.values),
        bodies and BytesColumn(bodies.offsets[: rows + 1], bodies.content),
    )
