"""The decoder of pgoutput: bytes in, events out."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfold.errors import MalformedError
from streamfold.ingest.postgres.pgoutput import (
    UNCHANGED,
    Begin,
    Commit,
    Delete,
    Insert,
    Lsn,
    Other,
    Relation,
    RelationColumn,
    Row,
    Truncate,
    Update,
    decode_message,
    lsn_text,
    parse_lsn,
)

#: Sent by PostgreSQL 18.4.
GOLDEN = {
    b"B\x00\x00\x00\x00\x01q\x84\xf8\x00\x03\x03`#\x8d\xdd\xf3\x00\x00\x02\xf2": Begin(
        Lsn(0x17184F8), 1_794_821_178_375_667, 754
    ),
    b"R\x00\x00@\x00public\x00t\x00d\x00\x02\x01id\x00\x00\x00\x00\x17\xff\xff\xff\xff"
    b"\x00a\x00\x00\x00\x00\x19\xff\xff\xff\xff": Relation(
        16384,
        "public",
        "t",
        "d",
        (RelationColumn("id", 23, -1, True), RelationColumn("a", 25, -1, False)),
    ),
    b"I\x00\x00@\x00N\x00\x02t\x00\x00\x00\x012n": Insert(16384, (b"2", None)),
    b"C\x00\x00\x00\x00\x00\x01q\x84\xf8\x00\x00\x00\x00\x01q\x85(\x00\x03\x03`#\x8d\xdd\xf3": Commit(
        Lsn(0x17184F8), Lsn(0x1718528), 1_794_821_178_375_667
    ),
    b"U\x00\x00@\x00K\x00\x02t\x00\x00\x00\x011nN\x00\x02t\x00\x00\x00\x012u": Update(
        16384, (b"1", None), None, (b"2", UNCHANGED)
    ),
    b"D\x00\x00@\x00O\x00\x01t\x00\x00\x00\x011": Delete(16384, None, (b"1",)),
    b"T\x00\x00\x00\x02\x00\x00\x00@\x00\x00\x00@\x01": Truncate((16384, 16385)),
    b"Oanything": Other("O"),
}


@pytest.mark.parametrize("payload", GOLDEN, ids=lambda payload: chr(payload[0]))
def test_messages_of_a_server_are_decoded(payload: bytes) -> None:
    event = GOLDEN[payload]
    assert decode_message(payload) == event


@pytest.mark.parametrize(
    "payload", [p for p in GOLDEN if p[:1] != b"O"], ids=lambda payload: chr(payload[0])
)
def test_a_message_that_is_cut_off_or_too_long_is_refused(payload: bytes) -> None:
    for end in range(1, len(payload)):
        with pytest.raises(MalformedError):
            decode_message(payload[:end])
    with pytest.raises(MalformedError, match="were expected"):
        decode_message(payload + b"\0")


def test_a_message_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(MalformedError, match="unknown kind 'S'"):
        decode_message(b"S\0\0\0\0\1")


VALUES = st.one_of(st.none(), st.just(UNCHANGED), st.binary(max_size=20))


@given(st.lists(VALUES, max_size=8).map(tuple), st.lists(VALUES, max_size=8).map(tuple))
def test_every_row_is_decoded_as_it_was_encoded(old: Row, new: Row) -> None:
    payload = b"U" + struct.pack(">I", 7) + b"O" + encoded(old) + b"N" + encoded(new)
    assert decode_message(payload) == Update(7, None, old, new)


@given(st.binary(max_size=60))
def test_no_bytes_break_the_decoder(payload: bytes) -> None:
    with contextlib.suppress(MalformedError):
        decode_message(payload)


@given(st.integers(0, 2**64 - 1))
def test_positions_are_read_as_they_are_written(lsn: int) -> None:
    assert parse_lsn(lsn_text(lsn)) == lsn


@pytest.mark.parametrize("text", ["", "1", "/", "0/", "g/1", "0/123456789", "-1/0"])
def test_what_is_not_a_position_is_refused(text: str) -> None:
    with pytest.raises(MalformedError, match="0/16B3748"):
        parse_lsn(text)


def encoded(row: Row) -> bytes:
    parts = [struct.pack(">H", len(row))]
    for value in row:
        if value is None:
            parts.append(b"n")
        elif value is UNCHANGED:
            parts.append(b"u")
        elif isinstance(value, bytes):
            parts.append(b"t" + struct.pack(">I", len(value)) + value)
    return b"".join(parts)
