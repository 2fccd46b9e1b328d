"""Records as columns and back, for engines that work on columns: no object is made per record.

`read_columns` takes what reads return, `encode_columns` makes what appends take. Both have a plain
implementation that handles every input and raises every error, and a compiled one for large batches,
whose results are the same to the byte.
"""

from __future__ import annotations

import logging
import threading
from itertools import accumulate, pairwise
from types import ModuleType
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from streamfold.errors import MalformedError
from streamfold.model.records import Header, Record, SequencedRecord, metered_size
from streamfold.records.plain import RECORDS, parse_sequenced
from streamfold.records.protobuf import delimited, fields, varint

Bytes: TypeAlias = npt.NDArray[np.uint8]
CellOffsets: TypeAlias = npt.NDArray[np.int32]

#: Bytes that encoding adds to a record at most (tags, lengths, timestamp), and to a header.
_RECORD_GROWTH, _HEADER_GROWTH = 1 + 5 + 11 + 1 + 5, 1 + 5 + 1 + 5 + 1 + 5
#: Bytes that a record or a header takes at least: a tag and a length.
_PART_MIN = 2
#: Bytes of payload for which a thread's room is made at first, and for which one is kept at most.
_KEPT_MIN, _KEPT_MAX = 1 << 16, 1 << 23
#: Largest sequence number that a signed column holds.
_SIGNED_MAX = 2**63 - 1

_log = logging.getLogger(__name__)


class BytesColumn(NamedTuple):
    """Row i is `content[offsets[i]:offsets[i + 1]]`: the buffers of an Arrow binary array."""

    offsets: CellOffsets
    content: Bytes


class HeaderColumn(NamedTuple):
    """The headers of row i are entries `offsets[i]` to `offsets[i + 1]` of names and values."""

    offsets: CellOffsets
    names: BytesColumn
    values: BytesColumn


class Columns(NamedTuple):
    """Records that were read; a column that was not asked for is None."""

    seq_nums: npt.NDArray[np.int64]
    timestamps: npt.NDArray[np.uint64]
    headers: HeaderColumn | None
    bodies: BytesColumn | None


class AppendColumns(NamedTuple):
    """Records to append; a row whose `stamped` is false has no timestamp of its own."""

    timestamps: npt.NDArray[np.uint64]
    stamped: npt.NDArray[np.bool_]
    headers: HeaderColumn
    bodies: BytesColumn


class EncodedRecords(NamedTuple):
    """Rows as records of an AppendInput: any run of them, in order, is a valid one."""

    raw: bytes
    #: Byte at which each record starts, and after the last one the length of `raw`.
    offsets: npt.NDArray[np.int64]
    #: Bytes of each, as limits and accounting count them.
    metered: npt.NDArray[np.int64]


class _Room:
    """Where a kernel may write the columns of a payload of so many bytes, whatever is in it.

    All but bodies: these are as large as the payload, so they get memory of their own at once.
    """

    def __init__(self, size: int) -> None:
        rows = size // _PART_MIN
        self.size = size
        self.seq_nums, self.timestamps = np.empty(rows, np.int64), np.empty(rows, np.uint64)
        self.headers, self.bodies = np.empty(rows + 1, np.int32), np.empty(rows + 1, np.int32)
        self.names, self.values = _column_room(rows, size), _column_room(rows, size)


class _Scratch(threading.local):
    """Keeps one room per thread: the pages of a new one would cost more than all work in it.

    A room takes up only the memory that was ever used of it.
    """

    _kept: _Room | None = None

    def room(self, size: int) -> _Room:
        if size > _KEPT_MAX:
            return _Room(size)
        if self._kept is None or self._kept.size < size:
            self._kept = _Room(max(size, _KEPT_MIN))
        return self._kept


_scratch = _Scratch()
_kernel: ModuleType | None = None


def warm_up_columns() -> bool:
    """Load or compile the kernels, and use them from now on; False if they do not work here.

    Takes a second, which pays off for hundreds of thousands of records.
    """
    global _kernel
    if _kernel is not None:
        return True
    try:
        from streamfold.records import column_kernel

        _exercise(column_kernel)
    except Exception as error:  # whatever a broken compiler raises, plain Python still works
        _log.warning("column kernels are off, plain Python does the work: %s", error)
        return False
    _kernel = column_kernel
    return True


def read_columns(
    payload: bytes | memoryview, *, headers: bool = True, bodies: bool = True
) -> Columns:
    """The records of ReadBatches, one after the other, with the requested columns."""
    if _kernel is not None and (found := _read_compiled(_kernel, payload, headers, bodies)):
        return found
    return read_plain(bytes(payload), headers=headers, bodies=bodies)


def decode_compiled(payload: bytes | memoryview) -> list[SequencedRecord] | None:
    """The records as objects, ten times as fast as plain Python; None if the kernel cannot do it."""
    found = _read_compiled(_kernel, payload, True, True) if _kernel is not None else None
    if found is None or found.headers is None or found.bodies is None:
        return None
    bodies = cells(found.bodies)
    if found.headers.offsets[-1]:
        names, values = cells(found.headers.names), cells(found.headers.values)
        every = list(map(Header, names, values))
        offsets = found.headers.offsets.tolist()
        headers = [tuple(every[start:end]) for start, end in pairwise(offsets)]
    else:
        headers = [()] * len(bodies)
    rows = zip(found.seq_nums.tolist(), found.timestamps.tolist(), headers, bodies, strict=True)
    return [SequencedRecord(*row) for row in rows]


def content_compiled(payload: bytes | memoryview) -> BytesColumn | None:
    """The bodies of the records; None if the kernel cannot do it, or if there are command records."""
    found = _read_compiled(_kernel, payload, True, True) if _kernel is not None else None
    if found is None or found.headers is None:
        return None
    starts, ends = found.headers.offsets[:-1], found.headers.offsets[1:]
    first = starts[starts < ends]
    names = found.headers.names.offsets
    return None if np.any(names[first] == names[first + 1]) else found.bodies


def read_plain(payload: bytes, *, headers: bool = True, bodies: bool = True) -> Columns:
    """The same in plain Python, for any legal encoding."""
    records = [
        parse_sequenced(payload, start, end)
        for tag, start, end in fields(payload, 0, len(payload))
        if tag == RECORDS
    ]
    for record in records:
        if record.seq_num > _SIGNED_MAX:
            raise MalformedError(f"seq_num {record.seq_num} does not fit a signed column")
    return Columns(
        np.array([record.seq_num for record in records], np.int64),
        np.array([record.timestamp for record in records], np.uint64),
        _header_column(records) if headers else None,
        bytes_column([record.body for record in records]) if bodies else None,
    )


def encode_columns(rows: AppendColumns) -> EncodedRecords:
    """Rows as records of an AppendInput."""
    return _encode_compiled(_kernel, rows) if _kernel is not None else encode_plain(rows)


def encode_plain(rows: AppendColumns) -> EncodedRecords:
    """The same in plain Python."""
    records = [_record(rows, index) for index in range(len(rows.timestamps))]
    encoded = [encode_append(record) for record in records]
    return EncodedRecords(
        b"".join(encoded),
        np.array([0, *accumulate(map(len, encoded))], np.int64),
        np.array([metered_size(record) for record in records], np.int64),
    )


def encode_append(record: Record, headers: bytes | None = None) -> bytes:
    """One record of an AppendInput, with its tag and length; `headers` replace its own, encoded."""
    stamp = b"" if record.timestamp is None else b"\x08" + varint(record.timestamp)
    if headers is None:
        headers = b"".join(map(encode_append_header, record.headers))
    content = stamp + headers + delimited(b"\x1a", record.body)
    return b"\x0a" + varint(len(content)) + content


def bytes_column(values: list[bytes]) -> BytesColumn:
    offsets = np.array([0, *accumulate(map(len, values))], np.int32)
    return BytesColumn(offsets, np.frombuffer(b"".join(values), np.uint8))


def _header_column(records: list[SequencedRecord]) -> HeaderColumn:
    found = [header for record in records for header in record.headers]
    offsets = np.array([0, *accumulate(len(record.headers) for record in records)], np.int32)
    names = bytes_column([header.name for header in found])
    return HeaderColumn(offsets, names, bytes_column([header.value for header in found]))


def encode_append_header(header: Header) -> bytes:
    """One header of a record of an AppendInput, with its tag and length."""
    content = delimited(b"\x0a", header.name) + delimited(b"\x12", header.value)
    return b"\x12" + varint(len(content)) + content


def _record(rows: AppendColumns, index: int) -> Record:
    offsets, names, values = rows.headers
    entries = range(int(offsets[index]), int(offsets[index + 1]))
    return Record(
        _cell(rows.bodies, index),
        tuple(Header(_cell(names, entry), _cell(values, entry)) for entry in entries),
        int(rows.timestamps[index]) if rows.stamped[index] else None,
    )


def cells(column: BytesColumn) -> list[bytes]:
    """The rows of the column."""
    content = column.content.tobytes()
    return [content[start:end] for start, end in pairwise(column.offsets.tolist())]


def _cell(column: BytesColumn, row: int) -> bytes:
    return column.content[column.offsets[row] : column.offsets[row + 1]].tobytes()


def _read_compiled(
    kernel: ModuleType, payload: bytes | memoryview, headers: bool, bodies: bool
) -> Columns | None:
    """None when the plain way must look at the payload."""
    raw = _frozen(np.frombuffer(payload, np.uint8))
    room = _scratch.room(len(raw))
    content = np.empty(len(raw) if bodies else 0, np.uint8)
    count, entries = kernel.fill_columns(
        raw, room.seq_nums, room.timestamps, room.headers, tuple(room.names), tuple(room.values),
        (room.bodies, content), headers, bodies,
    )  # fmt: skip
    if count < 0:
        return None
    return Columns(
        room.seq_nums[:count].copy(),
        room.timestamps[:count].copy(),
        _taken_headers(room, count, entries) if headers else None,
        _taken_bodies(room, content, count) if bodies else None,
    )


def _taken_headers(room: _Room, rows: int, entries: int) -> HeaderColumn:
    names, values = _taken(room.names, entries), _taken(room.values, entries)
    return HeaderColumn(room.headers[: rows + 1].copy(), names, values)


def _taken_bodies(room: _Room, content: Bytes, rows: int) -> BytesColumn:
    return BytesColumn(room.bodies[: rows + 1].copy(), content[: room.bodies[rows]])


def _taken(column: BytesColumn, rows: int) -> BytesColumn:
    """A copy of the rows that were filled, of a column with more room."""
    content = column.content[: column.offsets[rows]].copy()
    return BytesColumn(column.offsets[: rows + 1].copy(), content)


def _encode_compiled(kernel: ModuleType, rows: AppendColumns) -> EncodedRecords:
    count, entries = len(rows.timestamps), len(rows.headers.names.offsets) - 1
    content = (rows.headers.names, rows.headers.values, rows.bodies)
    room = sum(len(column.content) for column in content)
    out = np.empty(room + count * _RECORD_GROWTH + entries * _HEADER_GROWTH, np.uint8)
    offsets, metered = np.empty(count + 1, np.int64), np.empty(count, np.int64)
    names, values, bodies = ((_frozen(ends), _frozen(data)) for ends, data in content)
    kernel.encode_appends(
        _frozen(rows.timestamps), _frozen(rows.stamped), _frozen(rows.headers.offsets),
        names, values, bodies, out, offsets, metered,
    )  # fmt: skip
    return EncodedRecords(out[: offsets[-1]].tobytes(), offsets, metered)


def _frozen(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """A view that cannot be written to: a writable array would be another type to the compiler."""
    view = array.view()
    view.flags.writeable = False
    return view


def _column_room(rows: int, size: int) -> BytesColumn:
    return BytesColumn(np.empty(rows + 1, np.int32), np.empty(size, np.uint8))


def _exercise(kernel: ModuleType) -> None:
    """Call every kernel once, with the types of all later calls."""
    one = bytes_column([b"a"])
    headers = HeaderColumn(np.array([0, 1], np.int32), one, one)
    rows = AppendColumns(np.zeros(1, np.uint64), np.ones(1, np.bool_), headers, one)
    if _encode_compiled(kernel, rows).raw != encode_plain(rows).raw:
        raise RuntimeError("the encoding kernel does not do what plain Python does")
    if _read_compiled(kernel, b"\x0a\x03\x22\x01a", True, True) is None:
        raise RuntimeError("the reading kernel refuses a valid record")
