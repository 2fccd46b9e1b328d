"""Requests that are as expensive to look at as their size allows, of every kind that there is."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import zstandard

from tests.server.conftest import BASIN, STREAM

RECORDS = f"/v1/streams/{STREAM}/records"
SUBSCRIPTION = "/v1/stream/__ds/subscriptions/lag"

S2 = {"s2-basin": BASIN}
S2_JSON = S2 | {"content-type": "application/json"}
S2_BASE64 = S2_JSON | {"s2-format": "base64"}
S2_PROTO = S2 | {"content-type": "application/protobuf"}
S2_SESSION = S2 | {"content-type": "s2s/proto"}
EVENTS = {"accept": "text/event-stream"}
JSON = {"content-type": "application/json"}
BYTES = {"content-type": "application/octet-stream"}
TEXT = {"content-type": "text/plain"}

#: What there must be before the attacks: a stream of each kind.
STREAMS = (("/v1/stream/json", JSON), ("/v1/stream/bytes", BYTES), ("/v1/stream/text", TEXT))


class Attack(NamedTuple):
    name: str
    method: str
    path: str
    headers: Mapping[str, str] = MappingProxyType({})
    body: bytes | None = None
    #: Bytes of an answer that does not end.
    taken: int | None = None


def attacks(size: int) -> Iterator[Attack]:
    """Attacks with bodies of about `size` bytes, or as many as are taken."""
    yield from _json_appends(size)
    yield from _other_appends(size)
    yield from _durable_reads()
    yield from _s2_json(min(size, 4_190_000))
    yield from _s2_protobuf(min(size, 4_190_000))
    yield from _s2_sessions(min(size, 2_000_000))
    yield from _s2_reads()
    yield from _many_headers(min(size, 4_190_000))
    yield from _heads(30_000)
    yield from _subscriptions(min(size, 1_000_000))


def _json_appends(size: int) -> Iterator[Attack]:
    nested = b'{"a":[1,2,3,{"b":"c"}]}'
    for name, body in (
        ("commas and an open string", b"," * 100_000 + b'"' + b'\\"' * (size // 2)),
        ("too many numbers", _array([b"1"] * (size // 2))),
        ("as many numbers as may be", _array([b"1"] * 99_999)),
        ("many objects", _array([nested] * min(size // 24, 99_999))),
        ("one large object", b'{"a":' + _array([nested] * (size // 24)) + b"}"),
        ("large strings", _array([b'"%b"' % (b"x" * 1_000_000)] * max(1, size // 1_000_020))),
        ("escapes", b'["' + b'\\"' * (min(size, 1_000_000) // 2) + b'"]'),
        ("escapes of letters", b'["' + b"\\u0041" * (min(size, 1_000_000) // 6) + b'"]'),
        ("escapes, all over", b'["' + b"\\u0041" * (size // 6) + b'"]'),
        ("not ASCII", _array(['"é"'.encode()] * min(size // 5, 99_999))),
        ("whitespace", b"[" + b" \n" * (size // 2) + b"1]"),
        ("brackets", b"[" * size),
        ("backslashes", b'"' + b"\\" * size),
    ):
        yield Attack(f"append JSON: {name}", "POST", "/v1/stream/json", JSON, body)
    first = _array([nested] * min(size // 24, 99_999))
    yield Attack("create with JSON", "PUT", "/v1/stream/created", JSON, first)


def _other_appends(size: int) -> Iterator[Attack]:
    yield Attack("append bytes", "POST", "/v1/stream/bytes", BYTES, b"x" * size)
    yield Attack("append lines", "POST", "/v1/stream/text", TEXT, b"\n" * size)
    yield Attack("publish a snapshot", "PUT", "/v1/stream/json/snapshot/1", BYTES, b"x" * size)


def _durable_reads() -> Iterator[Attack]:
    for name in ("json", "bytes", "text"):
        path = f"/v1/stream/{name}"
        yield Attack(f"read {name}", "GET", path)
        yield Attack(f"read {name}, compressed", "GET", path, {"accept-encoding": "gzip"})
        yield Attack(f"bootstrap {name}", "GET", f"{path}/bootstrap")
        live = f"{path}?offset=-1&live=sse"
        yield Attack(f"follow {name}", "GET", live, EVENTS, taken=1_000_000)


def _s2_json(size: int) -> Iterator[Attack]:
    batch = json.dumps({"records": [{"body": "x" * 900, "headers": [["a", "b"]]}] * 1000}).encode()
    packed = base64.b64encode(b"x" * 600).decode()
    safe = json.dumps({"records": [{"body": packed}] * 1000}).encode()
    empty = b'{"records":' + _array([b"{}"] * (size // 3)) + b"}"
    headers = b'{"records":[{"headers":' + _array([b'["a",""]'] * (size // 9)) + b"}]}"
    letters = b'{"records":[{"body":"%b"}]}' % (b"\\u0041" * (size // 6 - 10))
    for name, head, body in (
        ("a full batch", S2_JSON, batch),
        ("a full batch in base64", S2_BASE64, safe),
        ("empty records", S2_JSON, empty),
        ("headers", S2_JSON, headers),
        ("headers in base64", S2_BASE64, headers),
        ("escapes of letters", S2_JSON, letters),
        (
            "escapes beyond ASCII",
            S2_JSON,
            b'{"records":[{"body":"%b"}]}' % (b"\\u00e9" * (size // 6)),
        ),
        ("an unknown member", S2_JSON, b'{"x":' + _array([b"[]"] * (size // 3)) + b"}"),
        ("brackets", S2_JSON, b'{"records":' + b"[" * size),
        ("digits", S2_JSON, b'{"records":[{}],"match_seq_num":' + b"1" * size + b"}"),
        ("gzip", S2_JSON | {"content-encoding": "gzip"}, gzip.compress(empty)),
        ("zstd", S2_JSON | {"content-encoding": "zstd"}, zstandard.compress(empty)),
        ("a bomb", S2_JSON | {"content-encoding": "gzip"}, gzip.compress(b" " * (64 << 20))),
        ("tiny blocks", S2_JSON | {"content-encoding": "zstd"}, _tiny_blocks(size)),
    ):
        yield Attack(f"append by S2 JSON: {name}", "POST", RECORDS, head, body)
    large = b'{"basin":"' + b"x" * size + b'"}'
    for path in ("/v1/basins", "/v1/streams", "/v1/access-tokens"):
        yield Attack(f"POST {path}", "POST", path, S2_JSON, large[:60_000])


def _s2_protobuf(size: int) -> Iterator[Attack]:
    for name, body in _messages(size):
        yield Attack(f"append by protobuf: {name}", "POST", RECORDS, S2_PROTO, body)


def _s2_sessions(size: int) -> Iterator[Attack]:
    for name, body in _messages(size):
        yield Attack(f"session: {name}", "POST", RECORDS, S2_SESSION, _frame(0, body))
    blocks = _tiny_blocks(size)
    yield Attack("session: tiny blocks", "POST", RECORDS, S2_SESSION, _frame(0x20, blocks))
    packed = gzip.compress(b"\x20\x00" * (size // 2))
    yield Attack("session: gzip", "POST", RECORDS, S2_SESSION, _frame(0x40, packed))


def _messages(size: int) -> Iterator[tuple[str, bytes]]:
    yield "empty records", b"\x0a\x00" * (size // 2)
    yield "unknown fields", b"\x20\x00" * (size // 2)
    yield "groups", b"\x23\x24" * (size // 2)
    yield "nameless headers", delimited(b"\x12\x00" * (size // 2))
    yield "unknown fields of a record", delimited(b"\x20\x00" * (size // 2))
    header = b"\x12" + delimited(b"a")[1:].replace(b"\x01a", b"\x03\x0a\x01a")
    yield "headers", delimited(header * min(size // len(header), 340_000))


def _s2_reads() -> Iterator[Attack]:
    path = f"{RECORDS}?seq_num=0"
    for name, head in (
        ("JSON", S2),
        ("base64", S2_BASE64),
        ("compressed", S2 | {"accept-encoding": "gzip"}),
        ("protobuf", S2 | {"accept": "application/protobuf"}),
    ):
        yield Attack(f"read by S2: {name}", "GET", path, head)
    for name, streams in (
        ("missing", [f"none-{n}" for n in range(1_000)]),
        ("long", ["é" * 12] * 800),
        ("too many", [""] * 20_000),
    ):
        body = json.dumps({"streams": streams}, separators=(",", ":")).encode()
        yield Attack(f"tails by S2: {name}", "POST", "/v1/tails", S2_JSON, body)
    yield Attack("follow by S2: events", "GET", path, S2 | EVENTS, taken=100_000)
    compressed = S2_SESSION | {"accept-encoding": "zstd"}
    yield Attack("follow by S2: frames", "GET", path, compressed, taken=1_000)


def _many_headers(size: int) -> Iterator[Attack]:
    """Records with as many headers as a batch may have, into a stream of their own, and out of it."""
    path = "/v1/streams/headers/records"
    count = min(340_000, size // 12)  # each is metered as three bytes, and a batch may have 1 MiB
    texts = b'{"records":[{"headers":' + _array([b'["a",""]'] * count) + b"}]}"
    spread = _array([b'{"headers":' + _array([b'["a",""]'] * (count // 1000)) + b"}"] * 1000)
    safe = b'{"records":[{"headers":' + _array([b'["YQ==",""]'] * count) + b"}]}"
    message = delimited(b"\x12\x03\x0a\x01a" * count)
    yield Attack("create for headers", "POST", "/v1/streams", S2_JSON, b'{"stream":"headers"}')
    yield Attack("headers: JSON", "POST", path, S2_JSON, texts)
    yield Attack("headers: JSON, spread", "POST", path, S2_JSON, b'{"records":%b}' % spread)
    yield Attack("headers: base64", "POST", path, S2_BASE64, safe)
    yield Attack("headers: protobuf", "POST", path, S2_PROTO, message)
    yield Attack("headers: reversed", "POST", path, S2_PROTO, message + b"\x20\x00")
    yield Attack("headers: session", "POST", path, S2_SESSION, _frame(0, message))
    reads = f"{path}?seq_num=0"
    yield Attack("headers: read JSON", "GET", reads, S2)
    yield Attack("headers: read base64", "GET", reads, S2_BASE64)
    yield Attack("headers: read protobuf", "GET", reads, S2 | {"accept": "application/protobuf"})
    yield Attack("headers: events", "GET", reads, S2 | EVENTS, taken=100_000)
    yield Attack("headers: frames", "GET", reads, S2_SESSION, taken=10_000)
    packed = S2_SESSION | {"accept-encoding": "gzip"}
    yield Attack("headers: frames, compressed", "GET", reads, packed, taken=1_000)


def _heads(size: int) -> Iterator[Attack]:
    yield Attack("parameters", "GET", "/v1/basins?" + "a&" * (size // 2))
    yield Attack("parameters of a stream", "GET", "/v1/stream/json?" + "a&" * (size // 2))
    yield Attack("segments", "GET", "/v1/stream/" + "a/" * (size // 2))
    yield Attack("escapes", "GET", "/v1/stream/" + "%41" * (size // 3))
    for name, value in (
        ("accept-encoding", "," * size),
        ("if-none-match", '"' * size),
        ("accept", "a/b;q=1," * (size // 8)),
        ("authorization", "Bearer " + "x" * size),
        ("stream-seq", "0" * size),
        ("producer-epoch", "0" * size),
    ):
        yield Attack(f"header {name}", "HEAD", "/v1/stream/json", {name: value})


def _subscriptions(size: int) -> Iterator[Attack]:
    wake = {"type": "pull-wake", "wake_stream": "text"}
    many = json.dumps(wake | {"streams": [f"s{n}" for n in range(2_000)]}).encode()
    same = json.dumps(wake | {"streams": ["a"] * (size // 6)}).encode()
    globs = json.dumps(wake | {"pattern": "**/a/" * 200 + "**"}).encode()
    yield Attack("subscribe to many streams", "PUT", SUBSCRIPTION, JSON, many)
    yield Attack("subscribe to the same stream", "PUT", f"{SUBSCRIPTION}2", JSON, same)
    yield Attack("subscribe by a pattern", "PUT", f"{SUBSCRIPTION}3", JSON, globs)
    yield Attack("look at a subscription", "GET", SUBSCRIPTION)
    acks = [{"stream": "s1", "offset": "0"}] * (size // 40)
    ack = json.dumps({"wake_id": "w", "generation": 1, "acks": acks}).encode()
    token = JSON | {"authorization": "Bearer x"}
    yield Attack("acknowledge", "POST", f"{SUBSCRIPTION}/ack", token, ack)


def _array(elements: list[bytes]) -> bytes:
    return b"[%b]" % b",".join(elements)


def varint(number: int) -> bytes:
    found = b""
    while number >= 0x80:
        found += bytes((number & 0x7F | 0x80,))
        number >>= 7
    return found + bytes((number,))


def delimited(content: bytes) -> bytes:
    """A record of an AppendInput."""
    return b"\x0a" + varint(len(content)) + content


def _frame(flag: int, body: bytes) -> bytes:
    return (1 + len(body)).to_bytes(3, "big") + bytes((flag,)) + body


def _tiny_blocks(size: int) -> bytes:
    """A zstd frame of blocks that hold one byte each."""
    block = b"\x0a\x00\x00 "
    return b"\x28\xb5\x2f\xfd\x00\x58" + block * (size // 4 - 4) + b"\x0b\x00\x00 "
