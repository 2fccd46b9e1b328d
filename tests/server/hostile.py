"""Requests with hostile bytes wherever a client can put some, from a seed.

All of them are HTTP as far as its grammar goes, so that each must get an answer.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from tests.server.conftest import BASIN, STREAM

METHODS = (
    b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE", b"CONNECT", b"BREW",
    b"get", b"PROPFIND",
)  # fmt: skip
#: {} stands for a name, {n} for a number.
PATHS = (
    b"/v1/basins", b"/v1/basins/{}", b"/v1/streams", b"/v1/streams/{}", b"/v1/streams/{}/records",
    b"/v1/streams/{}/records/tail", b"/v1/streams/{}/snapshots", b"/v1/streams/{}/snapshot",
    b"/v1/streams/{}/snapshot/{n}", b"/v1/streams/{}/retention/{n}", b"/v1/streams/{}/bootstrap",
    b"/v1/access-tokens", b"/v1/access-tokens/{}", b"/v1/metrics", b"/v1/metrics/{}",
    b"/v1/metrics/{}/{}", b"/v1/locations", b"/v1/locations/default", b"/v1/stream/{}",
    b"/v1/stream/{}/{}", b"/v1/stream/{}/snapshot/{n}", b"/v1/stream/{}/snapshots",
    b"/v1/stream/{}/retention/{n}", b"/v1/stream/{}/bootstrap", b"/v1/stream/__ds/jwks.json",
    b"/v1/stream/__ds/subscriptions/{}", b"/v1/stream/__ds/subscriptions/{}/{}",
    b"/v1/stream/__ds/subscriptions/{}/streams/{}", b"/{}", b"/{}/streams", b"/{}/{}",
    b"/{}/{}/snapshot/{n}", b"/{}/{}/{}/{}", b"/health", b"/ready", b"/metrics", b"/", b"//", b"/v1",
    b"/v1/", b"/{}/", b"/./..", b"/v1/stream/", b"/v1/streams/",
)  # fmt: skip
#: Targets in forms other than a path.
TARGETS = (
    b"*", b"test:80", b"http://test/v1/basins", b"http://test", b"http://test?limit=1", b"?",
    b"?limit=x", b"HTTP://A/{}/{}", b"http://[::1]:1/{}", b"{}",
)  # fmt: skip
NAMES = (
    BASIN.encode(), STREAM.encode(), b"known", b"a%2Fb", b"%FF", b"%", b"%4", b"%zz", b"%00", b"%0d%0a",
    b"%C3%A9", b"%ED%A0%80", b"..", b".", b"%2e%2e", b"x" * 600, b"", b"snapshot", b"streams", b"__ds",
    b"$", b"a;b", b"a:b", b"~",
)  # fmt: skip
NUMBERS = (
    b"0", b"1", b"00", b"-1", b"+1", b"1_0", b"1e3", b"0x1", b"1.5", b"", b"%20", b"now", b"%D9%A1",
    b"9007199254740992", b"9223372036854775808", b"18446744073709551615", b"18446744073709551616",
    b"9" * 30, b"1" * 5_000, b"0" * 5_000 + b"1", b"0000000000000000_0000000000000000",
    b"9999999999999999_9999999999999999", b"nan", b"null",
)  # fmt: skip
PARAMETERS = (
    b"prefix", b"start_after", b"after", b"limit", b"seq_num", b"timestamp", b"tail_offset", b"clamp",
    b"count", b"bytes", b"until", b"set", b"start", b"end", b"interval", b"offset", b"live", b"cursor",
    b"%FF", b"",
)  # fmt: skip
#: In values of headers; CR, LF and NUL cannot get there.
VALUES = (
    b"\xff", b"a\xff", b"\xc3\xa9", b"\xed\xa0\x80", b"\x80\x81", b"\t", b"", b"a" * 5_000, b"%FF",
    b"%0d%0a", b"/b/\xff", b"/v1/stream/\xff", b"/v1/stream/%FF", b"true", b"*", b'"', b"Bearer \xff",
    b"application/json", b"text/plain; charset=\xff", b"2040-01-01T00:00:00Z",
    b"0001-01-01T00:00:00+23:59", b"9999-12-31T23:59:59-23:59", b"gzip", b"1,2,3",
)  # fmt: skip
HEADERS = (
    b"s2-basin", b"s2-format", b"s2-request-token", b"s2-encryption-key", b"s2-stream-config",
    b"last-event-id", b"content-type", b"accept", b"accept-encoding", b"content-encoding",
    b"authorization", b"origin", b"access-control-request-method", b"access-control-request-headers",
    b"stream-ttl", b"stream-expires-at", b"stream-closed", b"stream-seq", b"producer-id",
    b"producer-epoch", b"producer-seq", b"stream-forked-from", b"stream-fork-offset",
    b"stream-fork-sub-offset", b"stream-trim-on-snapshot", b"stream-snapshot-match", b"if-none-match",
    b"expect", b"x-forwarded-for", b"range", b"cookie",
)  # fmt: skip
HOSTS = (
    *(b"127.0.0.1",) * 12, b"a\xff", b"", b"[::1]:80", b"a b", b"a/b", b"\xc3\xa9", b"a:b", b"a:80:80",
)  # fmt: skip
BODIES = (
    b"", b"", b"{}", b"[]", b"[1]", b"1", b"\xff", b'{"basin":"\\ud800"}', b'{"stream":"a\\u0000b"}',
    b'{"records":[{"timestamp":%b}]}' % (b"9" * 5_000), b'{"records":[{}],"match_seq_num":-1}',
    b'{"records":[{"timestamp":18446744073709551615}]}',
    b'{"id":"t","scope":{},"expires_at":"0001-01-01T00:00:00+23:59"}',
    b'{"id":"t","scope":{},"expires_at":"9999-12-31T23:59:59-23:59"}',
    b'{"config":{"retention_policy":{"age":18446744073709551615}}}',
    b'{"retention_policy":{"age":18446744073709551615},"delete_on_empty":{"min_age_secs":18446744073709551615}}',
    b'{"type":"webhook","pattern":"**","webhook":{"url":"https://\\u00e9/"}}',
    b'{"type":"pull-wake","pattern":"**","wake_stream":"w","lease_ttl_ms":1e300}',
    b'{"wake_id":"\\u0000","generation":9007199254740992}', b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
)  # fmt: skip


class Hostile(NamedTuple):
    method: bytes
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def raw(self) -> bytes:
        """The request as HTTP/1.1 has it, the last one on its connection."""
        lines = [b"%b %b HTTP/1.1" % (self.method, self.target)]
        lines += [b"%b: %b" % header for header in self.headers]
        lines += [b"content-length: %d" % len(self.body), b"connection: close", b"", b""]
        return b"\r\n".join(lines) + self.body


class Hostiles:
    """Hostile requests, one after the other."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self) -> Hostile:
        some = self._random
        target = self._fill(some.choice(PATHS if some.random() < 0.85 else TARGETS))
        if some.random() < 0.5:
            names = some.sample(PARAMETERS, some.randint(1, 3))
            pairs = (b"%b=%b" % (name, self._value()) for name in names)
            target += (b"&" if b"?" in target else b"?") + b"&".join(pairs).replace(b"\xff", b"%FF")
        headers = [(b"host", some.choice(HOSTS))]
        if some.random() < 0.7:
            headers.append((b"s2-basin", BASIN.encode()))
        if some.random() < 0.6:
            headers.append((b"content-type", some.choice((b"application/json", b"text/plain"))))
        for name in some.sample(HEADERS, some.choice((0, 1, 1, 2, 4))):
            if not any(name == given for given, _ in headers):
                headers.append((name, self._header_value()))
        return Hostile(some.choice(METHODS), target, tuple(headers), some.choice(BODIES))

    def _fill(self, path: bytes) -> bytes:
        while b"{}" in path:
            path = path.replace(b"{}", self._random.choice(NAMES), 1)
        while b"{n}" in path:
            path = path.replace(b"{n}", self._random.choice(NUMBERS), 1)
        return path

    def _value(self) -> bytes:
        return self._random.choice(self._random.choice((NUMBERS, NAMES)))

    def _header_value(self) -> bytes:
        return self._random.choice(self._random.choice((NUMBERS, VALUES, VALUES)))
