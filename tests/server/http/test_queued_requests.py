"""Queued requests cost no more memory than their bytes, and delay nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import hpack

from tests.server.attacked import attacked
from tests.server.raw_h1 import h1_client

MIB = 1 << 20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: Types of HTTP/2 frames, and the flags of a request without a body.
HEADERS, RST_STREAM, SETTINGS, PING = 1, 3, 4, 6
END_OF_BOTH = 0x5
#: Requests of one round, fewer than a connection may have, and rounds.
REQUESTS, ROUNDS = 120, 1200
#: Chunks of two bytes.
CHUNKS = 300_000


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


async def test_requests_that_are_reset_in_step_with_the_server_gather_no_memory(
    tmp_path: Path,
) -> None:
    """The client knows from a ping that its requests were taken, and resets them with the next ones."""
    async with attacked(tmp_path) as server, server.client() as client:
        before = await server.resident_at_rest()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = hpack.Encoder().encode(
            [(":method", "GET"), (":scheme", "http"), (":path", "/nowhere"), (":authority", "x")]
        )
        ping = frame(PING, 0, 0, b"in step.")
        writer.write(PREFACE + frame(SETTINGS, 0, 0, b""))
        first, former, most = 1, range(0), 0
        for number in range(ROUNDS):
            streams = range(first, first + 2 * REQUESTS, 2)
            first += 2 * REQUESTS
            cancel = (8).to_bytes(4)
            writer.write(b"".join(frame(RST_STREAM, 0, stream, cancel) for stream in former))
            writer.write(b"".join(frame(HEADERS, END_OF_BOTH, s, head) for s in streams) + ping)
            former = streams
            await reader.readuntil(b"in step.")
            if number % 50 == 0:
                most = max(most, server.resident - before)
        assert (await client.get("/health")).status_code == 200
        assert max(most, server.resident - before) < 48 * MIB
        writer.close()


async def test_a_body_in_chunks_of_two_bytes_costs_little_more_than_its_bytes(
    tmp_path: Path,
) -> None:
    async with attacked(tmp_path) as server, server.client() as client:
        created = await client.put("/v1/stream/chat", headers={"content-type": "text/plain"})
        assert created.status_code == 201
        before = await server.resident_at_rest()
        async with h1_client(server.port) as h1:
            await h1.send(
                b"POST /v1/stream/chat HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            for _ in range(100):
                await h1.send(b"2\r\nab\r\n" * (CHUNKS // 100))
                assert (await client.get("/health")).status_code == 200
            assert server.resident - before < 12 * MIB
