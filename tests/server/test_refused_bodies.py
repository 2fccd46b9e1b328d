"""Refused requests leave nothing in memory, although the server seldom collects garbage."""

from __future__ import annotations

import asyncio
import gc
import gzip
import http.client
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest
import zstandard

from streamfold.errors import StreamfoldError
from streamfold.server.main import Server
from streamfold.wire.s2.headers import BODY_MAX
from tests.server.attacked import MIB, attacked
from tests.server.attacks import (
    BYTES,
    JSON,
    RECORDS,
    S2,
    S2_JSON,
    S2_PROTO,
    S2_SESSION,
    STREAMS,
    Attack,
    attacks,
    delimited,
)
from tests.server.conftest import BASIN, STREAM, until
from tests.server.frames import append_frame
from tests.server.raw_h1 import h1_client

#: Bytes that the bodies of one kind take in memory together, inflated.
TAKEN = 64 * MIB
#: Bytes by which the server may grow: the allocator keeps 128 MiB of freed memory for the next bodies.
GROWTH_MAX = 192 * MIB


class Refused(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes
    #: Bytes that the server has in memory for it.
    size: int


def refused() -> Iterator[Refused]:
    brackets = b"[1," * (4 * MIB)
    yield Refused("/v1/stream/json", JSON, brackets, len(brackets))
    bomb = b"\0" * BODY_MAX
    packed = {"gzip": gzip.compress(bomb, 9), "zstd": zstandard.compress(bomb)}
    for coding, body in packed.items():
        yield Refused(RECORDS, S2_JSON | {"content-encoding": coding}, body, BODY_MAX)
    cut_off = delimited(b"\x1a" + b"x" * (BODY_MAX - 100))[:-1]
    yield Refused(RECORDS, S2_PROTO, cut_off, BODY_MAX)
    record = delimited(b"\x12\x00" * 900_000)  # each header has an empty name
    frame = (1 + len(record)).to_bytes(3, "big") + b"\0" + record
    yield Refused(RECORDS, S2_SESSION, frame, len(record))


async def test_refused_bodies_of_five_kinds_leave_memory_as_it_was(tmp_path: Path) -> None:
    async with attacked(tmp_path, streams=(STREAM,)) as server, server.client() as client:
        assert (await client.put("/v1/stream/json", headers=JSON)).status_code == 201
        rest = await server.resident_at_rest()
        for one in refused():
            for _ in range(TAKEN // one.size):
                response = await client.post(one.path, headers=one.headers, content=one.body)
                assert response.status_code in (400, 422) or one.headers is S2_SESSION
            assert server.resident - rest < GROWTH_MAX


def refused_late() -> Iterator[Attack]:
    """Requests that the store refuses once they are parsed, in a thread and on the event loop."""
    for size in (200_000, 10_000):
        record = b'{"records":[{"body":"%b"}]' % (b"x" * size)
        yield Attack("match_seq_num", "POST", RECORDS, S2_JSON, record + b',"match_seq_num":7}')
        yield Attack("fencing token", "POST", RECORDS, S2_JSON, record + b',"fencing_token":"a"}')
        yield Attack("no stream", "POST", "/v1/streams/none/records", S2_JSON, record + b"}")
        body, text = b"x" * size, {"content-type": "text/plain"}
        yield Attack(
            "first Stream-Seq", "POST", "/v1/stream/bytes", BYTES | {"stream-seq": "b"}, body
        )
        yield Attack("Stream-Seq", "POST", "/v1/stream/bytes", BYTES | {"stream-seq": "a"}, body)
        yield Attack("content type", "POST", "/v1/stream/bytes", text, body)
        yield Attack("another PUT", "PUT", "/v1/stream/bytes", text, body)
        yield Attack("no such stream", "POST", "/v1/stream/none", text, body)
    frame = append_frame(b"x" * 10_000, match_seq_num=7)
    yield Attack("session", "POST", RECORDS, S2_SESSION, frame)
    yield Attack("read", "GET", f"{RECORDS}?seq_num=1000", S2)
    yield Attack("subscription", "GET", "/v1/stream/__ds/subscriptions/none")


@pytest.mark.usefixtures("no_collection")
async def test_no_refused_request_needs_the_collector(server: Server) -> None:
    for path, headers in STREAMS:
        assert await asyncio.to_thread(_send, server.port, Attack("", "PUT", path, headers)) == 201
    for attack in (*refused_late(), *attacks(150_000)):
        if attack.taken is None:
            await asyncio.to_thread(_send, server.port, attack)
            await until(lambda: not server.gate.inside)
            assert not (garbage := _garbage()), f"{attack.name}: {garbage}"


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("accept", ["text/event-stream", "s2s/proto"])
async def test_a_follower_that_hangs_up_needs_no_collector(server: Server, accept: str) -> None:
    await _grow(server)
    head = f"GET {RECORDS}?seq_num=0 HTTP/1.1\r\nhost: localhost\r\ns2-basin: {BASIN}\r\n"
    async with h1_client(server.port) as h1:
        await h1.send(f"{head}accept: {accept}\r\ncontent-type: {accept}\r\n\r\n".encode())
        assert (await h1.head())[0] == 200
        await until(lambda: server.gate.waits == 1)
    await until(lambda: not server.gate.inside)
    assert not _garbage()


async def _grow(server: Server) -> None:
    """Append more records than the sockets between a server and its client take."""
    body = b'{"records":[%b]}' % b",".join([b'{"body":"%b"}' % (b"x" * 900)] * 1000)
    for _ in range(8):
        attack = Attack("", "POST", RECORDS, S2_JSON, body)
        assert await asyncio.to_thread(_send, server.port, attack) == 200


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Turn the collector off, so that it takes only what `_garbage` has it take."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def _garbage() -> list[str]:
    """What of the server only the collector can free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    names = [name for one in gc.garbage if (name := _ours(one))]
    gc.garbage.clear()
    return names


def _ours(one: object) -> str | None:
    """The name of a frame of the server, or of an error of it."""
    if isinstance(one, FrameType) and "/streamfold/" in one.f_code.co_filename:
        return one.f_code.co_qualname
    return repr(one)[:100] if isinstance(one, StreamfoldError) else None


def _send(port: int, attack: Attack) -> int:
    """The status of the answer; 0 if the server refuses before it has the whole request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(attack.method, attack.path, attack.body, dict(attack.headers))
        response = connection.getresponse()
        response.read()
        return response.status
    except ConnectionError:
        return 0
    finally:
        connection.close()
