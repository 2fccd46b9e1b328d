"""All implementations agree with each other and, bit for bit, with the official classes."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from s2_sdk._generated.s2.v1 import s2_pb2 as pb

from streamfold.errors import InvalidError, MalformedError
from streamfold.model.records import Record, fence_record, metered_size, trim_record
from streamfold.records import (
    AppendInput,
    Fence,
    RecordBatch,
    Trim,
    decode,
    parse_append_input,
)

from . import strategies as some
from .models import (
    NOON,
    Clock,
    assign_slots,
    parses,
    protobuf_accepts,
    records_of,
    sequence,
    serialize_batch,
    serialize_input,
)
from .reference import encode_records

#: Derandomized: a run that fails, fails again.
repeatable = settings(derandomize=True, deadline=None, max_examples=100)


def assert_same_outcome(raw: bytes, clock: Clock = NOON) -> AppendInput | None:
    """Parse with everything we have; sequenced bytes are the same, and so are errors."""
    found = parses(raw)
    reference = found["reference"]
    for name, other in found.items():
        if not isinstance(other, AppendInput) or not isinstance(reference, AppendInput):
            assert other == reference, name
            continue
        assert describe(other) == describe(reference), name
        assert attempt(other.batch, clock) == attempt(reference.batch, clock), name
    return reference if isinstance(reference, AppendInput) else None


def describe(parsed: AppendInput) -> tuple[object, ...]:
    batch = parsed.batch
    return batch.count, batch.metered, batch.commands, parsed.match_seq_num, parsed.fencing_token


def attempt(batch: RecordBatch, clock: Clock) -> object:
    try:
        return sequence(batch, 300, clock)
    except InvalidError as error:
        return error.message


def assert_sequences_as(batch: RecordBatch, records: Sequence[Record], clock: Clock) -> None:
    expected = assign_slots(records, 300, clock)
    if clock.mode == "client-require" and any(record.timestamp is None for record in records):
        assert "has no timestamp" in str(attempt(batch, clock))
        return
    sequenced = sequence(batch, 300, clock)
    payload = sequenced.payload
    earliest, latest = sequenced.first_timestamp, sequenced.last_timestamp
    assert payload == serialize_batch(expected)
    assert (earliest, latest) == (expected[0].timestamp, expected[-1].timestamp)


@repeatable
@given(some.batches, some.clocks, st.none() | some.u64, some.tokens)
def test_canonical_inputs_are_sequenced_bit_for_bit_as_protobuf_would(
    records: list[Record], clock: Clock, match: int | None, token: str | None
) -> None:
    raw = serialize_input(records, match, token)
    parsed = assert_same_outcome(raw, clock)
    assert parsed is not None
    assert (parsed.match_seq_num, parsed.fencing_token) == (match, token)
    assert parsed.batch.metered == sum(map(metered_size, records))
    assert_sequences_as(parsed.batch, records, clock)


@repeatable
@given(some.odd_inputs(), some.clocks)
def test_odd_encodings_are_understood_and_stored_canonically(raw: bytes, clock: Clock) -> None:
    oracle = pb.AppendInput.FromString(raw)
    records = records_of(oracle)
    parsed = assert_same_outcome(raw, clock)
    assert parsed is not None
    assert parsed.match_seq_num == (
        oracle.match_seq_num if oracle.HasField("match_seq_num") else None
    )
    assert parsed.fencing_token == (
        oracle.fencing_token if oracle.HasField("fencing_token") else None
    )
    assert_sequences_as(parsed.batch, records, clock)


@repeatable
@given(some.batches, some.clocks)
def test_batches_made_in_python_are_the_same_as_parsed_ones(
    records: list[Record], clock: Clock
) -> None:
    made, parsed = RecordBatch.of(records), parse_append_input(serialize_input(records)).batch
    assert (made.count, made.metered, made.commands) == (
        parsed.count,
        parsed.metered,
        parsed.commands,
    )
    assert attempt(made, clock) == attempt(parsed, clock)


@repeatable
@given(some.batches, some.u64.filter(lambda first: first < 1 << 63), some.clocks)
def test_decoding_gives_back_what_was_sequenced(
    records: list[Record], first: int, clock: Clock
) -> None:
    expected = assign_slots(records, first, clock)
    assert encode_records(expected) == serialize_batch(expected)
    assert decode(encode_records(expected)) == expected
    assert decode(memoryview(encode_records(expected))) == expected


@repeatable
@given(some.batches, some.tokens, st.data())
def test_damaged_inputs_are_refused_exactly_when_protobuf_refuses_them(
    records: list[Record], token: str | None, data: st.DataObject
) -> None:
    raw = bytearray(serialize_input(records, 5, token))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    found = parses(bytes(raw))["reference"]
    if protobuf_accepts(bytes(raw)):
        assert isinstance(found, AppendInput) or found[0] is InvalidError
    else:
        assert isinstance(found, tuple)
        assert found[0] is MalformedError
    assert_same_outcome(bytes(raw))


@repeatable
@given(st.one_of(some.odd_inputs(), some.batches.map(serialize_input)), st.data())
def test_truncated_inputs_are_malformed_or_valid_but_never_crash(
    raw: bytes, data: st.DataObject
) -> None:
    assert_same_outcome(raw[: data.draw(st.integers(0, len(raw) - 1))])


def test_every_truncation_of_an_input_is_handled() -> None:
    records = [Record(b"x" * 200), fence_record("token"), trim_record(7), Record(b"y")]
    raw = serialize_input(records, 1 << 40, "tök")
    for size in range(len(raw)):
        assert_same_outcome(raw[:size])


def test_commands_are_reported_in_order_with_their_index() -> None:
    records = [Record(b"a"), fence_record("tök"), Record(b"b"), trim_record(2**64 - 1)]
    for found in parses(serialize_input(records)).values():
        assert isinstance(found, AppendInput)
        assert found.batch.commands == (Fence(1, "tök"), Trim(3, 2**64 - 1))
