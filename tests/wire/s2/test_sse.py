"""Server-sent events, read back by the rules of the event-stream format."""

from __future__ import annotations

import json

from streamfold.errors import InvalidError, SeqNumMismatchError
from streamfold.model.positions import STREAM_START, SeqNum, StreamPosition, Timestamp
from streamfold.model.records import SequencedRecord
from streamfold.wire.s2.errors import describe_failure
from streamfold.wire.s2.records_json import RecordFormat, encode_read_batch
from streamfold.wire.s2.sse import DONE, EVENT_END, EventId, batch_head, encode_error, encode_ping
from tests.records.reference import encode_records


def parse(raw: bytes) -> list[dict[str, str]]:
    """Events as a browser sees them: fields by name, dispatched at each blank line."""
    assert raw.endswith(b"\n\n")
    return [
        dict(line.split(": ", 1) for line in event.split("\n"))
        for event in raw.decode().removesuffix("\n\n").split("\n\n")
    ]


def test_a_batch_has_the_id_to_resume_from() -> None:
    record = SequencedRecord(SeqNum(41), Timestamp(9), (), b"two\nlines\r\nand \xe2\x80\xa8 more")
    batch = encode_read_batch(encode_records([record]), RecordFormat.RAW)
    raw = batch_head(EventId(41, 7, 300)) + batch + EVENT_END
    assert raw.startswith(b"event: batch\nid: 41,7,300\ndata: {")
    assert raw.count(b"\n") == 4
    assert b"\r" not in raw
    data = raw.split(b"data: ")[1]
    assert json.loads(data)["records"][0]["body"] == record.body.decode()


def test_a_ping_has_the_time_and_the_tail() -> None:
    [event] = parse(encode_ping(1_700_000_000_000, STREAM_START))
    assert event["event"] == "ping"
    assert "id" not in event
    assert json.loads(event["data"]) == {
        "timestamp": 1_700_000_000_000,
        "tail": {"seq_num": 0, "timestamp": 0},
    }


def test_a_failure_is_the_text_an_answer_would_have() -> None:
    assert encode_error(describe_failure(SeqNumMismatchError(0, 1))) == (
        b'event: error\ndata: {"seq_num_mismatch":1}\n\n'
    )
    [event] = parse(encode_error(describe_failure(InvalidError("line one\nline two"))))
    assert json.loads(event["data"]) == {"code": "invalid", "message": "line one\nline two"}


def test_a_session_that_ends_well_says_done_without_a_name() -> None:
    assert DONE == b"data: [DONE]\n\n"
    assert parse(DONE) == [{"data": "[DONE]"}]


def test_events_follow_one_another() -> None:
    tail = StreamPosition(SeqNum(1), Timestamp(2))
    raw = batch_head(EventId(0, 1, 8)) + b"{}" + EVENT_END + encode_ping(3, tail) + DONE
    assert [event.get("event") for event in parse(raw)] == ["batch", "ping", None]
