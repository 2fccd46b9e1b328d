"""Decoders of client input: bodies, frames, queries, headers and paths of both faces."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any

import zstandard

from streamfold._native import count_fields
from streamfold.errors import StreamfoldError
from streamfold.model import access_tokens, names
from streamfold.model.configs import TimestampMode
from streamfold.records.batch import AppendInput, parse_append_input
from streamfold.records.rules import Slot
from streamfold.server.durable_streams import paths, reads
from streamfold.server.durable_streams.subscriptions.webhooks import parse_webhook_url
from streamfold.server.http import cors
from streamfold.server.http.headers import parse_content_length
from streamfold.wire import compression, json_scan, text
from streamfold.wire.compression import Compression
from streamfold.wire.durable_streams import (
    content,
    headers,
    offsets,
    responses,
    snapshot_parts,
    state_protocol,
    subscriptions,
)
from streamfold.wire.s2 import account, records_json, resources, sse, urls
from streamfold.wire.s2 import headers as s2_headers
from streamfold.wire.s2.frames import FrameDecoder, encode_frame
from streamfold.wire.s2.records_json import RecordFormat
from tests.hostile.decoder import Decoder
from tests.records import reference

_DEEP = b"[" * 3_000 + b"]" * 3_000
_DEEP_OBJECT = b'{"a":' * 2_000 + b"1" + b"}" * 2_000
_NUMBERS = (b"0", b"1", b"-1", b"18446744073709551615", b"18446744073709551616", b"9" * 5_000)
_APPEND_JSON = (
    b'{"records":[{"body":"hello"}]}',
    b'{"records":[{"timestamp":1700000000000,"headers":[["a","b"],["",""]],"body":"\\u00e9\\ud83d\\ude00"},{}],'
    b'"match_seq_num":7,"fencing_token":"me"}',
    b'{"records":[{"headers":[["","fence"]],"body":"token"},{"headers":[["","trim"]],"body":"12345678"}]}',
    b'{"records":[{"headers":[["","dHJpbQ=="]],"body":"AAAAAAAAAAE="}]}',
    b'{"records":[{"body":"%b"}]}' % (b"x" * 3_000),
    b'{"records":[%b]}' % b",".join([b'{"body":"y","headers":[["k","v"]]}'] * 60),
    _DEEP,
)
_RECORD = b"\x0a\x0e\x08\x80\xd0\xdb\xc3\xf4\x2c\x12\x06\x0a\x01a\x12\x01b\x1a\x01x"
_APPEND_PROTO = (
    b"\x0a\x03\x1a\x01a",
    b"\x0a\x12\x08\x80\xd0\x95\xff\xbc\x31\x12\x06\x0a\x01a\x12\x01b\x1a\x01x\x0a\x03\x1a\x01y",
    b"\x0a\x03\x1a\x01a\x10\x07\x1a\x02me",
    b"\x0a\x12\x12\x06\x12\x04trim\x1a\x08\x00\x00\x00\x00\x00\x00\x00\x01",
    b"\x0a\x0e\x12\x07\x12\x05fence\x1a\x03tok",
    b"\x0a\x03\x1a\x01a" * 40,
    b"\x0a\x82\x02\x1a\xff\x01" + b"z" * 255,
    b"\x1a\x02me\x0a\x03\x1a\x01a",
    b"\x0a\x00",
    b"\x0b\x0a\x01a\x0c",
)
_SLOT = Slot(5, TimestampMode.CLIENT_PREFER, uncapped=False, now=1_700_000_000_001, floor=3)


def _proto_append(raw: bytes) -> None:
    """Native code and the reference must agree."""
    expected = _outcome(reference.parse_append_input, raw)
    found = _outcome(parse_append_input, raw)
    if expected != found:
        raise AssertionError(f"the reference says {expected!r}, native code {found!r}")
    count_fields(raw, 100)


def _outcome(parse: Callable[[bytes], AppendInput | None], raw: bytes) -> object:
    """What a parser makes of the bytes, in a form that can be compared."""
    try:
        parsed = parse(raw)
    except StreamfoldError:
        return "refused"
    if parsed is None:
        return None
    batch = parsed.batch
    payload = batch.sequence(_SLOT).payload
    where = parsed.match_seq_num, parsed.fencing_token
    return bytes(payload), batch.count, batch.metered, batch.commands, *where


def _json_append(record_format: RecordFormat) -> Callable[[bytes], object]:
    """The decoder for small bodies and the one that works in steps must agree."""
    steps = records_json._RAW_STEPS if record_format is RecordFormat.RAW else None

    def decode(body: bytes) -> None:
        light = _outcome(lambda raw: records_json.decode_append_body(raw, record_format), body)
        if steps is None or light is None:
            return
        try:
            taken, encoded = steps.decode(body)
        except StreamfoldError:
            return  # stricter about members that an append does not have
        count = len(taken.records or encoded)
        if light != "refused" and isinstance(light, tuple) and light[1] != count:
            raise AssertionError(f"{light[1]} records at once, {count} in steps")

    return decode


def _frames(data: bytes) -> None:
    """Frames do not depend on how their bytes are cut."""
    outcomes = set()
    for step in (1 + len(data), 7):
        decoder, frames = FrameDecoder(), []
        try:
            for at in range(0, len(data), step):
                decoder.feed(data[at : at + step])
                while (frame := decoder.next_frame()) is not None:
                    frames.append((frame.body, frame.terminal, frame.reconnect_advised))
                    if frame.terminal and len(frame.body) >= 2:
                        frame.failure()
            decoder.finish()
        except StreamfoldError as error:
            frames.append((str(error).encode(), False, False))
        outcomes.add(tuple(frames))
    if len(outcomes) > 1:
        raise AssertionError(f"frames depend on the pieces: {outcomes}")


def _json_value(raw: bytes) -> None:
    """`check_value` accepts what Python's own parser accepts, except what is nested too deep."""
    try:
        json_scan.check_value(raw)
    except StreamfoldError:
        return
    json.loads(raw)


def _text(function: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda raw: function(text.from_bytes(raw))


def _headers(
    function: Callable[[Callable[[str], str | None]], object],
) -> Callable[[bytes], object]:
    """For parsers of several headers: one `name: value` per line."""

    def decode(raw: bytes) -> object:
        values = {}
        for line in raw.split(b"\n"):
            name, _, value = line.partition(b":")
            values[text.from_bytes(name).strip().lower()] = text.from_bytes(value).strip()
        return function(values.get)

    return decode


def _each(*functions: Callable[[str], object]) -> Callable[[bytes], object]:
    """Several parsers of the same kind of text; the first byte chooses one."""

    def decode(raw: bytes) -> object:
        choice = functions[raw[0] % len(functions)] if raw else functions[0]
        return choice(text.from_bytes(raw[1:]))

    return decode


def _prefixed(count: int, *seeds: bytes) -> tuple[bytes, ...]:
    return tuple(bytes((number,)) + seed for number in range(count) for seed in seeds)


def _bodies(*functions: Callable[[bytes], object]) -> Callable[[bytes], object]:
    def decode(raw: bytes) -> object:
        choice = functions[raw[0] % len(functions)] if raw else functions[0]
        return choice(raw[1:])

    return decode


_STREAM_CONFIG: dict[str, Any] = {
    "storage_class": "express",
    "retention_policy": {"age": 86400},
    "timestamping": {"mode": "client-prefer", "uncapped": True},
    "delete_on_empty": {"min_age_secs": 60},
}
_RESOURCES = tuple(
    json.dumps(value).encode()
    for value in (
        _STREAM_CONFIG,
        _STREAM_CONFIG | {"retention_policy": {"infinite": {}}},
        {"basin": "test-basin", "config": {"default_stream_config": _STREAM_CONFIG}},
        {"stream": "orders", "config": _STREAM_CONFIG},
        {"streams": ["orders", "a/b", ""]},
        {"config": {"create_stream_on_append": True, "stream_cipher": "aegis-256"}},
        {
            "id": "token",
            "expires_at": "2040-01-01T00:00:00Z",
            "auto_prefix_streams": True,
            "scope": {
                "basins": {"prefix": "test-"},
                "streams": {"exact": "orders"},
                "ops": ["read", "append"],
                "op_groups": {"stream": {"read": True, "write": False}},
            },
        },
        "aws:us-east-1",
        {"retention_policy": None, "timestamping": None},
        {"id": "t", "scope": {}, "expires_at": "0001-01-01T00:00:00+23:59"},
    )
)
_SUBSCRIPTIONS = tuple(
    json.dumps(value).encode()
    for value in (
        {"type": "webhook", "pattern": "a/*/**", "webhook": {"url": "https://example.com/x"}},
        {"type": "pull-wake", "streams": ["a", "b/c"], "wake_stream": "w", "lease_ttl_ms": 5000},
        {"streams": ["a", "b"]},
        {"worker": "w"},
        {"wake_id": "w", "generation": 1, "done": True, "acks": [{"stream": "a", "offset": "-1"}]},
        {"wake_id": "w", "generation": 3},
        {"done": False},
        ["part-1", "part-2"],
    )
)
_QUERIES = (
    b"seq_num=0&count=10&bytes=1000&until=1700000000000&wait=5&clamp=true",
    b"timestamp=1700000000000", b"tail_offset=5", b"prefix=a&start_after=b&limit=10",
    b"set=storage&start=0&end=3600&interval=hour", b"set=append-ops&interval=minute",
    b"offset=-1&live=sse&cursor=5", b"offset=now&live=long-poll",
    b"offset=0000000000000007_0000000000000000", b"%FF=%00&&=&a", b"limit=" + b"9" * 5_000,
    b"seq_num=%2B1&seq_num=1", b"prefix=%ED%A0%80",
)  # fmt: skip
_NAMES = (
    b"test-basin", b"orders", b"a%2Fb", b"%FF", b"%", b"%00", b"%C3%A9", b"\xc3\xa9", b"..",
    b"x" * 600,
    b"a/b/c", b"__ds/subscriptions/x", b"v1/stream/a/snapshot/0000000000000001_0000000000000000",
    b"test-basin/orders/snapshot/5", b"v1/stream/a%2Fb/retention/1", b"bucket/streams", b"bucket",
)  # fmt: skip
_DURABLE_HEADERS = (
    b"content-type: application/json; charset=utf-8\nstream-ttl: 60\nstream-closed: true",
    b"stream-expires-at: 2040-01-01T00:00:00Z\ncontent-type: text/plain",
    b"stream-expires-at: 9999-12-31T23:59:59-23:59",
    b"producer-id: p\nproducer-epoch: 1\nproducer-seq: 7\nstream-seq: a",
    b"stream-forked-from: /v1/stream/a\nstream-fork-offset: 0000000000000001_0000000000000000\n"
    b"stream-fork-sub-offset: 1",
    b"stream-trim-on-snapshot: true\nstream-snapshot-match: *\nstream-snapshot-parts: 3",
    b"stream-parts-commit: 3\nstream-snapshot-digest: aa",
    b"producer-id: \xff\nproducer-epoch: " + b"9" * 5_000,
)  # fmt: skip
_S2_HEADERS = (
    b"test-basin", b"raw", b"base64", b"token", b"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",
    b'{"retention_policy":{"age":60}}', b"gzip, zstd;q=0.5, *;q=0", b"zstd", b"0,1,2",
    b"application/json; charset=utf-8", b"s2s/proto", b"text/event-stream, */*;q=0.1", b"\xff",
    b"q=" * 500,
)  # fmt: skip
_MESSAGES = (
    b"1",
    b'"a"',
    b'[1,"a",{"b":[]},null]',
    b"[]",
    b"[[1],[2]]",
    b'{"a":1.5e300}',
    b" [ 1 , 2 ] ",
    _DEEP,
)
_LIMITS = json_scan.Limits(elements=1_000, element_bytes=1 << 20)


def client_decoders() -> Iterator[Decoder]:
    """Every decoder of bytes that a client chooses."""
    yield Decoder("s2 append, protobuf", _proto_append, _APPEND_PROTO)
    for form in RecordFormat:
        yield Decoder(f"s2 append, JSON {form}", _json_append(form), _APPEND_JSON)
    frames = tuple(encode_frame(body) for body in _APPEND_PROTO)
    packed = tuple(
        len(body).to_bytes(3, "big") + body
        for body in (
            b"\x20" + zstandard.compress(b"\x0a\x03\x1a\x01a" * 50),
            b"\x40" + gzip.compress(b"\x0a\x03\x1a\x01a" * 50, mtime=0),
            b"\x80\x01\xf4{}",
            b"\x60x",
        )
    )
    yield Decoder("s2 session frames", _frames, (*frames, *packed, b"".join(frames)))
    yield Decoder(
        "compressed bodies",
        _bodies(*(
            lambda raw, kind=kind: compression.decompress(raw, kind, 1 << 16) for kind in Compression
        )),
        _prefixed(3, gzip.compress(b"abc" * 500, mtime=0), zstandard.compress(b"abc" * 500),
                  gzip.compress(b"a", mtime=0) + gzip.compress(b"b", mtime=0),
                  gzip.compress(bytes(1 << 20), mtime=0)),
    )  # fmt: skip
    bodies = (
        resources.decode_stream_config, resources.decode_stream_reconfiguration,
        resources.decode_basin_reconfiguration, resources.decode_create_basin,
        resources.decode_ensure_basin, resources.decode_create_stream,
        account.decode_issue_access_token, account.decode_default_location,
        records_json.decode_tails_input,
    )  # fmt: skip
    yield Decoder(
        "s2 resources",
        _bodies(*bodies),
        _prefixed(len(bodies), *_RESOURCES, _DEEP_OBJECT, b'"\\ud800"'),
    )
    queries = (
        urls.parse_read_query, urls.parse_basin_list_query, urls.parse_stream_list_query,
        urls.parse_token_list_query, urls.parse_fork_list_query, urls.parse_producer_list_query,
        urls.parse_metrics_query, reads.parse_query,
    )  # fmt: skip
    yield Decoder("queries", _each(*queries), _prefixed(len(queries), *_QUERIES))
    segments = (
        urls.parse_basin, urls.parse_new_basin, urls.parse_stream, urls.parse_token_id,
        subscriptions.parse_id, subscriptions.parse_path, subscriptions.decode_name,
        names.parse_bucket_name, names.parse_stream_prefix, names.parse_basin_prefix,
        access_tokens.parse_token_id_prefix,
        lambda path: paths.parse_stream_path((f"/{path}", names.parse_bucket_name("durable-streams"))),
        lambda path: paths.parse_bucket(f"/{path}"), cors.parse_origin,
        lambda url: parse_webhook_url(url, local=False), lambda url: parse_webhook_url(url, local=True),
        subscriptions.Pattern,
    )  # fmt: skip
    urls_ = (
        b"https://a.example:99/x?y#z",
        b"http://[::1]:80/",
        b"https://\xff@x:1e9/",
        b"a/*/**/b",
    )
    yield Decoder("names and paths", _each(*segments), _prefixed(len(segments), *_NAMES, *urls_))
    values: tuple[Callable[[str], object], ...] = (
        s2_headers.parse_basin, s2_headers.parse_format, s2_headers.parse_request_token,
        s2_headers.parse_encryption_key, s2_headers.parse_stream_config,
        s2_headers.parse_accept_encoding, s2_headers.parse_content_encoding,
        lambda value: s2_headers.negotiate_append(*value.partition("|")[::2]),
        lambda value: s2_headers.negotiate_read(*value.partition("|")[::2]),
        s2_headers.require_json, sse.EventId.parse,
        lambda value: parse_content_length(text.to_bytes(value)),
        lambda value: responses.matches(value, '"1-2-3"'),
        lambda value: responses.next_cursor(value, 1_700_000_000_000, lambda low, high: low),
    )  # fmt: skip
    yield Decoder("s2 headers", _each(*values), _prefixed(len(values), *_S2_HEADERS, *_NUMBERS))
    parsers = (
        headers.parse_create, headers.parse_append, headers.parse_producer, headers.parse_closed,
        headers.parse_trim_on_snapshot, snapshot_parts.parse_parts_commit,
    )  # fmt: skip
    for parser in parsers:
        yield Decoder(f"durable headers, {parser.__name__}", _headers(parser), _DURABLE_HEADERS)
    positions = (offsets.parse_offset, offsets.parse_position, headers.parse_ttl,
                 headers.parse_expires_at,
                 content.normalise_content_type, content.parse_stream_type)  # fmt: skip
    tokens = (b"0000000000000007_0000000000000000", b"-1", b"now", b"2040-01-01T00:00:00.5+23:59")
    yield Decoder(
        "offsets and times", _each(*positions), _prefixed(len(positions), *tokens, *_NUMBERS)
    )
    yield Decoder("JSON values", _json_value, _MESSAGES)
    pieces = (
        lambda raw: content.split_messages(raw, _LIMITS, allow_empty=True),
        lambda raw: content.split_messages(raw, _LIMITS, allow_empty=False),
        content.check_message,
        lambda raw: json_scan.split_json(raw, _LIMITS, block=7),
        lambda raw: json_scan.lay_out(raw, b"{}", 50, block=5),
        lambda raw: state_protocol.stamp([(1, raw)]),
        lambda raw: json_scan.check_nesting(raw, 3),
    )  # fmt: skip
    messages = (*_MESSAGES, b'{"type":"a","key":"b","value":1,"headers":{"operation":"insert"}}')
    yield Decoder("JSON messages", _bodies(*pieces), _prefixed(len(pieces), *messages), weight=0.4)
    asked = (
        subscriptions.decode_subscription, subscriptions.decode_streams, subscriptions.decode_claim,
        subscriptions.decode_ack, subscriptions.decode_release, subscriptions.decode_webhook_reply,
        lambda raw: snapshot_parts.parse_manifest(raw, 2),
    )  # fmt: skip
    yield Decoder(
        "subscription bodies", _bodies(*asked), _prefixed(len(asked), *_SUBSCRIPTIONS, _DEEP_OBJECT)
    )
