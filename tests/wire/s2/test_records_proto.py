"""Hand-written protobuf is bit-equal to the official classes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import s2_sdk._generated.s2.v1.s2_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.errors import InvalidError, StreamfoldError
from streamfold.model.configs import TimestampMode
from streamfold.model.positions import STREAM_START, U64_MAX, SeqNum, StreamPosition, Timestamp
from streamfold.model.records import Header, SequencedRecord
from streamfold.records import AppendInput, Command, Fence, Trim
from streamfold.records.protobuf import varint
from streamfold.records.rules import Slot
from streamfold.wire.s2.errors import BadProtoError
from streamfold.wire.s2.frames import BODY_MAX, Frame, encode_frame
from streamfold.wire.s2.records_proto import (
    decode_append_body,
    encode_append_ack,
    encode_frame_batches,
    encode_read_batch,
    is_light,
)
from tests.records.reference import encode_records

U64 = st.one_of(st.integers(0, U64_MAX), st.sampled_from([0, 1, 127, 128, 2**63, U64_MAX]))
POSITIONS = st.builds(StreamPosition, U64.map(SeqNum), U64.map(Timestamp))
RECORDS = st.builds(
    SequencedRecord,
    U64.map(SeqNum),
    U64.map(Timestamp),
    st.lists(st.builds(Header, st.binary(max_size=4), st.binary(max_size=4)), max_size=3).map(
        tuple[Header, ...]
    ),
    st.binary(max_size=8),
)


def official(position: StreamPosition) -> pb.StreamPosition:
    return pb.StreamPosition(seq_num=position.seq_num, timestamp=position.timestamp)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(POSITIONS, POSITIONS, POSITIONS)
def test_acks_equal_the_official_encoding(
    start: StreamPosition, end: StreamPosition, tail: StreamPosition
) -> None:
    ack = pb.AppendAck(start=official(start), end=official(end), tail=official(tail))
    assert encode_append_ack(start, end, tail) == ack.SerializeToString()


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(RECORDS, max_size=4), st.none() | POSITIONS)
def test_batches_equal_the_official_encoding(
    records: list[SequencedRecord], tail: StreamPosition | None
) -> None:
    batch = pb.ReadBatch(
        records=[
            pb.SequencedRecord(
                seq_num=record.seq_num,
                timestamp=record.timestamp,
                headers=[pb.Header(name=h.name, value=h.value) for h in record.headers],
                body=record.body,
            )
            for record in records
        ],
        tail=None if tail is None else official(tail),
    )
    payload = encode_records(records)
    assert encode_read_batch(payload, tail) == batch.SerializeToString()
    assert encode_frame_batches(payload, tail) == [batch.SerializeToString()]


def test_a_tail_of_zero_is_present() -> None:
    assert encode_read_batch(b"", STREAM_START) == b"\x12\x00"
    assert pb.ReadBatch.FromString(b"\x12\x00").HasField("tail")


def test_an_ack_at_the_start_of_a_stream_has_all_positions() -> None:
    ack = encode_append_ack(STREAM_START, STREAM_START, STREAM_START)
    assert ack == bytes.fromhex("0a00 1200 1a00")


def swollen(seq_num: int, headers: int) -> SequencedRecord:
    """A record whose encoding is twice its metered size."""
    return SequencedRecord(
        SeqNum(seq_num), Timestamp(1), tuple([Header(b"a", b"b")] * headers), b""
    )


def test_batches_that_swell_beyond_a_frame_are_split_between_records() -> None:
    records = [swollen(seq_num, 50_000) for seq_num in range(7)]
    tail = StreamPosition(SeqNum(7), Timestamp(1))
    batches = encode_frame_batches(encode_records(records), tail)
    decoded = [pb.ReadBatch.FromString(batch) for batch in batches]
    assert len(batches) == 2
    assert all(len(encode_frame(batch)) <= 4 + BODY_MAX for batch in batches)
    assert [r.seq_num for batch in decoded for r in batch.records] == list(range(7))
    assert [batch.HasField("tail") for batch in decoded] == [False, True]


def test_a_record_larger_than_a_frame_stands_alone() -> None:
    records = [swollen(0, 1), swollen(1, 262_144), swollen(2, 1)]
    decoded = [pb.ReadBatch.FromString(b) for b in encode_frame_batches(encode_records(records))]
    assert [[r.seq_num for r in batch.records] for batch in decoded] == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("vector", "command"),
    [
        ("12 07 12 05 66 65 6e 63 65 1a 03 74 6f 6b", Fence(0, "tok")),
        ("12 06 12 04 74 72 69 6d 1a 08 00 00 00 00 00 00 00 2a", Trim(0, 42)),
    ],
)
def test_the_published_commands_are_understood(vector: str, command: Command) -> None:
    raw = bytes.fromhex(vector)
    append = decode_append_body(b"\x0a" + bytes([len(raw)]) + raw)
    assert append.batch.commands == (command,)


def test_the_body_of_a_unary_append_is_understood() -> None:
    body = pb.AppendInput(
        records=[pb.AppendRecord(body=b"hi")], match_seq_num=3, fencing_token="t"
    ).SerializeToString()
    append = decode_append_body(body)
    assert (append.batch.count, append.match_seq_num, append.fencing_token) == (1, 3, "t")


def test_a_body_that_is_not_protobuf_is_refused_as_such() -> None:
    with pytest.raises(BadProtoError, match="AppendInput"):
        decode_append_body(b"\x0a\xff")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        pb.AppendInput(records=[pb.AppendRecord()] * 1001).SerializeToString(),
        pb.AppendInput(records=[pb.AppendRecord(body=bytes(1 << 20))]).SerializeToString(),
        pb.AppendInput(records=[pb.AppendRecord()], fencing_token="x" * 37).SerializeToString(),
        pb.AppendInput(
            records=[pb.AppendRecord(headers=[pb.Header(value=b"stop")])]
        ).SerializeToString(),
    ],
    ids=["no records", "too many records", "too many bytes", "long token", "no such command"],
)
def test_a_batch_that_breaks_a_rule_is_invalid_rather_than_undecodable(body: bytes) -> None:
    with pytest.raises(InvalidError):
        decode_append_body(body)


def test_a_message_of_very_many_headers_is_left_to_a_thread() -> None:
    """The event loop decodes what takes a millisecond; a batch may have 350,000 headers."""
    few, many = (_message_of_headers(count) for count in (5_000, 100_000))
    assert is_light(few)
    assert not is_light(many)
    assert decode_append_body(many).batch.count == 1


def _message_of_headers(count: int) -> bytes:
    record = b"\x12\x03\x0a\x01a" * count
    return b"\x0a" + varint(len(record)) + record


def _record(fields: bytes) -> bytes:
    return b"\x0a" + varint(len(fields)) + fields


def _body(size: int) -> bytes:
    return b"\x1a" + varint(size) + bytes(size)


#: Frames as large as they may be, and whether the event loop decodes them itself.
LARGE_FRAMES = {
    "full batch": (_record(_body(1016)) * 1000, True),
    "too many bytes": (_record(_body(2000)) * 1000, True),
    "one large record": (_record(_body(1_000_000)), True),
    "a condition after the records": (_record(_body(1016)) * 1000 + b"\x10\x07", True),
    "very many headers": (_message_of_headers(400_000), False),
    "too many records": (_record(b"\x1a\x01a") * 400_000, False),
    "empty records": (b"\x0a\x00" * 1_000_000, False),
    "many conditions": (_record(b"\x1a\x01a") + b"\x10\x01" * 1_000_000, False),
    "a long token": (_record(b"\x1a\x01a") + b"\x1a" + varint(2_000_000) + bytes(2_000_000), True),
    "a command in a large batch": (
        _record(b"\x12\x06\x12\x04trim") + _record(_body(999_000)),
        True,
    ),
    "very many fields of one header": (
        _record(b"\x12" + varint(2_000_000) + b"\x0a\x00" * 1_000_000),
        False,
    ),
    "a group of very many fields": (_record(b"\x43" + b"\x08\x01" * 1_000_000 + b"\x44"), False),
    "padded lengths": ((b"\x0a\x83\x00\x1a\x01a") * 200_000, False),
    "zeros": (bytes(BODY_MAX), False),
    "tags": (b"\x0a" * BODY_MAX, False),
    "endless numbers": (b"\x80" * BODY_MAX, False),
}


@pytest.mark.parametrize("kind", LARGE_FRAMES)
def test_a_frame_with_very_many_fields_is_left_to_a_thread(kind: str) -> None:
    body, on_the_loop = LARGE_FRAMES[kind]
    assert is_light(body) == on_the_loop


def _meaning(decode: Callable[[Frame], AppendInput | None], body: bytes) -> object:
    """What an append asks for, or why it is refused."""
    try:
        append = decode(Frame(body))
    except StreamfoldError as error:
        return type(error), str(error)
    if append is None:
        return None
    slot = Slot(5, TimestampMode.CLIENT_PREFER, uncapped=False, now=1_000, floor=0)
    batch = append.batch
    return (
        batch.sequence(slot),
        batch.count,
        batch.metered,
        batch.commands,
        append.match_seq_num,
        append.fencing_token,
    )
