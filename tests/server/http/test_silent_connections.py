"""Idle connections are closed and never block others."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from streamfold.server.http.connections import BUFFER_MAX, CONNECTIONS_MAX, connections_max
from streamfold.server.main import Server, running_server
from streamfold.store.engine.disk_space import memory_total
from tests.server.attacked import LARGE, attacked
from tests.server.conftest import BASIN, STREAM, configuration, until
from tests.server.frames import PATH, SESSION, append_frame, frames_in
from tests.server.raw_h1 import H1Client, h1_client
from tests.server.raw_h2 import h2_client

GIB = 1 << 30
SILENT = 2000 if LARGE else 500
#: Descriptors of the server under attack, soft and hard.
DESCRIPTORS = (1024, 1024) if LARGE else (256, 256)
PING = b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n"
APPEND = '{"records":[{"body":"x"}]}'
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "start",
    [b"", b"PRI * HT", b"GET /ping HTTP/1.1\r\nhost: loc", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
    ids=["nothing", "half a preface", "half a head", "a preface"],
)
async def test_a_connection_without_a_request_is_closed(start: bytes) -> None:
    async with (
        running_server(configuration(first_request=0.5)) as server,
        h1_client(server.port) as client,
    ):
        await client.send(start)
        await client.rest()
        await until(lambda: server.client_limits.connections.closed == 1)


async def test_a_head_that_comes_byte_by_byte_is_not_waited_for() -> None:
    async with (
        running_server(configuration(first_request=0.5)) as server,
        h1_client(server.port) as client,
    ):
        dripping = asyncio.create_task(_drip(client))
        await client.rest()
        dripping.cancel()
        await until(lambda: server.client_limits.connections.closed == 1)


async def _drip(client: H1Client) -> None:
    await client.send(b"GET /ping HTTP/1.1\r\nx: ")
    while True:
        await client.send(b"x")
        await asyncio.sleep(0.02)


async def test_a_connection_that_had_its_answers_is_closed_after_a_while() -> None:
    async with (
        running_server(configuration(idle_connection=0.5)) as server,
        h1_client(server.port) as client,
    ):
        await client.send(PING * 2)  # at once: a busy machine may take longer between them
        for _ in range(2):
            assert (await client.head())[0] == 200
            await client.body(2)
        assert await client.rest() == b""


async def test_a_connection_that_had_an_answer_stays_longer_than_one_that_never_asked() -> None:
    async with (
        running_server(configuration(first_request=0.2, idle_connection=600.0)) as server,
        _served(server) as client,
    ):
        for _ in range(2):
            await _look_twice(server)
            await client.send(PING)
            assert (await client.head())[0] == 200
            await client.body(2)


async def test_sessions_that_are_silent_are_left_alone() -> None:
    # Enough for the first request of the sessions, however busy the machine is.
    settings = configuration(first_request=4.0, idle_connection=0.2, heartbeat=(60.0, 60.0))
    async with running_server(settings) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        async with h2_client(server.port) as h2:
            follower = h2.open("GET", PATH, SESSION, end=True)
            session = h2.open("POST", PATH, SESSION)
            await h2.head(session)
            await _look_twice(server)
            await h2.send(session, append_frame(b"late"), end=True)
            (ack,) = frames_in(bytes((await h2.whole(session)).body))
            assert not ack.terminal
            assert b"late" in await h2.body_of(follower, 10)


async def test_a_silent_connection_is_closed_when_no_descriptor_is_left() -> None:
    async with running_server(configuration(first_request=0.5)) as server, _served(server):
        connections = server.client_limits.connections
        closed = connections.closed
        async with h1_client(server.port) as client:
            # To accept it takes a descriptor.
            await until(lambda: len(connections.by_id) == 2 or connections.closed > closed)
            with _no_descriptor_left():
                await client.rest()
        await _look_twice(server)


@asynccontextmanager
async def _served(server: Server) -> AsyncIterator[H1Client]:
    """A connection that had an answer.

    It is another one if a busy machine paused for longer than the server waits for a first request.
    """
    while True:
        async with h1_client(server.port) as client:
            try:
                await client.send(PING)
                assert (await client.head())[0] == 200
                await client.body(2)
            except (ConnectionError, asyncio.IncompleteReadError):
                continue
            yield client
            return


@contextmanager
def _no_descriptor_left() -> Iterator[None]:
    """Open so many descriptors in this process that it can open none more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is above all that are open: the server looks for connections up to there.
    highest = max(int(entry.name) for entry in os.scandir("/proc/self/fd"))
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 64, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _look_twice(server: Server) -> None:
    """Until a connection that came now and asked for nothing is closed."""
    async with h1_client(server.port) as silent:
        await silent.rest()


async def test_silent_connections_leave_descriptors_for_storage_and_for_others(
    tmp_path: Path,
) -> None:
    async with (
        attacked(tmp_path, streams=(STREAM,), descriptors=DESCRIPTORS) as server,
        server.client() as known,
        server.client() as stranger,
    ):
        assert (await known.post(PATH, content=APPEND, headers=JSON)).status_code == 200
        with ExitStack() as stack:
            for _ in range(SILENT):
                stack.enter_context(server.connect())
            for _ in range(20):
                answer = await known.post(PATH, content=APPEND, headers=JSON)
                assert answer.status_code == 200
            assert server.process.num_fds() < DESCRIPTORS[1]
            assert (await stranger.post(PATH, content=APPEND, headers=JSON)).status_code == 200
            most = (await server.metrics())["streamfold_connections_max"]
            assert most == connections_max(DESCRIPTORS[1], memory_total())


async def test_the_soft_limit_of_descriptors_is_raised_to_the_hard_one(tmp_path: Path) -> None:
    async with attacked(tmp_path, descriptors=(256, 2048)) as server:
        assert (await server.metrics())["streamfold_connections_max"] == connections_max(
            2048, memory_total()
        )


def test_connections_are_fewer_than_descriptors() -> None:
    assert connections_max(256, GIB) == 192
    assert connections_max(1024, GIB) == 768
    assert connections_max(1 << 20, 8 * GIB) == CONNECTIONS_MAX


def test_the_buffers_of_all_connections_fit_half_of_the_memory() -> None:
    most = connections_max(1 << 20, GIB)
    assert most == 4096
    assert 2 * BUFFER_MAX * most == GIB // 2


async def test_open_connections_are_counted() -> None:
    async with running_server(configuration()) as server, h1_client(server.port) as client:
        await client.send(PING)
        await client.head()
        await until(lambda: len(server.client_limits.connections.by_id) == 1)
