"""Uploads keep few files open, so storage always has descriptors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from streamfold.blob.local_store import WRITE_BUFFER
from streamfold.server.http.connections import upload_files_max
from streamfold.server.main import Server, running_server
from streamfold.wire.durable_streams.offsets import format_offset
from tests.server.attacked import LARGE, attacked
from tests.server.conftest import BASIN, STREAM, configuration, until
from tests.server.frames import PATH
from tests.server.raw_h1 import H1Client, h1_client

#: Descriptors of the server under attack, soft and hard, and uploads that attack it: fewer than it
#: takes connections, but too many for a file each.
DESCRIPTORS = 256
UPLOADS = 180 if LARGE else 130
SNAPSHOT = f"/v1/streams/{STREAM}/snapshot/0"
APPEND = '{"records":[{"body":"x"}]}'
JSON = {"content-type": "application/json"}
#: Of a body that needs a file.
SIZE = WRITE_BUFFER + WRITE_BUFFER // 2


def head(size: int, path: str = SNAPSHOT) -> bytes:
    return (
        f"PUT {path} HTTP/1.1\r\nhost: localhost\r\ns2-basin: {BASIN}\r\n"
        f"content-type: application/octet-stream\r\ncontent-length: {size}\r\n\r\n"
    ).encode()


@asynccontextmanager
async def local_server(folder: Path, **changes: Any) -> AsyncIterator[Server]:
    settings = configuration(location=folder.as_uri(), **changes)
    async with running_server(settings) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        yield server


async def begin_uploads(
    stack: AsyncExitStack, server: Server, count: int, size: int = SIZE
) -> list[H1Client]:
    """Uploads that hold a file each, and still have something to send."""
    clients = []
    for _ in range(count):
        client = await stack.enter_async_context(h1_client(server.port))
        await client.send(head(size) + bytes(WRITE_BUFFER))
        clients.append(client)
    await until(lambda: server.client_limits.request_budget.files.used == count)
    return clients


def wait_for_files(server: Server) -> None:
    """Have uploads wait as long as it takes: a pause of a busy machine shortens no wait of others."""
    server.client_limits.request_budget.file_wait = 60.0


async def pump(client: H1Client, size: int, pause: float) -> None:
    while True:
        await client.send(bytes(size))
        await asyncio.sleep(pause)


def drafts(folder: Path) -> int:
    return len(list((folder / "snapshots" / ".streamfold-drafts").glob("*")))


@pytest.mark.parametrize("sent", [1, WRITE_BUFFER], ids=["at the start", "half way"])
async def test_stalled_uploads_leave_descriptors_for_storage(tmp_path: Path, sent: int) -> None:
    async with (
        attacked(
            tmp_path,
            streams=(STREAM,),
            descriptors=(DESCRIPTORS, DESCRIPTORS),
            options=(f"--local-root={tmp_path / 'data'}",),
        ) as server,
        server.client() as client,
    ):
        assert (await client.get("/ping")).status_code == 200
        with ExitStack() as stack:
            start = head(SIZE) + bytes(sent)
            for _ in range(UPLOADS):
                stack.enter_context(await asyncio.to_thread(server.connect, start))
            await until(lambda: len(server.process.net_connections()) > UPLOADS)
            for _ in range(20):
                answer = await client.post(PATH, content=APPEND, headers=JSON)
                assert answer.status_code == 200, answer.text
            read = await client.get(f"{PATH}?seq_num=0")
            assert len(read.json()["records"]) == 20
            small = await client.put(SNAPSHOT, content=b"small")
            assert small.status_code == 204, small.text
            assert drafts(tmp_path / "data") <= upload_files_max(DESCRIPTORS)


async def test_an_upload_that_waits_for_a_file_gets_that_of_one_that_stalls(tmp_path: Path) -> None:
    async with (
        local_server(tmp_path, upload_files=2, body_timeout=4.0) as server,
        AsyncExitStack() as stack,
    ):
        wait_for_files(server)
        await begin_uploads(stack, server, 2)
        async with h1_client(server.port) as client:
            await client.send(head(SIZE) + bytes(SIZE))
            assert (await client.head())[0] == 204
        assert server.client_limits.request_budget.cut_off >= 1


async def test_an_upload_that_waits_for_a_file_gets_that_of_one_that_trickles(
    tmp_path: Path,
) -> None:
    async with (
        local_server(tmp_path, upload_files=2, body_timeout=2.0) as server,
        AsyncExitStack() as stack,
    ):
        wait_for_files(server)
        # Five times what a body must bring, and a third of it while others wait.
        slow = await begin_uploads(stack, server, 2)
        trickling = [asyncio.create_task(pump(client, 2000, 0.05)) for client in slow]
        async with h1_client(server.port) as client:
            await client.send(head(SIZE) + bytes(SIZE))
            assert (await client.head())[0] == 204
        await _stop(*trickling)


@pytest.mark.parametrize(
    "path", [SNAPSHOT, f"/{BASIN}/{STREAM}/snapshot/{format_offset(0)}"], ids=["s2", "durable"]
)
async def test_an_upload_for_which_no_file_becomes_free_is_asked_to_retry(
    tmp_path: Path, path: str
) -> None:
    async with (
        local_server(tmp_path, upload_files=1, body_timeout=1.0) as server,
        AsyncExitStack() as stack,
    ):
        (good,) = await begin_uploads(stack, server, 1, 128 << 20)
        pumping = asyncio.create_task(pump(good, 64 << 10, 0.01))
        async with h1_client(server.port) as client:
            await client.send(head(SIZE, path) + bytes(SIZE))
            status, headers = await client.head()
            failure = json.loads(await client.body(int(headers["content-length"])))
        assert (status, failure["code"], headers["retry-after"]) == (503, "uploads_busy", "1")
        assert not pumping.done()
        await _stop(pumping)


async def test_an_upload_that_is_written_in_one_step_needs_none_of_the_files(
    tmp_path: Path,
) -> None:
    async with (
        local_server(tmp_path, upload_files=1, body_timeout=60.0) as server,
        AsyncExitStack() as stack,
    ):
        await begin_uploads(stack, server, 1)
        async with h1_client(server.port) as client:
            size = WRITE_BUFFER - 1
            await client.send(head(size) + bytes(size))
            assert (await client.head())[0] == 204
        assert server.client_limits.request_budget.files.used == 1


@pytest.mark.parametrize("leave", ["hang up", "finish"])
async def test_an_upload_gives_its_file_back_when_it_ends(tmp_path: Path, leave: str) -> None:
    async with local_server(tmp_path) as server, AsyncExitStack() as stack:
        (client,) = await begin_uploads(stack, server, 1)
        if leave == "finish":
            await client.send(bytes(SIZE - WRITE_BUFFER))
            assert (await client.head())[0] == 204
        else:
            client.writer.close()
        await until(lambda: server.client_limits.request_budget.files.used == 0)
        assert drafts(tmp_path) == 0


def test_uploads_keep_fewer_files_open_than_are_kept_back_for_storage() -> None:
    assert upload_files_max(256) == 16
    assert upload_files_max(1024) == 64
    assert upload_files_max(1 << 20) == 256


async def _stop(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
