"""Nonsensical requests: each gets an answer, and none makes the server fail."""

from __future__ import annotations

import asyncio
import json
import random
import string
from urllib.parse import quote

import pytest

from streamfold.server.main import Server, running_server
from tests.proving import seeds
from tests.server.conftest import BASIN, STREAM, configuration
from tests.server.hostile import Hostiles
from tests.server.raw_h1 import H1Client, h1_client
from tests.server.raw_h2 import H2Client

REQUESTS = 400
#: Each request takes a connection of its own.
HOSTILE_REQUESTS = 500
HOSTILE_SEEDS = seeds(4, proving=50)

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
PATHS = (
    "/v1/basins",
    "/v1/basins/{}",
    "/v1/streams",
    "/v1/streams/{}",
    "/v1/streams/{}/records",
    "/v1/streams/{}/records/tail",
    "/v1/access-tokens",
    "/v1/access-tokens/{}",
    "/v1/metrics",
    "/v1/metrics/{}",
    "/v1/metrics/{}/{}",
    "/v1/locations",
    "/v1/locations/default",
)
PARAMETERS = (
    "prefix", "start_after", "limit", "seq_num", "timestamp", "tail_offset", "clamp", "count",
    "bytes", "until", "wait", "set", "start", "end", "interval",
)  # fmt: skip
MEMBERS = (
    "basin", "stream", "config", "location", "records", "body", "headers", "timestamp", "id", "scope",
    "match_seq_num", "fencing_token", "retention_policy", "age", "infinite", "timestamping", "mode",
    "uncapped", "delete_on_empty", "min_age_secs", "storage_class", "default_stream_config",
    "stream_cipher", "create_stream_on_append", "expires_at", "auto_prefix_streams", "ops", "exact",
    "basins", "streams", "op_groups", "prefix",
)  # fmt: skip


class Chaos:
    """Requests that are almost right, from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def word(self) -> str:
        known = (BASIN, STREAM, "orders", "express", "age", "arrival", "read", "storage", "minute")
        odd = ("", ".", "..", "\x00", "é", "a/b", " ", "-1", "1e9", "0", "18446744073709551616")
        plain = "".join(self.random.choices(string.ascii_lowercase, k=self.random.randint(1, 60)))
        return self.random.choice((*known, *odd, plain))

    def value(self, depth: int = 0) -> object:
        simple = (
            self.word,
            lambda: self.random.choice((0, 1, -1, 2**63, 2**64, 0.5)),
            lambda: self.random.choice((True, False, None)),
        )
        if depth > 3 or self.random.random() < 0.4:
            return self.random.choice(simple)()
        if self.random.random() < 0.3:
            return [self.value(depth + 1) for _ in range(self.random.randint(0, 3))]
        return self.mapping(depth)

    def mapping(self, depth: int = 0) -> dict[str, object]:
        names = self.random.sample(MEMBERS, self.random.randint(0, 6))
        return {name: self.value(depth + 1) for name in names}

    def body(self) -> bytes:
        kinds = (
            lambda: json.dumps(self.mapping()).encode(),
            lambda: json.dumps(self.value()).encode(),
            lambda: self.random.randbytes(self.random.randint(0, 200)),
            lambda: b"",
        )
        return self.random.choices(kinds, weights=(6, 2, 1, 1))[0]()

    def path(self) -> str:
        path = self.random.choice(PATHS)
        while "{}" in path:
            path = path.replace("{}", quote(self.word(), safe=""), 1)
        names = self.random.sample(PARAMETERS, self.random.choice((0, 0, 1, 2, 3)))
        # A read that waits would keep the test waiting.
        pairs = [f"{name}={quote(self.word())}" for name in names if name != "wait"]
        return path + ("?" + "&".join(pairs) if pairs else "")

    def headers(self) -> dict[str, str]:
        chosen = {}
        if self.random.random() < 0.8:
            chosen["s2-basin"] = BASIN
        for name, values in (
            ("content-type", ("application/json", "application/protobuf", "text/plain", "")),
            ("accept", ("application/json", "application/protobuf", "*/*")),
            ("s2-format", ("raw", "base64", "other")),
            ("content-encoding", ("gzip", "zstd", "identity")),
            ("s2-request-token", ("t", "t" * 40)),
            ("s2-stream-config", ("{}", "{", '{"retention_policy":{"age":0}}')),
            ("s2-encryption-key", ("AAAA", "!")),
            ("last-event-id", ("0,0,0", "x")),
        ):
            if self.random.random() < (0.7 if name == "content-type" else 0.15):
                chosen[name] = self.random.choice(values)
        return chosen


@pytest.mark.parametrize("seed", seeds(2, proving=50))
async def test_no_request_makes_the_server_fail(server: Server, h2: H2Client, seed: int) -> None:
    chaos = Chaos(seed)
    statuses = set()
    for number in range(REQUESTS):
        method, path, headers = chaos.random.choice(METHODS), chaos.path(), chaos.headers()
        body = chaos.body() if method in ("POST", "PUT", "PATCH") else b""
        if method == "DELETE" and (BASIN in path or STREAM in path):
            continue  # the rest would only find that nothing is there
        sized = [*headers.items(), ("content-length", str(len(body)))]
        answer = await h2.exchange(method, path, sized, body)
        statuses.add(answer.status)
        where = f"seed {seed}, request {number}: {method} {path} {headers} {body!r}"
        assert answer.status < 500, f"{where} -> {answer.status} {bytes(answer.body)!r}"
    assert {200, 400, 404, 405} <= statuses  # the requests were right enough to be looked at
    assert (await h2.exchange("GET", "/health")).status == 200


@pytest.mark.parametrize("seed", HOSTILE_SEEDS)
async def test_hostile_bytes_are_answered_and_leave_no_traceback(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Over HTTP/1.1, in which a client can write nearly anything."""
    # Every other server may be reached by any name, and so looks less closely at hosts.
    async with running_server(configuration(host=("127.0.0.1", "0.0.0.0")[seed % 2])) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        await send_hostile_requests(server, seed, caplog)


async def send_hostile_requests(
    server: Server, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    hostiles, statuses = Hostiles(seed), set[int]()
    for number in range(HOSTILE_REQUESTS):
        hostile = hostiles.next()
        async with h1_client(server.port) as client:
            await client.send(hostile.raw())
            where = f"seed {seed}, request {number}: {hostile.raw()!r}"
            status = await first_status(client, where)
        statuses.add(status)
        failed = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert status < 500, f"{where[:3000]} -> {status} {failed}"
        assert not failed, f"{where[:3000]} -> {failed}"
    assert {200, 400, 404, 405} <= statuses


async def first_status(client: H1Client, where: str) -> int:
    """The status of the answer, which must come."""
    async with asyncio.timeout(60):
        line = await client.reader.readline()
    assert line.startswith(b"HTTP/1.1 "), f"{where[:3000]} -> {line!r}"
    return int(line.split()[1])
