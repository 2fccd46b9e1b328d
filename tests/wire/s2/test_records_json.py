"""Appends, batches and acknowledgements in JSON, raw and base64."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.errors import DataCorruptError, InvalidError, MalformedError
from streamfold.model.configs import TimestampMode
from streamfold.model.positions import STREAM_START, U64_MAX, SeqNum, StreamPosition, Timestamp
from streamfold.model.records import Header, SequencedRecord
from streamfold.records import AppendInput, Fence, decode
from streamfold.records.payload import write_json
from streamfold.records.rules import Slot
from streamfold.wire.s2.errors import BadJsonError
from streamfold.wire.s2.records_json import (
    RecordFormat,
    decode_append_body,
    encode_append_ack,
    encode_read_batch,
    encode_tail,
    is_light,
)
from tests.records import reference
from tests.records.reference import encode_records

RAW, BASE64 = RecordFormat.RAW, RecordFormat.BASE64
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
U64 = st.one_of(st.integers(0, U64_MAX), st.sampled_from([0, 2**53 + 1, U64_MAX]))


def records_of(append: AppendInput) -> list[SequencedRecord]:
    """The batch as a stream that takes client timestamps would store it."""
    slot = Slot(0, TimestampMode.CLIENT_PREFER, uncapped=True, now=5, floor=0)
    sequenced = append.batch.sequence(slot)
    return decode(sequenced.payload)


def b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def append(*records: Any, record_format: RecordFormat = RAW, **conditions: Any) -> AppendInput:
    body = json.dumps({"records": records, **conditions}).encode()
    return decode_append_body(body, record_format)


def test_a_record_has_its_timestamp_headers_and_body() -> None:
    [record] = records_of(append({"timestamp": 7, "headers": [["k", "vé"]], "body": "hi"}))
    assert record == SequencedRecord(SeqNum(0), Timestamp(7), (Header(b"k", "vé".encode()),), b"hi")


@given(st.none() | TEXT, st.none() | U64 | st.just(U64_MAX + 1))
def test_one_record_without_headers_is_decoded_as_among_others(
    body: str | None, timestamp: int | None
) -> None:
    record = {"body": body, "timestamp": timestamp}
    if timestamp is not None and timestamp > U64_MAX:
        for records in [record], [record, record]:
            with pytest.raises(InvalidError, match="record 0: timestamp"):
                append(*records)
    else:
        alone, among_others = append(record), append(record, record)
        assert records_of(alone) == records_of(among_others)[:1]
        assert alone.batch.metered * 2 == among_others.batch.metered


@pytest.mark.parametrize(
    "empty", [{}, {"timestamp": None, "headers": None, "body": None}, {"headers": [], "body": ""}]
)
@pytest.mark.parametrize("record_format", list(RecordFormat))
def test_absent_and_null_members_are_the_same(
    empty: dict[str, Any], record_format: RecordFormat
) -> None:
    [record] = records_of(append(empty, record_format=record_format))
    assert record == SequencedRecord(SeqNum(0), Timestamp(5), (), b"")


def test_conditions_are_present_or_absent() -> None:
    bare = append({})
    assert (bare.match_seq_num, bare.fencing_token) == (None, None)
    null = append({}, match_seq_num=None, fencing_token=None)
    assert (null.match_seq_num, null.fencing_token) == (None, None)
    full = append({}, match_seq_num=U64_MAX, fencing_token="")
    assert (full.match_seq_num, full.fencing_token) == (U64_MAX, "")


def test_base64_covers_names_values_and_bodies() -> None:
    record = {"headers": [[b64(b"\xff"), b64(b"\x00")]], "body": b64(b"\xfe\xfd")}
    [stored] = records_of(append(record, record_format=BASE64))
    assert (stored.headers, stored.body) == ((Header(b"\xff", b"\x00"),), b"\xfe\xfd")


def test_a_command_in_base64_has_an_empty_name() -> None:
    command = {"headers": [["", "ZmVuY2U="]], "body": "dG9r"}
    assert append(command, record_format=BASE64).batch.commands == (Fence(0, "tok"),)


def test_unknown_members_are_ignored() -> None:
    assert append({"body": "x", "colour": "red"}, mood={"good": [1]}).batch.count == 1


@pytest.mark.parametrize(
    "bad", ["aGk", "a-_=", "aG k=", "====", "é"], ids=["unpadded", "url", "space", "pad", "text"]
)
@pytest.mark.parametrize("where", ["body", "name", "value"])
def test_bad_base64_is_invalid_rather_than_malformed(bad: str, where: str) -> None:
    record = {
        "body": {"body": bad},
        "name": {"headers": [[bad, ""]]},
        "value": {"headers": [["", bad]]},
    }[where]
    with pytest.raises(InvalidError, match="base64"):
        append(record, record_format=BASE64)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"{}",
        b"[]",
        b"null",
        b'{"records": [{}]} trailing',
        b'{"records": "nope"}',
        b'{"records": [{"body": 1}]}',
        b'{"records": [{"headers": [["only one"]]}]}',
        b'{"records": [{"headers": [["a", "b", "c"]]}]}',
        b'{"records": [{"timestamp": -1}]}',
        b'{"records": [{"timestamp": 1.5}]}',
        b'{"records": [{"timestamp": "1"}]}',
        b'{"records": [{}], "match_seq_num": -1}',
        b'{"records": [{}], "match_seq_num": 18446744073709551616}',
        b'{"records": [{}], "fencing_token": 7}',
        b'{"records": [{"body": "\xff"}]}',
        b'{"records": [{"body": "\\ud800"}]}',
        b'{"x": ' + b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("record_format", list(RecordFormat))
def test_a_body_that_does_not_fit_is_malformed(body: bytes, record_format: RecordFormat) -> None:
    with pytest.raises(BadJsonError):
        decode_append_body(body, record_format)


@pytest.mark.parametrize(
    ("records", "conditions"),
    [
        ([], {}),
        ([{}] * 1001, {}),
        ([{"body": "x" * (1 << 20)}], {}),
        ([{"headers": [["", "stop"]]}], {}),
        ([{"headers": [["", "trim"]], "body": "short"}], {}),
        ([{}], {"fencing_token": "x" * 37}),
        ([{"timestamp": U64_MAX + 1}], {}),
    ],
)
def test_a_batch_that_breaks_a_rule_is_invalid(records: list[Any], conditions: Any) -> None:
    with pytest.raises(InvalidError):
        append(*records, **conditions)


def test_a_batch_at_the_limits_is_accepted() -> None:
    assert append(*[{}] * 1000).batch.count == 1000
    assert append({"body": "x" * ((1 << 20) - 8)}).batch.metered == 1 << 20


def stored(*records: SequencedRecord) -> bytes:
    return encode_records(records)


def test_a_batch_leaves_out_what_is_empty() -> None:
    payload = stored(SequencedRecord(SeqNum(3), Timestamp(4), (), b""))
    for record_format in RecordFormat:
        batch = encode_read_batch(payload, record_format)
        assert batch == b'{"records":[{"seq_num":3,"timestamp":4}]}'


def test_a_batch_has_headers_bodies_and_tail() -> None:
    payload = stored(SequencedRecord(SeqNum(0), Timestamp(1), (Header(b"k", b"v"),), b"hi"))
    tail = StreamPosition(SeqNum(1), Timestamp(1))
    assert encode_read_batch(payload, RAW, tail) == (
        b'{"records":[{"seq_num":0,"timestamp":1,"headers":[["k","v"]],"body":"hi"}],'
        b'"tail":{"seq_num":1,"timestamp":1}}'
    )
    assert encode_read_batch(payload, BASE64) == (
        b'{"records":[{"seq_num":0,"timestamp":1,"headers":[["aw==","dg=="]],"body":"aGk="}]}'
    )


def test_an_empty_batch_has_no_records_and_a_zero_tail_is_present() -> None:
    assert encode_read_batch(b"", RAW) == b'{"records":[]}'
    assert encode_read_batch(b"", RAW, STREAM_START) == (
        b'{"records":[],"tail":{"seq_num":0,"timestamp":0}}'
    )


def test_a_command_is_read_with_an_empty_name() -> None:
    payload = stored(SequencedRecord(SeqNum(0), Timestamp(1), (Header(b"", b"fence"),), b"t"))
    assert b'"headers":[["","fence"]]' in encode_read_batch(payload, RAW)
    assert b'"headers":[["","ZmVuY2U="]]' in encode_read_batch(payload, BASE64)


def test_raw_replaces_what_is_not_utf8() -> None:
    record = SequencedRecord(SeqNum(0), Timestamp(0), (Header(b"\xff", b"\xc3"),), b"a\xf0\x9fz")
    [read] = json.loads(encode_read_batch(stored(record), RAW))["records"]
    assert read["headers"] == [["�", "�"]]
    assert read["body"] == "a�z"


@settings(derandomize=True, max_examples=80, deadline=None)
@given(st.lists(st.tuples(U64, st.lists(st.tuples(TEXT, TEXT), max_size=2), TEXT), min_size=1))
def test_text_survives_raw_and_base64(
    records: list[tuple[int, list[tuple[str, str]], str]],
) -> None:
    given_records = [
        SequencedRecord(
            SeqNum(index),
            Timestamp(stamp),
            tuple(Header(name.encode(), value.encode()) for name, value in headers),
            body.encode(),
        )
        for index, (stamp, headers, body) in enumerate(records)
    ]
    raw = json.loads(encode_read_batch(stored(*given_records), RAW))["records"]
    safe = json.loads(encode_read_batch(stored(*given_records), BASE64))["records"]
    for index, (stamp, headers, body) in enumerate(records):
        assert (raw[index]["seq_num"], raw[index]["timestamp"]) == (index, stamp)
        assert raw[index].get("body", "") == body
        assert raw[index].get("headers", []) == [list(header) for header in headers]
        assert base64.b64decode(safe[index].get("body", "")).decode() == body


@settings(derandomize=True, max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.binary(max_size=9)), min_size=1))
def test_bytes_survive_an_append_and_a_read_in_base64(pairs: list[tuple[bytes, bytes]]) -> None:
    sent = [{"headers": [[b64(name), b64(body)]], "body": b64(body)} for name, body in pairs]
    payload = encode_records(records_of(append(*sent, record_format=BASE64)))
    read = json.loads(encode_read_batch(payload, BASE64))["records"]
    assert [(r["headers"], r.get("body", "")) for r in read] == [
        (r["headers"], r["body"]) for r in sent
    ]


def test_an_ack_has_three_positions() -> None:
    start, end = STREAM_START, StreamPosition(SeqNum(U64_MAX), Timestamp(U64_MAX))
    assert json.loads(encode_append_ack(start, end, end)) == {
        "start": {"seq_num": 0, "timestamp": 0},
        "end": {"seq_num": U64_MAX, "timestamp": U64_MAX},
        "tail": {"seq_num": U64_MAX, "timestamp": U64_MAX},
    }


def test_the_tail_of_a_stream_never_written_is_zero() -> None:
    assert encode_tail(STREAM_START) == b'{"tail":{"seq_num":0,"timestamp":0}}'


@pytest.mark.parametrize("record_format", list(RecordFormat))
@pytest.mark.parametrize(("records", "headers"), [(1000, 20), (1, 20_000), (3, 9_000)])
def test_a_large_append_decodes_in_steps_to_the_same(
    record_format: RecordFormat, records: int, headers: int
) -> None:
    record = {"timestamp": 7, "headers": [["QUJD", "IiwgW10="]] * headers, "body": "Ym9k, Iih5"[:4]}
    wanted = {"fencing_token": "t", "records": [record] * records, "match_seq_num": 3, "x": [{}]}
    body = json.dumps(wanted, indent=1).encode()
    assert not is_light(body)
    found = decode_append_body(body, record_format)
    name = b"ABC" if record_format is BASE64 else b"QUJD"
    [first, *_] = stored = records_of(found)
    assert (found.match_seq_num, found.fencing_token, len(stored)) == (3, "t", records)
    assert (first.timestamp, len(first.headers), first.headers[-1].name) == (7, headers, name)


@pytest.mark.parametrize("record_format", list(RecordFormat))
@pytest.mark.parametrize(
    "records",
    [
        b"[{}," * 20_000,
        b"{}," * 20_000,
        b"[" + b"[]," * 900 + b"[]]",
        b'[{"body":1}' + b",{}" * 900 + b"]",
        b'[{"headers":[' + b'["a"],' * 20_000 + b'["a"]]}]',
        b'[{"headers":[' + b'["a","b"],' * 20_000 + b'["a",]]}]',
        b'[{"body":"' + b"x" * 2_000_000 + b'\xff"}]',
    ],
)
def test_a_large_append_of_another_form_is_refused(
    record_format: RecordFormat, records: bytes
) -> None:
    padding = b'"fencing_token":"t"' + b" " * 1_600_000
    with pytest.raises(BadJsonError):
        decode_append_body(b'{"records":%b,%b}' % (records, padding), record_format)


def test_a_large_append_of_too_many_records_is_refused_as_a_small_one_is() -> None:
    for count in (1_001, 100_000):
        with pytest.raises(InvalidError, match="more than 1000 records"):
            decode_append_body(b'{"records":[%b]}' % b",".join([b"{}"] * count), RAW)


#: Text, also of characters that JSON escapes or UTF-8 writes in several bytes, and any bytes.
STRINGS = st.one_of(
    st.text(
        st.sampled_from('a"\\/\b\f\n\r\t\x00\x1f\x7f\x80é߿ࠀ\ud7ff\uffff𐀀\U0010ffff'), max_size=12
    ).map(str.encode),
    TEXT.map(str.encode),
    st.binary(max_size=8),
)
STORED = st.builds(
    SequencedRecord,
    U64.map(SeqNum),
    U64.map(Timestamp),
    st.lists(st.builds(Header, STRINGS, STRINGS), max_size=3).map(tuple[Header, ...]),
    STRINGS,
)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(STORED, max_size=4))
def test_native_code_writes_the_json_that_python_writes(records: list[SequencedRecord]) -> None:
    payload = encode_records(records)
    for record_format in RecordFormat:
        as_base64 = record_format is BASE64
        expected = reference.write_json(payload, as_base64=as_base64)
        assert write_json(payload, base64=as_base64) == expected


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.lists(STORED, min_size=1, max_size=2), st.data())
def test_native_code_writes_the_json_of_damaged_records_that_python_writes(
    records: list[SequencedRecord], data: st.DataObject
) -> None:
    damaged = bytearray(encode_records(records))
    offset = data.draw(st.integers(0, len(damaged) - 1))
    damaged[offset] = data.draw(st.integers(0, 255))
    payload = bytes(damaged[: data.draw(st.integers(offset + 1, len(damaged)))])
    for as_base64 in (False, True):
        try:
            expected = reference.write_json(payload, as_base64=as_base64)
        except MalformedError:
            with pytest.raises(DataCorruptError):
                write_json(payload, base64=as_base64)
        else:
            assert write_json(payload, base64=as_base64) == expected
