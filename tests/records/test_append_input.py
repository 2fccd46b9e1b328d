"""Valid and invalid append requests."""

from __future__ import annotations

import pytest

from streamfold.errors import InvalidError, MalformedError
from streamfold.model.records import Header, Record, fence_record, trim_record
from streamfold.records import AppendInput, Fence, Trim, parse_append_input

from .models import Clock, parses, sequence, serialize_input

MIB = 1 << 20
COMMAND = b""


def assert_refused(raw: bytes, *words: str) -> None:
    """Every implementation that takes `raw` refuses it, and says why."""
    for name, found in parses(raw).items():
        assert isinstance(found, tuple), name
        assert found[0] is InvalidError, name
        for word in words:
            assert word in found[1], name


def assert_accepted(raw: bytes) -> AppendInput:
    for name, found in parses(raw).items():
        assert isinstance(found, AppendInput), name
    return parse_append_input(raw)


def test_protocol_vector_of_one_record_with_a_body() -> None:
    parsed = assert_accepted(bytes.fromhex("0a04 1a026869"))
    assert (parsed.batch.count, parsed.batch.metered) == (1, 10)
    assert (parsed.match_seq_num, parsed.fencing_token) == (None, None)


def test_protocol_vector_with_everything_present_becomes_the_read_batch_vector() -> None:
    raw = bytes.fromhex("0a13 0880d095ffbc31 1206 0a016b 120176 1a026869 1000 1a00")
    parsed = assert_accepted(raw)
    assert (parsed.match_seq_num, parsed.fencing_token) == (0, "")
    sequenced = sequence(parsed.batch, 0, Clock())
    payload = sequenced.payload
    earliest, latest = sequenced.first_timestamp, sequenced.last_timestamp
    assert payload == bytes.fromhex("0a13 1080d095ffbc31 1a06 0a016b 120176 22026869")
    assert earliest == latest == 1_700_000_000_000


@pytest.mark.parametrize(
    ("message", "command"),
    [
        ("12071205 66656e6365 1a03746f6b", Fence(0, "tok")),
        ("12061204 7472696d 1a08000000000000002a", Trim(0, 42)),
    ],
)
def test_protocol_vectors_of_command_records(message: str, command: Fence | Trim) -> None:
    record = bytes.fromhex(message)
    parsed = assert_accepted(bytes([0x0A, len(record)]) + record)
    assert parsed.batch.commands == (command,)


def test_absent_conditions_differ_from_empty_ones() -> None:
    assert assert_accepted(serialize_input([Record()])).fencing_token is None
    assert assert_accepted(serialize_input([Record()], token="")).fencing_token == ""
    assert assert_accepted(serialize_input([Record()], match=0)).match_seq_num == 0


def test_a_batch_without_records_is_refused() -> None:
    assert_refused(b"", "no records")
    assert_refused(serialize_input([], 3, "token"), "no records")


def test_1000_records_are_accepted_and_1001_refused() -> None:
    assert assert_accepted(serialize_input([Record()] * 1000)).batch.metered == 8000
    assert_refused(serialize_input([Record()] * 1001), "more than 1000")


def test_a_flood_of_empty_records_is_refused() -> None:
    assert_refused(b"\x0a\x00" * 500_000, "more than 1000")


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_one_mebibyte_metered_is_accepted_and_one_byte_more_refused(count: int) -> None:
    rest = [Record()] * (count - 1)
    size = MIB - 8 * count
    assert assert_accepted(serialize_input([Record(b"x" * size), *rest])).batch.metered == MIB
    over = serialize_input([Record(b"x" * (size + 1)), *rest])
    assert_refused(over, str(MIB + 1), str(MIB))


def test_headers_count_towards_the_limit() -> None:
    record = Record(b"x" * (MIB - 8 - 2 - 3 - 4), (Header(b"abc", b"defg"),))
    assert assert_accepted(serialize_input([record])).batch.metered == MIB
    assert_refused(serialize_input([record, Record()]), str(MIB + 8))


def test_a_record_of_very_many_headers_grows_beyond_a_mebibyte_and_stays_whole() -> None:
    raw = serialize_input([Record(b"", (Header(b"k", b""),) * 300_000)])
    batch = parse_append_input(raw).batch
    assert batch.metered == 8 + 3 * 300_000
    # Tag and length take 4 bytes; position 0 at time 0 takes none.
    assert sequence(batch, 0, Clock(now=0)).payload[4:] == b"\x1a\x03\x0a\x01k" * 300_000


def test_fencing_tokens_have_at_most_36_bytes() -> None:
    assert assert_accepted(serialize_input([Record()], token="ä" * 18)).fencing_token == "ä" * 18
    assert_refused(serialize_input([Record()], token="x" * 37), "37 bytes", "36")


@pytest.mark.parametrize("token", [b"\xff", b"\xed\xa0\x80", b"\xc0\x80"])
def test_fencing_tokens_that_are_not_utf8_are_malformed(token: bytes) -> None:
    with pytest.raises(MalformedError, match="not UTF-8"):
        parse_append_input(b"\x0a\x03\x1a\x01a\x1a" + bytes([len(token)]) + token)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (Record(b"x" * 37, fence_record("").headers), ("37 bytes", "36")),
        (Record(b"\xff", fence_record("").headers), ("not UTF-8",)),
        (Record(b"", trim_record(0).headers), ("0 bytes", "8")),
        (Record(b"1234567", trim_record(0).headers), ("7 bytes", "8")),
        (Record(b"123456789", trim_record(0).headers), ("9 bytes", "8")),
        (Record(b"", (Header(COMMAND, b"unknown"),)), ("unknown",)),
        (Record(b"", (Header(COMMAND, b""),)), ("not a command",)),
        (Record(b"", (Header(COMMAND, b"fence"), Header(b"k", b"v"))), ("2 headers",)),
        (Record(b"", (Header(b"k", b"v"), Header(COMMAND, b"fence"))), ("2 headers",)),
        (Record(b"", (Header(COMMAND, b"fence"),) * 2), ("2 headers",)),
    ],
)
def test_malformed_commands_are_refused_by_the_index_of_their_record(
    record: Record, words: tuple[str, ...]
) -> None:
    assert_refused(serialize_input([record]), "record 0", *words)
    assert_refused(serialize_input([Record(b"x"), Record(b"y"), record]), "record 2", *words)


@pytest.mark.parametrize("token", ["", "x" * 36, "ä" * 18])
def test_fence_commands_take_tokens_of_0_to_36_bytes(token: str) -> None:
    parsed = assert_accepted(serialize_input([fence_record(token)]))
    assert parsed.batch.commands == (Fence(0, token),)


def test_a_header_that_only_has_the_value_of_a_command_is_data() -> None:
    parsed = assert_accepted(serialize_input([Record(b"", (Header(b"k", b"fence"),))]))
    assert parsed.batch.commands == ()


@pytest.mark.parametrize(
    "raw",
    [
        b"\x0a",  # no length
        b"\x0a\x05\x1a\x02hi",  # record cut off
        b"\x0a\x04\x1a\x03hi",  # body cut off
        b"\x0a\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00",  # length of 11 bytes
        b"\x0a\x80",  # length cut off
        b"\x0a\x02\x08\x80",  # timestamp cut off
        b"\x00\x00",  # field 0
        b"\x0a\x01\x07",  # wire type 7
        b"\x24",  # end of a group that never began
        b"\x23\x2c",  # end of another group
        b"\x23" * 101 + b"\x24" * 101,  # too deep
        b"\x25\x00\x00",  # fixed number cut off
        b"\xf8\xff\xff\xff\x1f\x00",  # tag of more than 32 bits
        b"\x90\x80\x80\x80\x80\x00\x05",  # tag of 6 bytes
    ],
)
def test_undecodable_bytes_are_malformed(raw: bytes) -> None:
    for name, found in parses(raw).items():
        assert isinstance(found, tuple), name
        assert found[0] is MalformedError, name


@pytest.mark.parametrize("length", [b"\x80\x00", b"\x80\x80\x00", b"\x80\x80\x80\x00"])
def test_an_empty_record_with_a_padded_length_is_accepted(length: bytes) -> None:
    assert assert_accepted(b"\x0a" + length).batch.metered == 8


@pytest.mark.parametrize(
    "odd",
    [
        "1206 0a016b 120176 1a8200 6869",  # padded length of the body
        "128600 0a016b 120176 1a02 6869",  # of a header
        "1207 0a81006b 120176 1a02 6869",  # of its name
        "1207 0a016b 12810076 1a02 6869",  # of its value
        "1206 120176 0a016b 1a02 6869",  # value before name
        "1a02 6869 1206 0a016b 120176",  # body before headers
        "1206 0a016b 120176 1a00 1a02 6869",  # an empty body first
    ],
)
def test_a_record_with_one_odd_encoding_is_stored_canonically(odd: str) -> None:
    record = bytes.fromhex(odd)
    for parsed in parses(b"\x0a\x03\x1a\x01a\x0a" + bytes([len(record)]) + record).values():
        assert isinstance(parsed, AppendInput)
        payload = sequence(parsed.batch, 0, Clock(now=0)).payload
        assert payload == bytes.fromhex("0a03220161 0a0e 0801 1a06 0a016b 120176 22026869")


def test_a_second_value_that_looks_like_a_header_is_a_value() -> None:
    raw = bytes.fromhex("0a00 0a0d 120b 0a016b 120178 12030a016b")
    for name, parsed in parses(raw).items():
        assert isinstance(parsed, AppendInput), name
        payload = sequence(parsed.batch, 0, Clock(now=0)).payload
        assert payload == bytes.fromhex("0a00 0a0c 0801 1a08 0a016b 12030a016b"), name


def test_empty_fields_that_are_present_are_stored_as_absent() -> None:
    raw = bytes.fromhex("0a02 1a00 0a09 1205 0a016b 1200 1a00")
    for parsed in parses(raw).values():
        assert isinstance(parsed, AppendInput)
        payload = sequence(parsed.batch, 0, Clock(now=0)).payload
        assert payload == bytes.fromhex("0a00 0a07 0801 1a03 0a016b")


def test_records_on_both_sides_of_the_conditions_are_all_taken() -> None:
    one, two = serialize_input([Record(b"one")], 7), serialize_input([Record(b"two")], token="t")
    parsed = assert_accepted(one + two)
    assert (parsed.batch.count, parsed.match_seq_num, parsed.fencing_token) == (2, 7, "t")
