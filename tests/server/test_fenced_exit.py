"""A server that lost its store exits with an error, and acknowledged nothing that is missing."""

from __future__ import annotations

import asyncio
import errno
import json
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from s2_sdk import S2, AppendInput, AppendRetryPolicy, Record, Retry, S2Error, SeqNum

from streamfold._native import FaultyDisk
from streamfold.cli.exit_status import ExitStatus
from streamfold.errors import DeviceFailedError
from streamfold.model.records import Record as StoredRecord
from streamfold.server.main import Server, serve
from tests.cli.commands import Outcome, Shell, ending_of, line_of
from tests.s3 import S3Server
from tests.sdk import sdk_client
from tests.server.conftest import configuration
from tests.server.raw_h1 import h1_client

BASIN, STREAM = "test-basin", "orders"
#: Codes that promise that nothing happened: the server stops, or is finding out who has the store.
DEFINITE = ("server_draining", "store_recovering")


@pytest.fixture(params=["local", "s3"])
def shared_store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Shell, tuple[str, ...]]:
    """A shell, and the options by which every server of a test finds the same store."""
    if request.param == "local":
        return Shell({}), ("--local-root", str(tmp_path))
    s3: S3Server = request.getfixturevalue("s3_server")
    return Shell(s3.environment()), ("--bucket", s3.bucket, "--path", request.node.name)


@asynccontextmanager
async def a_process(
    shared_store: tuple[Shell, tuple[str, ...]], *more: str
) -> AsyncIterator[tuple[Process, str]]:
    """A server, and its address."""
    shell, options = shared_store
    here = ("--host", "127.0.0.1", "--port", "0", "--json", "--no-access-log")
    async with shell.running("serve", *here, *options, *more) as process:
        yield process, json.loads(await line_of(process))["url"]


@asynccontextmanager
async def a_server(
    shared_store: tuple[Shell, tuple[str, ...]], *more: str
) -> AsyncIterator[tuple[Process, S2]]:
    async with a_process(shared_store, *more) as (process, url), client_of(url) as client:
        yield process, client


def client_of(url: str) -> S2:
    retry = Retry(max_attempts=1, append_retry_policy=AppendRetryPolicy.NO_SIDE_EFFECTS)
    return sdk_client(url, retry=retry)


async def test_a_server_that_was_replaced_ends_although_nothing_is_asked_of_it(
    shared_store: tuple[Shell, tuple[str, ...]],
) -> None:
    async with (
        a_server(shared_store) as (first, _),
        a_server(shared_store, "--take-over") as (second, s2),
    ):
        ended = await ending_of(first)
        assert_fenced(ended)
        await s2.create_basin(BASIN)
        assert second.returncode is None


async def test_a_server_that_was_replaced_under_load_acknowledged_only_what_is_there(
    shared_store: tuple[Shell, tuple[str, ...]],
) -> None:
    async with a_server(shared_store) as (first, writer):
        await writer.create_basin(BASIN)
        await writer.basin(BASIN).create_stream(STREAM)
        acked: dict[int, bytes] = {}
        writing = asyncio.create_task(write_until_it_fails(writer, acked))
        async with asyncio.timeout(120):
            while len(acked) < 20:  # noqa: ASYNC110 - as long as it takes to be under load
                await asyncio.sleep(0.01)
        async with a_server(shared_store, "--take-over") as (_, s2):
            ended = await ending_of(first)
            assert_fenced(ended)
            sent = await writing
            records = []
            async with (
                s2.basin(BASIN).stream(STREAM).read_session(start=SeqNum(0), wait=0) as reading
            ):
                async for batch in reading:
                    records.extend(batch.records)
    found = {record.seq_num: record.body for record in records}
    assert acked.items() <= found.items()
    assert [found[seq_num] for seq_num in sorted(found)] == [b"%d" % n for n in range(len(found))]
    assert len(found) <= sent


async def test_a_takeover_leaves_the_outcome_of_appends_under_way_open(
    shared_store: tuple[Shell, tuple[str, ...]],
) -> None:
    """They get 503 `unavailable`, which no client takes for "nothing happened"."""
    # Appends are under way nearly all the time, however busy the machine is.
    async with a_process(shared_store, "--commit-interval", "0.5") as (first, url):
        names = [f"s{number}" for number in range(8)]
        async with client_of(url) as s2:
            await s2.create_basin(BASIN)
            for name in names:
                await s2.basin(BASIN).create_stream(name)
        acked: dict[str, int] = dict.fromkeys(names, 0)
        writing = [asyncio.create_task(last_words(url, name, acked)) for name in names]
        async with a_server(shared_store, "--take-over") as (_, s2):
            assert_fenced(await ending_of(first))
            endings = dict(zip(names, await asyncio.gather(*writing), strict=True))
            for name, code in endings.items():
                stored = (await s2.basin(BASIN).stream(name).check_tail()).seq_num
                assert acked[name] <= stored <= acked[name] + (code not in DEFINITE)
    told = {code for code in endings.values() if code is not None}
    assert "unavailable" in told
    assert told <= {"unavailable", *DEFINITE}


async def last_words(url: str, stream: str, acked: dict[str, int]) -> str | None:
    """Append until that fails; return the code of the failure, None if the connection broke.

    Over HTTP/1.1: a client that uses Python's h2 drops answers that it reads together with the server's
    farewell, as it does on a busy machine.
    """
    port, body = urlsplit(url).port, b'{"records":[{"body":"x"}]}'
    assert port is not None
    head = (
        f"POST /v1/streams/{stream}/records HTTP/1.1\r\nhost: localhost\r\ns2-basin: {BASIN}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    try:
        async with h1_client(port) as client:
            while True:
                await client.send(head.encode() + body)
                status, headers = await client.head()
                answer = json.loads(await client.body(int(headers["content-length"])))
                if status != 200:
                    code: str = answer["code"]
                    return code
                acked[stream] += 1
    except (ConnectionError, asyncio.IncompleteReadError):
        return None


def assert_fenced(ended: Outcome) -> None:
    """The server failed, and its last words say why."""
    assert ended.status == ExitStatus.FENCED, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "the server stops: another process opened this store" in ended.stderr
    *_, last = ended.stderr.splitlines()
    assert json.loads(last)["error"]["code"] == "writer_fenced"


async def write_until_it_fails(s2: S2, acked: dict[int, bytes]) -> int:
    """Append numbers, one after the other; return how many were sent."""
    stream = s2.basin(BASIN).stream(STREAM)
    number = 0
    while True:
        body = b"%d" % number
        number += 1
        try:
            ack = await stream.append(AppendInput([Record(body)]))
        except S2Error:
            return number
        acked[ack.start.seq_num] = body


async def test_a_server_whose_device_failed_ends_with_that_error(tmp_path: Path) -> None:
    """In this process, since no process can be given a device that fails on demand."""
    faults = FaultyDisk(tmp_path, 1)
    try:
        up: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve(configuration(location=tmp_path.as_uri()), up.set_result)
        )
        server = await up
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        faults.turn(steps=8, number=errno.EIO)
        with pytest.raises(DeviceFailedError):
            await server.store.append(BASIN, STREAM, [StoredRecord(b"x")])
        async with asyncio.timeout(120):
            with pytest.raises(DeviceFailedError, match="Input/output error"):
                await serving
    finally:
        faults.close()
