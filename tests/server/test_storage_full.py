"""A server with a full disk, as seen by clients and operators."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from s2_sdk import AppendInput, Record, Retry, S2ServerError

from streamfold.server.main import Server, running_server
from streamfold.server.snapshots import SNAPSHOT_MAX
from streamfold.store.engine import disk_space
from streamfold.store.settings import StoreSettings
from tests.server.conftest import BASIN, STREAM, configuration, sdk
from tests.server.frames import PATH, SESSION, append_frame, frames_in
from tests.server.raw_h1 import h1_client
from tests.server.raw_h2 import H2Client, h2_client

JSON = (("s2-basin", BASIN), ("content-type", "application/json"))
RECORD = b'{"records":[{"body":"more"}]}'
#: Up to record 1: the command `trim` with its number, in base64.
TRIM = b'{"records":[{"headers":[["","dHJpbQ=="]],"body":"AAAAAAAAAAE="}]}'
#: Bytes that no disk has free.
TOO_MUCH = 1 << 60


@pytest.fixture
async def full(tmp_path: Path) -> AsyncIterator[Server]:
    """A server with three records, that must keep more free than there is."""
    location = tmp_path.as_uri()
    async with running_server(configuration(location=location)) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        async with h2_client(server.port) as h2:
            for _ in range(3):
                assert (await h2.exchange("POST", PATH, JSON, RECORD)).status == 200
    store = StoreSettings(disk_reserve=TOO_MUCH)
    async with running_server(configuration(location=location, store=store)) as server:
        yield server


@pytest.fixture
async def h2(full: Server) -> AsyncIterator[H2Client]:
    async with h2_client(full.port) as client:
        yield client


async def test_an_append_is_answered_with_its_own_code_and_when_to_try_again(h2: H2Client) -> None:
    answer = await h2.exchange("POST", PATH, JSON, RECORD)
    assert (answer.status, answer.headers["retry-after-ms"]) == (503, "1000")
    failure = json.loads(answer.body)
    assert failure["code"] == "storage_full"
    assert "nothing was written" in failure["message"]


async def test_a_store_in_memory_is_full_before_its_process_is() -> None:
    store = StoreSettings(disk_reserve=TOO_MUCH)
    async with running_server(configuration(store=store)) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        async with h2_client(server.port) as h2:
            answer = await h2.exchange("POST", PATH, JSON, RECORD)
            assert (answer.status, json.loads(answer.body)["code"]) == (503, "storage_full")
            assert "memory has" in json.loads(answer.body)["message"]
            assert (await h2.exchange("GET", "/ready")).status == 503
    usage = disk_space.read_memory_usage(Path("/proc/self"))
    assert usage.total > usage.free > 0


async def test_a_session_ends_with_the_same_code(h2: H2Client) -> None:
    session = h2.open("POST", PATH, SESSION)
    await h2.send(session, append_frame(b"more"))
    (end,) = frames_in(bytes((await h2.whole(session)).body))
    failure = end.failure()
    assert (failure.status, json.loads(failure.body)["code"]) == (503, "storage_full")


async def test_a_durable_stream_is_answered_in_the_same_way(h2: H2Client) -> None:
    octets = (("content-type", "application/octet-stream"), ("content-length", "4"))
    answer = await h2.exchange("POST", f"/{BASIN}/{STREAM}", octets, b"more")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert json.loads(answer.body)["code"] == "storage_full"


async def test_a_snapshot_that_does_not_fit_is_refused_before_its_body_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)  # other tests use the same disk
    reserve = usage.free - SNAPSHOT_MAX // 2
    settings = configuration(location=tmp_path.as_uri(), store=StoreSettings(disk_reserve=reserve))
    async with running_server(settings) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        async with h1_client(server.port) as client:
            await client.send(
                f"PUT /v1/streams/{STREAM}/snapshot/0 HTTP/1.1\r\nhost: localhost\r\n"
                f"s2-basin: {BASIN}\r\ncontent-length: {SNAPSHOT_MAX}\r\n\r\n".encode()
            )
            status, headers = await client.head()
            failure = json.loads(await client.body(int(headers["content-length"])))
    assert (status, failure["code"], headers["retry-after"]) == (503, "storage_full", "1")
    assert "nothing was" in failure["message"]


async def test_the_official_client_sees_an_error_of_the_server_that_it_may_retry(
    full: Server,
) -> None:
    async with sdk(full, retry=Retry(max_attempts=2)) as client:
        stream = client.basin(BASIN).stream(STREAM)
        with pytest.raises(S2ServerError) as caught:
            await stream.append(AppendInput(records=[Record(body=b"more")]))
    assert (caught.value.status_code, caught.value.code) == (503, "storage_full")


async def test_records_can_be_read_trimmed_and_deleted(h2: H2Client) -> None:
    basin = (("s2-basin", BASIN),)
    read = await h2.exchange("GET", f"{PATH}?seq_num=0", basin)
    assert len(json.loads(read.body)["records"]) == 3
    trimmed = await h2.exchange("POST", PATH, (*JSON, ("s2-format", "base64")), TRIM)
    assert trimmed.status == 200
    deleted = await h2.exchange("DELETE", f"/v1/streams/{STREAM}", basin)
    assert deleted.status == 202


async def test_a_full_disk_shows_in_ready_and_in_the_metrics(h2: H2Client) -> None:
    ready = await h2.exchange("GET", "/ready")
    assert ready.status == 503
    assert b"MiB free" in ready.body
    assert (await h2.exchange("GET", "/health")).status == 200
    lines = (await h2.exchange("GET", "/metrics")).body.decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    assert float(values["streamfold_storage_full"]) == 1
    assert float(values["streamfold_storage_reserve_bytes"]) == TOO_MUCH
    assert 0 < float(values["streamfold_storage_free_bytes"]) < TOO_MUCH
