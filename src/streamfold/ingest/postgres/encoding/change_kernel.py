"""An array kernel that writes messages of pgoutput as records; importing this module needs numba.

It stops before a message that it does not understand, and before one that would need a change that
`row_kernel` does not write. See `streamfold.records.record_kernel` for the rules of numba.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streamfold.ingest.postgres.encoding.copy_kernel import _bytes
from streamfold.ingest.postgres.encoding.row_kernel import (
    DELETE,
    INSERT,
    NOT_DESCRIBED,
    NOT_FOLLOWED,
    ROWS_AT,
    T_INDEX,
    T_STREAM,
    UPDATE,
    Layout,
    Scratch,
    _must_look_up,
    _number,
    _put_body,
    _table_of,
)
from streamfold.model.records import BATCH_BYTES_MAX, HEADER_OVERHEAD, RECORD_OVERHEAD
from streamfold.records.compiling import inner, kernel
from streamfold.records.json_kernel import _put, _put_decimal
from streamfold.records.record_kernel import (
    APPEND_BODY,
    APPEND_HEADERS,
    APPEND_TIMESTAMP,
    RECORDS,
    U8,
    U64,
    Bytes,
    Offsets,
    Values,
    _copy,
    _put_varint,
    _signed,
    _varint_size,
)

#: Columns of `OpenTransaction.streams`: the next index, and the held change with its table and index.
S_INDEX, S_KIND, S_START, S_END, S_TABLE, S_HELD, STREAM_FIELDS = range(7)
#: How a change is held: as the number of a message, or as a range of `OpenTransaction.bodies`.
NOTHING, MESSAGE, BODY = range(3)
#: Entries of `OpenTransaction.commit`: 1 while it is open, its LSN, milliseconds since 1970.
OPEN, LSN, STAMP, COMMIT_FIELDS = range(4)
#: Columns of `Output.records`: the stream, the end in `Output.encoded`, the metered size.
R_STREAM, R_END, R_METERED, RECORD_FIELDS = range(4)
#: Entries of `Output.written`: the next message, records, their bytes, touched streams, and the last
#: messages, or -1, that began the open transaction, ended one, ended one with a record, and began one
#: before any record.
NEXT, DONE, SIZE, TOUCHED, BEGUN, ENDED, RECORDED, QUIET, WRITTEN_FIELDS = range(9)
#: Messages of one size.
BEGIN, COMMIT = U8(66), U8(67)
BEGIN_BYTES, COMMIT_BYTES = 21, 26
#: Whether a change is the last of its transaction. As bytes: numba would compile a function again for
#: every literal that it is called with.
_MORE_FOLLOW, _IS_LAST = U8(0), U8(1)
#: Bytes of a record beside its body at most.
RECORD_BYTES = 128

#: Microseconds from 1970 to 2000, where PostgreSQL's clock starts.
_EPOCH_US = 946_684_800_000_000
_TXN, _LAST, _END = _bytes(b',"txn":{"id":"'), _bytes(b'","last":true}}'), _bytes(b'"}}')
_LSN_HEADER, _INDEX_HEADER = _bytes(b"\x0a\x03lsn\x12"), _bytes(b"\x0a\x05index\x12")
_HEX = _bytes(b"0123456789ABCDEF")
_HEADERS_METERED = RECORD_OVERHEAD + 2 * HEADER_OVERHEAD + len(b"lsn") + len(b"index")


class OpenTransaction(NamedTuple):
    """What `ChangeRecords` knows between two messages."""

    #: The first is `ChangeRecords.shared`.
    streams: Offsets
    touched: Offsets
    commit: Values
    bodies: Bytes


class Output(NamedTuple):
    """Where the kernel writes."""

    records: Offsets
    encoded: Bytes
    #: Records by table.
    counts: Offsets
    written: Offsets
    #: Room for the text of an LSN.
    lsn: Bytes
    scratch: Scratch


@inner
def _put_hex(out: Bytes, at: int, value: U64) -> int:
    digits, rest = 1, value >> U64(4)
    while rest:
        rest >>= U64(4)
        digits += 1
    for offset in range(at + digits - 1, at - 1, -1):
        out[offset] = _HEX[value & U64(15)]
        value >>= U64(4)
    return at + digits


@inner
def _put_record(
    out: Bytes, at: int, body: Bytes, start: int, length: int, lsn: Bytes, index: int, stamp: U64,
    last: U8,
) -> tuple[int, int]:  # fmt: skip
    """Write a record; returns the offset after it and its metered size.

    The offset is -1 for a record that no append takes, and for one that `out` has no room for.
    """
    digits, rest = 1, U64(index)
    while rest >= U64(10):
        rest //= U64(10)
        digits += 1
    whole = length + len(_TXN) + len(lsn) + (len(_LAST) if last == _IS_LAST else len(_END))
    metered = _HEADERS_METERED + len(lsn) + digits + whole
    if metered > BATCH_BYTES_MAX or at + whole + RECORD_BYTES > len(out):
        return -1, 0
    named, indexed = len(_LSN_HEADER) + 1 + len(lsn), len(_INDEX_HEADER) + 1 + digits
    size = 1 + _varint_size(stamp) + 2 + named + 2 + indexed + 1 + _varint_size(U64(whole)) + whole
    out[at] = RECORDS
    at = _put_varint(out, at + 1, U64(size))
    out[at] = APPEND_TIMESTAMP
    at = _put_varint(out, at + 1, stamp)
    out[at], out[at + 1] = APPEND_HEADERS, U8(named)
    at = _put(out, at + 2, _LSN_HEADER)
    out[at] = U8(len(lsn))
    at = _put(out, at + 1, lsn)
    out[at], out[at + 1] = APPEND_HEADERS, U8(indexed)
    at = _put(out, at + 2, _INDEX_HEADER)
    out[at] = U8(digits)
    at = _put_decimal(out, at + 1, U64(index))
    out[at] = APPEND_BODY
    at = _put_varint(out, at + 1, U64(whole))
    _copy(out, U64(at), body, U64(start), U64(length))
    at = _put(out, _put(out, at + length, _TXN), lsn)
    return _put(out, at, _LAST if last == _IS_LAST else _END), metered


@inner
def _release(
    raw: Bytes, messages: Offsets, layout: Layout, state: OpenTransaction, output: Output, stream: int,
    last: U8,
) -> bool:  # fmt: skip
    """Write the record of the held change; returns False, without an effect, if it cannot."""
    streams, written = state.streams, output.written
    table, start = streams[stream, S_TABLE], streams[stream, S_START]
    body, length = state.bodies, streams[stream, S_END] - start
    if streams[stream, S_KIND] == MESSAGE:
        body, at, end = output.scratch.body, messages[start, 0], messages[start, 1]
        length = _put_body(raw, at, end, layout, table, output.scratch)
        start = np.int64(0)
    if length < 0:
        return False
    lsn = output.lsn[: _put_lsn(output.lsn, state.commit[LSN])]
    after, metered = _put_record(
        output.encoded, written[SIZE], body, start, length, lsn, streams[stream, S_HELD],
        state.commit[STAMP], last,
    )  # fmt: skip
    if after < 0:
        return False
    done = written[DONE]
    output.records[done, R_STREAM], output.records[done, R_END] = stream, after
    output.records[done, R_METERED] = metered
    output.counts[table] += 1
    written[DONE], written[SIZE] = done + 1, after
    streams[stream, S_KIND] = NOTHING
    return True


@inner
def _put_lsn(out: Bytes, lsn: U64) -> int:
    at = _put_hex(out, 0, lsn >> U64(32))
    out[at] = 47  # /
    return _put_hex(out, at + 1, lsn & U64(0xFFFFFFFF))


@inner
def _begin(raw: Bytes, at: int, number: int, commit: Values, written: Offsets) -> bool:
    moment = _signed(_number(raw, at + 9, 8)) + _EPOCH_US
    if moment < 0:
        return False
    commit[OPEN], commit[LSN] = U64(1), _number(raw, at + 1, 8)
    commit[STAMP] = U64(moment) // U64(1000)
    written[BEGUN] = number
    if written[DONE] == 0:
        written[QUIET] = number
    return True


@inner
def _change(
    raw: Bytes,
    messages: Offsets,
    number: int,
    layout: Layout,
    state: OpenTransaction,
    output: Output,
) -> bool:
    at, end = messages[number, 0], messages[number, 1]
    table = _table_of(layout.relations, _signed(_number(raw, at + 1, 4)))
    if table == NOT_DESCRIBED:
        return False
    stream = 0 if table == NOT_FOLLOWED else layout.tables[table, T_STREAM]
    streams, lsn = state.streams, state.commit[LSN]
    index = streams[stream, S_INDEX]
    if table != NOT_FOLLOWED and (
        lsn > layout.positions[table]
        or (lsn == layout.positions[table] and index > layout.tables[table, T_INDEX])
    ):
        if _must_look_up(raw, at, end, layout, table, output.scratch):
            return False
        if streams[stream, S_KIND] != NOTHING and not _release(
            raw, messages, layout, state, output, stream, _MORE_FOLLOW
        ):
            return False
        streams[stream, S_KIND], streams[stream, S_START] = MESSAGE, number
        streams[stream, S_TABLE], streams[stream, S_HELD] = table, index
    if index == 0:
        state.touched[output.written[TOUCHED]] = stream
        output.written[TOUCHED] += 1
    streams[stream, S_INDEX] = index + 1
    return True


@inner
def _commit(
    raw: Bytes,
    messages: Offsets,
    number: int,
    layout: Layout,
    state: OpenTransaction,
    output: Output,
) -> bool:
    """End the transaction; if it returns False, it continues with the next held change."""
    streams, written = state.streams, output.written
    recorded = False
    for order in range(written[TOUCHED]):
        if streams[state.touched[order], S_KIND] != NOTHING:
            recorded = True
            if not _release(raw, messages, layout, state, output, state.touched[order], _IS_LAST):
                return False
    for order in range(written[TOUCHED]):
        streams[state.touched[order], S_INDEX] = 0
    state.commit[OPEN] = U64(0)
    written[TOUCHED], written[BEGUN], written[ENDED] = 0, -1, number
    if recorded:
        written[RECORDED] = number
    return True


@kernel
def encode_messages(
    raw: Bytes, messages: Offsets, layout: Layout, state: OpenTransaction, output: Output
) -> None:
    """Write records for messages from `written[NEXT]` on, until one that it does not understand.

    `messages` are the offsets of each message and of its end. `state` and `output` change as
    `ChangeRecords` would.
    """
    written = output.written
    while written[NEXT] < len(messages):
        number = written[NEXT]
        at, size = messages[number, 0], messages[number, 1] - messages[number, 0]
        kind, is_open = raw[at], state.commit[OPEN] == U64(1)
        understood = False
        if kind in (INSERT, UPDATE, DELETE) and is_open and size > ROWS_AT:
            understood = _change(raw, messages, number, layout, state, output)
        elif kind == BEGIN and not is_open and size == BEGIN_BYTES:
            understood = _begin(raw, at, number, state.commit, written)
        elif kind == COMMIT and is_open and size == COMMIT_BYTES:
            understood = _commit(raw, messages, number, layout, state, output)
        if not understood:
            break
        written[NEXT] = number + 1


@kernel
def gather(
    encoded: Bytes, records: Offsets, at: int, stream: int, most: int, room: int, out: Bytes
) -> tuple[int, int, int, int]:
    """Copy records of one stream from row `at` on, at most `most`, of `room` metered bytes.

    Returns the next row, and the records, their metered size and their size in `out`.
    """
    done, metered, size = 0, 0, 0
    while at < len(records):
        if records[at, R_STREAM] == stream:
            if done == most or metered + records[at, R_METERED] > room:
                break
            start = records[at - 1, R_END] if at else 0
            _copy(out, U64(size), encoded, U64(start), U64(records[at, R_END] - start))
            size += records[at, R_END] - start
            metered += records[at, R_METERED]
            done += 1
        at += 1
    return at, done, metered, size
