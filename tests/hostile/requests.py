"""Requests for every route, valid and spoiled, from a seed.

A request begins as an example of its route and is spoiled in up to four places: method, path, query,
headers, body. The rest is spoiled as bytes, and need not be HTTP at all.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import zstandard

from streamfold.server.http.router import Route
from streamfold.wire.s2.frames import encode_frame
from tests.hostile.mutation import Mutator
from tests.server.conftest import BASIN, STREAM

METHODS = (
    b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE", b"CONNECT",
    b"BREW",
    b"get", b"PROPFIND",
)  # fmt: skip
#: Targets in forms other than a path, and paths that no route has.
TARGETS = (
    b"*", b"test:80", b"http://test/v1/basins", b"http://test", b"http://test?limit=1", b"?",
    b"?limit=x", b"HTTP://A/a/b", b"http://[::1]:1/a", b"/", b"//", b"/v1", b"/v1/", b"/./..",
    b"/v1/stream/",
    b"/v1/streams/", b"/console/../../etc/passwd", b"/console/%2e%2e/x", b"/a/b/c/d/e",
)  # fmt: skip
#: Names that exist, are new, or are none.
NAMES = (
    *(BASIN.encode(), STREAM.encode(), b"json", b"bytes", b"text") * 3, b"known", b"a%2Fb",
    b"%FF", b"%", b"%4",
    b"%zz", b"%00", b"%0d%0a", b"%C3%A9", b"%ED%A0%80", b"..", b".", b"%2e%2e", b"x" * 600, b"",
    b"snapshot",
    b"streams", b"__ds", b"$", b"a;b", b"a:b", b"~",
)  # fmt: skip
NUMBERS = (
    *(b"0", b"1", b"5", b"0000000000000000_0000000000000000",
    b"0000000000000001_0000000000000000") * 2,
    b"00", b"-1", b"+1", b"1_0", b"1e3", b"0x1", b"1.5", b"", b"%20", b"now", b"%D9%A1",
    b"9007199254740992",
    b"9223372036854775808", b"18446744073709551615", b"18446744073709551616", b"9" * 30,
    b"1" * 5_000,
    b"0" * 5_000 + b"1", b"9999999999999999_9999999999999999", b"nan", b"null",
)  # fmt: skip
PARAMETERS = (
    b"prefix", b"start_after", b"after", b"limit", b"seq_num", b"timestamp", b"tail_offset",
    b"clamp",
    b"count", b"bytes", b"until", b"wait", b"set", b"start", b"end", b"interval", b"offset",
    b"live",
    b"cursor", b"%FF", b"",
)  # fmt: skip
WORDS = (
    b"true",
    b"false",
    b"sse",
    b"long-poll",
    b"storage",
    b"append-ops",
    b"minute",
    b"hour",
    b"0",
)
#: In values of headers; CR, LF and NUL cannot get there.
VALUES = (
    b"\xff", b"a\xff", b"\xc3\xa9", b"\xed\xa0\x80", b"\x80\x81", b"\t", b"", b"a" * 5_000, b"%FF",
    b"%0d%0a", b"/b/\xff", b"/v1/stream/\xff", b"/v1/stream/%FF", b"/v1/stream/bytes", b"true",
    b"*", b'"',
    b"Bearer \xff", b"application/json", b"text/plain; charset=\xff", b"2040-01-01T00:00:00Z",
    b"0001-01-01T00:00:00+23:59", b"9999-12-31T23:59:59-23:59", b"gzip", b"zstd", b"1,2,3",
    b"text/event-stream",
    b"s2s/proto", b"bytes=0-1", b"100-continue", b"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",
)  # fmt: skip
HEADERS = (
    b"s2-basin", b"s2-format", b"s2-request-token", b"s2-encryption-key", b"s2-stream-config",
    b"last-event-id", b"content-type", b"accept", b"accept-encoding", b"content-encoding",
    b"authorization", b"origin", b"access-control-request-method",
    b"access-control-request-headers",
    b"stream-ttl", b"stream-expires-at", b"stream-closed", b"stream-seq", b"producer-id",
    b"producer-epoch", b"producer-seq", b"stream-forked-from", b"stream-fork-offset",
    b"stream-fork-sub-offset", b"stream-trim-on-snapshot", b"stream-snapshot-match",
    b"stream-snapshot-digest",
    b"stream-parts-commit", b"if-none-match", b"expect", b"x-forwarded-for", b"range", b"cookie",
)  # fmt: skip
HOSTS = (
    *(b"127.0.0.1",) * 60, b"a\xff", b"", b"[::1]:80", b"a b", b"a/b", b"\xc3\xa9", b"a:b",
    b"a:80:80",
)  # fmt: skip
CONTENT_TYPES = (
    *(b"application/json",) * 4, b"application/protobuf", b"s2s/proto",
    b"application/octet-stream", b"text/plain",
    b"multipart/mixed; boundary=x",
)  # fmt: skip
#: Members of bodies, for objects that are almost right.
MEMBERS = (
    "basin", "stream", "config", "location", "records", "body", "headers", "timestamp", "id", "scope",
    "match_seq_num", "fencing_token", "retention_policy", "age", "infinite", "timestamping", "mode",
    "uncapped", "delete_on_empty", "min_age_secs", "storage_class", "default_stream_config",
    "stream_cipher", "create_stream_on_append", "expires_at", "auto_prefix_streams", "ops", "exact",
    "basins", "streams", "op_groups", "prefix", "type", "pattern", "webhook", "url", "wake_stream",
    "lease_ttl_ms", "worker", "wake_id", "generation", "acks", "offset", "done",
)  # fmt: skip
_RECORD = b"\x0a\x12\x08\x80\xd0\x95\xff\xbc\x31\x12\x06\x0a\x01a\x12\x01b\x1a\x01x"
BODIES = (
    b"", b"{}", b"[]", b"[1]", b"1", b"\xff", b'{"records":[{"body":"a"}]}',
    b'{"records":[{"body":"aGk=","headers":[["a","b"]],"timestamp":5}],"match_seq_num":0,"fencing_token":"t"}',
    b'{"records":[{"headers":[["","trim"]],"body":"12345678"}]}',
    b'{"records":[{"headers":[["","fence"]],"body":"t"}]}',
    b'{"basin":"\\ud800"}', b'{"basin":"fresh-basin","config":{}}', b'{"stream":"a\\u0000b"}',
    b'{"stream":"fresh"}',
    b'{"records":[{"timestamp":%b}]}' % (b"9" * 5_000), b'{"records":[{}],"match_seq_num":-1}',
    b'{"id":"t","scope":{},"expires_at":"0001-01-01T00:00:00+23:59"}',
    b'{"id":"t","scope":{"basins":{"prefix":""},"ops":["read"]},"expires_at":"9999-12-31T23:59:59-23:59"}',
    b'{"config":{"retention_policy":{"age":18446744073709551615}}}',
    b'{"retention_policy":{"age":18446744073709551615},"delete_on_empty":{"min_age_secs":18446744073709551615}}',
    b'{"type":"webhook","pattern":"**","webhook":{"url":"https://\\u00e9/"}}',
    b'{"type":"pull-wake","pattern":"**","wake_stream":"w","lease_ttl_ms":1e300}',
    b'{"type":"pull-wake","streams":["json"],"wake_stream":"bytes"}', b'{"worker":"w"}',
    b'{"streams":["json"]}', b'{"streams":["json","","a\\u0000b","none"]}',
    b'{"wake_id":"\\u0000","generation":9007199254740992}', b"[" * 2_000, b'{"a":' * 600,
    b'["part"]',
    _RECORD, _RECORD * 30, encode_frame(_RECORD), encode_frame(_RECORD) * 3,
    b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", gzip.compress(b'{"records":[{"body":"a"}]}', mtime=0),
    zstandard.compress(b'{"records":[{"body":"a"}]}'), gzip.compress(bytes(1 << 20), mtime=0),
    b"x" * 40_000,
)  # fmt: skip


#: Bytes of a body that is sent whole whatever the server does. The refusal of a larger one may meet
#: bytes on their way: then the connection is reset before the client has read it.
_BUFFERED = 16 << 10


class HostileRequest(NamedTuple):
    method: bytes
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    #: How the body is framed: whole, chunked, cut short, longer than declared, or both ways at once.
    framing: str = "whole"

    def raw(self) -> bytes:
        """The request as HTTP/1.1 has it, the last one on its connection."""
        lines = [b"%b %b HTTP/1.1" % (self.method, self.target)]
        lines += [b"%b: %b" % header for header in self.headers]
        size, body = len(self.body), self.body
        if self.framing in ("chunked", "both", "bad chunks"):
            lines.append(b"transfer-encoding: chunked")
            middle = size // 2
            body = b"".join(
                b"%x\r\n%b\r\n" % (len(part), part)
                for part in (body[:middle], body[middle:])
                if part
            )
            body += b"0\r\n\r\n" if self.framing != "bad chunks" else b"zz\r\n"
        if self.framing == "cut":
            size += 10
        elif self.framing == "long":
            size = max(0, size - 3)
        if self.framing not in ("chunked", "bad chunks"):
            lines.append(b"content-length: %d" % size)
        return b"\r\n".join([*lines, b"connection: close", b"", b""]) + body

    @property
    def must_be_answered(self) -> bool:
        """Whether an answer must arrive: its grammar is HTTP's, and it is small enough to be sent."""
        return self.framing in ("whole", "chunked") and len(self.body) <= _BUFFERED


class Requests:
    """Spoiled requests for the given routes, one after the other."""

    def __init__(self, routes: Sequence[Route], seed: int) -> None:
        self._dice = random.Random(seed)
        self._routes = list(routes)
        self._bodies = Mutator(BODIES, seed + 1)
        #: Requests that were made for each route.
        self.of_route = dict.fromkeys(self._routes, 0)

    def next(self) -> HostileRequest:
        dice = self._dice
        route = dice.choice(self._routes)
        self.of_route[route] += 1
        method = route.method.encode() if dice.random() < 0.9 else dice.choice(METHODS)
        target = self._path(route) if dice.random() < 0.95 else dice.choice(TARGETS)
        if dice.random() < 0.4:
            target += (b"&" if b"?" in target else b"?") + self._query()
        headers = self._headers()
        reads = method in (b"GET", b"HEAD")
        body = b"" if reads and dice.random() < 0.9 else self._body()
        framing = (
            "whole"
            if dice.random() < 0.85
            else dice.choice(("chunked", "cut", "long", "both", "bad chunks"))
        )
        return HostileRequest(method, target, headers, body, framing)

    def next_raw(self) -> bytes:
        """Bytes that were a request once."""
        return Mutator([self.next().raw()], self._dice.randrange(1 << 32)).next()

    def _path(self, route: Route) -> bytes:
        path = route.path.encode()
        fresh = b"fresh-%d" % self._dice.randrange(50)
        while (at := path.find(b"{")) >= 0:
            end = path.index(b"}", at) + 1
            before = path[:at]
            if before.endswith((b"/snapshot/", b"/retention/")):
                word = self._dice.choice(NUMBERS)
            elif route.method == "DELETE" and self._dice.random() < 0.9:
                word = fresh  # what others need stays
            else:
                word = self._dice.choice(NAMES)
            path = before + word + path[end:]
        return path

    def _query(self) -> bytes:
        names = self._dice.sample(PARAMETERS, self._dice.randint(1, 3))
        return b"&".join(
            b"%b=%b" % (name, self._dice.choice(self._dice.choice((NUMBERS, NAMES, WORDS))))
            for name in names
        )

    def _headers(self) -> tuple[tuple[bytes, bytes], ...]:
        dice = self._dice
        headers = [(b"host", dice.choice(HOSTS))]
        if dice.random() < 0.8:
            headers.append((b"s2-basin", BASIN.encode()))
        if dice.random() < 0.8:
            headers.append((b"content-type", dice.choice(CONTENT_TYPES)))
        for name in dice.sample(HEADERS, dice.choice((0, 0, 1, 1, 2, 4))):
            if dice.random() < 0.05 or not any(name == present for present, _ in headers):
                value = dice.choice(dice.choice((NUMBERS, VALUES, VALUES)))
                headers.append((name, value.replace(b"\n", b"")))
        return tuple(headers)

    def _body(self) -> bytes:
        draw = self._dice.random()
        if draw < 0.3:
            return self._dice.choice(BODIES)
        if draw < 0.6:
            return json.dumps(self._object()).encode()
        if draw < 0.62:
            return b" " * self._dice.choice((100_000, 1_100_000, 4_300_000))
        body = self._bodies.next()
        return zlib.compress(body) if draw > 0.98 else body

    def _object(self, depth: int = 0) -> object:
        names = self._dice.sample(MEMBERS, self._dice.randint(0, 5))
        return {name: self._value(depth + 1) for name in names}

    def _value(self, depth: int) -> object:
        dice = self._dice
        simple = (
            "",
            "a",
            BASIN,
            STREAM,
            "é",
            "\x00",
            "express",
            0,
            1,
            -1,
            2**63,
            2**64,
            0.5,
            True,
            None,
        )
        if depth > 3 or dice.random() < 0.5:
            return dice.choice(simple)
        if dice.random() < 0.4:
            return [self._value(depth + 1) for _ in range(dice.randint(0, 3))]
        return self._object(depth)
