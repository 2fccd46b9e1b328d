"""Random requests are all answered, and none makes the server fail."""

from __future__ import annotations

import json
import random
import string
from urllib.parse import quote

import pytest

from streamfold.server.main import Server
from tests.proving import seeds
from tests.server.durable_streams.conftest import token
from tests.server.raw_h2 import h2_client

REQUESTS = 500

METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")
ROOTS = (
    "/v1/stream/{}",
    "/v1/stream/{}/{}",
    "/test-bucket/{}",
    "/{}/{}",
    "/{}",
    "/v1/stream/__ds/{}",
)
PARTS = (
    "",
    "",
    "",
    "/snapshot",
    "/snapshot/{}",
    "/snapshots",
    "/retention/{}",
    "/bootstrap",
    "/{}",
)
HEADERS = {
    "content-type": ("application/json", "text/plain", "application/octet-stream", "x", "a/b; c"),
    "stream-ttl": ("3600", "0", "01", "-1", "9" * 30),
    "stream-expires-at": ("2040-01-01T00:00:00Z", "0001-01-01T00:00:00Z", "9999-99-99", ""),
    "stream-closed": ("true", "TRUE", "1"),
    "stream-seq": ("a", "b", "", "z" * 300),
    "producer-id": ("p", "q", ""),
    "producer-epoch": ("0", "1", "-1", "x", "9007199254740991"),
    "producer-seq": ("0", "1", "2", "1e3", "9007199254740992"),
    "stream-forked-from": ("/v1/stream/known", "/test-bucket/known", "known", "/", "/v1/stream/"),
    "stream-fork-offset": (token(0), token(1), token(99), "x", "9" * 16 + "_" + "9" * 16),
    "stream-fork-sub-offset": ("0", "1", "2", "-1", "99999999999999999999"),
    "stream-trim-on-snapshot": ("true", "maybe"),
    "stream-snapshot-match": ("0" * 64, "x"),
    "if-none-match": ("*", '"x"', '"1:0:0"'),
    "s2-encryption-key": ("AAAA", "!", "A" * 44),
    "authorization": ("Bearer x", "x"),
    "accept-encoding": ("gzip", "zstd", "br"),
    "content-encoding": ("gzip", "identity"),
}  # fmt: skip


class Chaos:
    """Requests that are almost right, from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def word(self) -> str:
        known = (
            "known",
            "known",
            "test-bucket",
            "new",
            "0",
            "1",
            "2",
            token(0),
            token(1),
            "now",
            "-1",
        )
        odd = (
            "",
            ".",
            "..",
            "\x00",
            "é",
            "a/b",
            " ",
            "1e9",
            "18446744073709551616",
            "snapshot",
            "__ds",
        )
        plain = "".join(self.random.choices(string.ascii_lowercase, k=self.random.randint(1, 60)))
        return self.random.choice((*known, *known, *odd, plain))

    def path(self) -> str:
        path = self.random.choice(ROOTS) + self.random.choice(PARTS)
        while "{}" in path:
            path = path.replace("{}", quote(self.word(), safe=""), 1)
        names = self.random.sample(("offset", "cursor", "live", "prefix", "limit", "x"), 2)
        pairs = [f"{name}={quote(self.word())}" for name in names if self.random.random() < 0.4]
        if self.random.random() < 0.2:
            pairs.append("live=long-poll&offset=now")
        return path + ("?" + "&".join(pairs) if pairs else "")

    def headers(self) -> dict[str, str]:
        chosen = {}
        for name, values in HEADERS.items():
            if self.random.random() < (0.8 if name == "content-type" else 0.12):
                first = self.random.random() < 0.6
                chosen[name] = values[0] if first else self.random.choice(values)
        return chosen

    def body(self) -> bytes:
        kinds = (
            lambda: json.dumps([self.word(), {"a": [1, None]}]).encode(),
            lambda: b"[" * self.random.randint(0, 2000),
            lambda: self.random.randbytes(self.random.randint(0, 300)),
            lambda: b"",
        )
        return self.random.choices(kinds, weights=(5, 1, 3, 2))[0]()


@pytest.mark.parametrize("seed", seeds(2, proving=50))
async def test_no_request_makes_the_server_fail(durable: Server, seed: int) -> None:
    chaos = Chaos(seed)
    statuses = set()
    async with h2_client(durable.port) as h2:
        for path in ("/v1/stream/known", "/test-bucket/known"):
            sized = [("content-type", "application/json"), ("content-length", "5")]
            await h2.exchange("PUT", path, sized, b"[1,2]")
        for number in range(REQUESTS):
            method, path, headers = chaos.random.choice(METHODS), chaos.path(), chaos.headers()
            body = chaos.body() if method in ("POST", "PUT", "PATCH") else b""
            if "known" in path and (method == "DELETE" or "stream-closed" in headers):
                continue  # the rest would only find that nothing can be done there
            sized = [*headers.items(), ("content-length", str(len(body)))]
            answer = await h2.exchange(method, path, sized, body)
            statuses.add(answer.status)
            where = f"seed {seed}, request {number}: {method} {path} {headers} {body!r}"
            assert answer.status < 500, f"{where} -> {answer.status} {bytes(answer.body)!r}"
        # They were right enough to be looked at, and some of them to be done.
        assert {400, 404, 405} <= statuses
        assert statuses & {200, 201, 204}
        assert (await h2.exchange("GET", "/health")).status == 200
