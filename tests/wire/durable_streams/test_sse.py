"""Live events, read back by the rules of the event-stream format."""

from __future__ import annotations

import base64
import json
import re

import pytest
from durable_streams._sse import SSEControlEvent, SSEDataEvent, SSEParser
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.wire.durable_streams.offsets import format_offset
from streamfold.wire.durable_streams.responses import base64_event, control_event, data_event

repeatable = settings(derandomize=True, deadline=None, max_examples=300)

pieces = ["\r", "\n", "\r\n", " ", ":", "data", "event", "id", "retry", "\ufeff", "\0", "é"]
hostile = st.lists(st.sampled_from(pieces)).map("".join) | st.text()

CONTROL = control_event(format_offset(1), "7", True, False)


def parse(raw: bytes) -> list[tuple[str, str]]:
    """Events as a browser dispatches them: their type and data."""
    events, kind, data = [], "message", list[str]()
    for line in re.split("\r\n|\r|\n", raw.decode()):
        if not line:
            if data:
                events.append((kind, "\n".join(data)))
            kind, data = "message", []
        elif not line.startswith(":"):
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                kind = value
            elif field == "data":
                data.append(value)
    return events


def as_lines(text: str) -> str:
    return re.sub("\r\n|\r", "\n", text)


def test_the_bytes_are_the_ones_that_the_conformance_suite_looks_for() -> None:
    assert data_event(b'[{"n":1},{"n":2}]') == b'event: data\ndata:[{"n":1},{"n":2}]\n\n'
    assert data_event(b"line1\nline2") == b"event: data\ndata:line1\ndata:line2\n\n"
    assert control_event(format_offset(42), "3300000", True, False) == (
        b'event: control\ndata:{"streamNextOffset":"0000000000000042_0000000000000000",'
        b'"streamCursor":"3300000","upToDate":true}\n\n'
    )


@pytest.mark.parametrize(
    ("cursor", "up_to_date", "closed", "members"),
    [
        ("7", False, False, {"streamCursor": "7"}),
        (None, True, False, {"upToDate": True}),
        ("7", True, True, {"upToDate": True, "streamClosed": True}),
        (None, False, True, {"streamClosed": True}),
    ],
)
def test_a_control_event_says_only_what_holds(
    cursor: str | None, up_to_date: bool, closed: bool, members: dict[str, object]
) -> None:
    [(kind, data)] = parse(control_event(format_offset(9), cursor, up_to_date, closed))
    assert kind == "control"
    assert json.loads(data) == {"streamNextOffset": format_offset(9), **members}


@repeatable
@given(hostile)
def test_text_comes_back_as_one_event_whatever_is_in_it(text: str) -> None:
    raw = data_event(text.encode(errors="replace")) + CONTROL
    expected = as_lines(text.encode(errors="replace").decode())
    (kind, data), control = parse(raw)
    assert (kind, data) == ("data", expected)
    assert control[0] == "control"


@repeatable
@given(hostile)
def test_the_python_client_reads_the_same_text(text: str) -> None:
    payload = text.encode(errors="replace")
    data, control = SSEParser().feed((data_event(payload) + CONTROL).decode())
    assert isinstance(data, SSEDataEvent)
    assert data.data == as_lines(payload.decode())
    assert isinstance(control, SSEControlEvent)
    assert control.stream_next_offset == format_offset(1)


@pytest.mark.parametrize("line_break", ["\r\n", "\n", "\r"])
@pytest.mark.parametrize(
    "injected",
    [
        'x{0}{0}event: control{0}data:{{"streamNextOffset":"evil"}}{0}{0}',
        "{0}event: control{0}data: evil{0}{0}",
        "{0}{0}id: 1{0}retry: 0{0}{0}",
        "x{0}:comment{0}",
        "{0}",
        "{0}{0}{0}",
    ],
)
def test_a_payload_cannot_become_an_event(injected: str, line_break: str) -> None:
    payload = injected.format(line_break)
    raw = data_event(payload.encode()) + CONTROL
    assert [kind for kind, _ in parse(raw)] == ["data", "control"]
    assert parse(raw)[0][1] == as_lines(payload)
    assert len(re.findall(rb"^event: control", raw, re.MULTILINE)) == 1
    assert b"\r" not in raw


@pytest.mark.parametrize("text", ["", " ", "  two", " one\n two\r\n  three", "\n x"])
def test_spaces_at_the_start_of_lines_are_kept(text: str) -> None:
    assert parse(data_event(text.encode())) == [("data", as_lines(text))]


@repeatable
@given(st.binary())
def test_bytes_come_back_as_they_were(payload: bytes) -> None:
    [(kind, data)] = parse(base64_event(payload))
    assert kind == "data"
    assert len(data.replace("\n", "")) % 4 == 0
    assert base64.b64decode(data, validate=True) == payload


def test_an_empty_payload_is_an_empty_string() -> None:
    assert base64_event(b"") == b"event: data\ndata:\n\n"
    assert data_event(b"") == b"event: data\ndata:\n\n"
