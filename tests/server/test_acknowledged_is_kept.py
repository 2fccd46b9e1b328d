"""Every acknowledged record survives stops and kills in any order, at its seq_num."""

from __future__ import annotations

import asyncio
import json
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.cli.commands import Shell, line_of
from tests.proving import PROVING
from tests.server.raw_h2 import H2Client, h2_client

HEADERS = (("s2-basin", "test-basin"), ("content-type", "application/json"))
STREAMS = 250
#: Appends that are under way at a time.
TOGETHER = 50
#: Kills and stops in turn.
ROUNDS = 50 if PROVING else 1


@asynccontextmanager
async def a_server(root: Path) -> AsyncIterator[tuple[Process, H2Client]]:
    """A server on a folder, and a connection to it."""
    here = ("--host", "127.0.0.1", "--port", "0", "--json", "--no-access-log")
    async with Shell({}).running("serve", *here, "--local-root", str(root)) as process:
        port = urlsplit(json.loads(await line_of(process))["url"]).port
        assert port is not None
        async with h2_client(port) as client:
            yield process, client


async def append(client: H2Client, number: int) -> int:
    """Append one record; return its seq_num."""
    body = b'{"records": [{"body": "x"}]}'
    answer = await client.exchange("POST", f"/v1/streams/s-{number}/records", HEADERS, body)
    assert answer.status == 200, answer.body
    seq_num: int = json.loads(answer.body)["start"]["seq_num"]
    return seq_num


async def look(client: H2Client, number: int) -> None:
    path = f"/v1/streams/missing-{number}/records/tail"
    assert (await client.exchange("GET", path, HEADERS)).status == 404


async def append_to_all(client: H2Client, *, beside_reads: bool = False) -> list[int]:
    """Append to all streams, in between requests for streams that do not exist."""
    acks: list[int] = []
    for first in range(0, STREAMS, TOGETHER):
        appends, looks = [], []
        for number in range(first, first + TOGETHER):
            if beside_reads:
                looks.append(asyncio.create_task(look(client, number)))
            appends.append(asyncio.create_task(append(client, number)))
        acks += await asyncio.gather(*appends)
        await asyncio.gather(*looks)
    return acks


async def test_no_record_is_lost_by_a_stop_then_appends_beside_reads_of_nothing_then_a_kill(
    tmp_path: Path,
) -> None:
    async with a_server(tmp_path) as (process, client):
        basin = b'{"basin": "test-basin", "config": {"create_stream_on_append": true}}'
        assert (await client.exchange("POST", "/v1/basins", HEADERS, basin)).status == 201
        assert await append_to_all(client) == [0] * STREAMS
        process.send_signal(signal.SIGTERM)
        await process.wait()
    appended = 1
    for _ in range(ROUNDS):
        for end in (signal.SIGKILL, signal.SIGTERM):
            async with a_server(tmp_path) as (process, client):
                assert await append_to_all(client, beside_reads=True) == [appended] * STREAMS
                appended += 1
                process.send_signal(end)
                await process.wait()
    async with a_server(tmp_path) as (_, client):
        assert await append_to_all(client) == [appended] * STREAMS
