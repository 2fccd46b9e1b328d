"""State Protocol messages get their offset, and other messages stay unchanged."""

from __future__ import annotations

import pytest

from streamfold.wire.durable_streams.offsets import format_offset
from streamfold.wire.durable_streams.state_protocol import STAMP_BYTES, stamp

OTHERS = [
    b"1",
    b'"headers"',
    b'["headers",{"operation":"insert"}]',
    b"{}",
    b'{"headers":null}',
    b'{"headers":"operation"}',
    b'{"headers":[{"operation":"insert"}]}',
    b'{"headers":{}}',
    b'{"headers":{"operation":1,"control":null}}',
    b'{"value":{"headers":{"operation":"insert"}}}',
    b'{"text":"\\"headers\\":{\\"operation\\":\\"insert\\"}"}',
    b'{"\\ud800":1,"headers":{"operation":"insert"}}',
]


def stamped(message: bytes, seq_num: int = 4) -> bytes:
    [stamped] = stamp([(seq_num, message)])
    return stamped


@pytest.mark.parametrize("message", OTHERS)
def test_other_messages_keep_every_byte(message: bytes) -> None:
    assert stamped(message) == message


@pytest.mark.parametrize("kind", ["operation", "control"])
def test_changes_and_control_messages_get_the_offset_behind_them(kind: str) -> None:
    message = b'{"type":"user","key":"a","value":{"n":1.50e3},"headers":{"%b":"x","txid":"t"}}'
    expected = message[:-2] % kind.encode() + b',"offset":"%b"}}' % format_offset(5).encode()
    assert stamped(message % kind.encode()) == expected
    assert len(expected) - len(message % kind.encode()) == STAMP_BYTES


def test_values_keep_the_writers_text() -> None:
    value = b'{"n":12345678901234567890.10,"e":1E400,"s":"\\u00e9\\/","d":1,"d":2}'
    message = b'{"value":%b,"headers":{"operation":"update"}}' % value
    assert value in stamped(message)


@pytest.mark.parametrize("earlier", [b'"elsewhere"', b"null", b'"reset"', b'{"offset":"reset"}'])
def test_an_offset_that_the_writer_sent_is_replaced(earlier: bytes) -> None:
    # As by the reference server: it may come from the stream that the message was copied from.
    message = b'{"headers":{"control":"reset","offset":%b,"x":%b},"more":1}'
    expected = message % (b'"%b"' % format_offset(5).encode(), earlier)
    assert stamped(message % (earlier, earlier)) == expected


@pytest.mark.parametrize(
    "around",
    [
        b'{"value":{"headers":{"operation":"x"}},"headers":{"operation":"x"%b}}',
        b'{"headers":{"operation":"x"%b},"value":{"operation":"x"}}',
        b'{"headers":{"operation":"y"},"headers":{"operation":"x"%b}}',
        b'{ "headers" : {"operation":"x" %b} , "a" : 1 }',
        b'{"text":"{\\"operation\\":\\"x\\"}","headers":{"operation":"x"%b},"e\\u0301":1}',
    ],
)
def test_the_headers_of_the_message_itself_get_it_and_nothing_else_changes(around: bytes) -> None:
    assert stamped(around % b"") == around % (b',"offset":"%b"' % format_offset(5).encode())
