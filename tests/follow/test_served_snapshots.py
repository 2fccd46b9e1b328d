"""Snapshots stored by the server, through the same library as those on blob stores."""

from __future__ import annotations

import asyncio

import pytest
from s2_sdk import AppendInput, Record

from streamfold.errors import (
    BlobNotFoundError,
    BlobOutcomeUnknownError,
    BlobUnavailableError,
    InvalidError,
    UnauthenticatedError,
)
from streamfold.follow import (
    MemoryStream,
    Outcome,
    Placement,
    RetentionRules,
    ServerSnapshots,
    SnapshotInfo,
    SnapshotTaker,
    external,
    follow,
)
from streamfold.follow.clients.client import StreamRecord
from streamfold.model.access_tokens import Secret
from streamfold.server.main import Server, running_server
from tests.ports import free_port
from tests.sdk import sdk_client
from tests.server.conftest import configuration

BASIN, STREAM = "follow-served", "team/counts"


@pytest.fixture
async def server(server: Server) -> Server:
    """With a stream that has a slash in its name."""
    await server.store.create_basin(BASIN)
    await server.store.create_stream(BASIN, STREAM)
    return server


def count(state: dict[str, int], record: StreamRecord) -> dict[str, int]:
    name = record.body.decode()
    state[name] = state.get(name, 0) + 1
    return state


def new() -> dict[str, int]:
    return {}


async def test_a_state_is_restored_from_the_server_and_followed(server: Server) -> None:
    store = ServerSnapshots(server.url, BASIN, STREAM)
    outside = external(store)
    async with sdk_client(server.url) as s2:
        stream = s2.basin(BASIN).stream(STREAM)
        await stream.append(AppendInput([Record(b"apple"), Record(b"pear"), Record(b"apple")]))
        async with SnapshotTaker(stream, fold=count, initial=new, snapshots=outside) as taker:
            assert (await taker.take()).outcome is Outcome.TAKEN
        await stream.append(AppendInput([Record(b"plum")]))
        async with follow(stream, fold=count, initial=new, snapshots=outside) as state:
            assert state.plan.snapshot is not None
            assert state.plan.snapshot.cursor == 3
            assert state.value == {"apple": 2, "pear": 1, "plum": 1}
            await stream.append(AppendInput([Record(b"plum")]))
            async for change in state:
                assert change.body == b"plum"
                break
            assert state.value["plum"] == 2


async def test_of_two_that_save_at_one_cursor_one_learns_that_it_was_late(server: Server) -> None:
    store = ServerSnapshots(server.url, BASIN, STREAM)
    assert await store.save(0, "json", b"first")
    assert not await store.save(0, "json", b"second")
    [info] = await store.list()
    assert (info.cursor, info.codec, info.size) == (0, "json", 5)
    assert b"".join([piece async for piece in store.load(info)]) == b"first"


async def test_refusals_of_the_server_are_reported(server: Server) -> None:
    store = ServerSnapshots(server.url, BASIN, STREAM)
    with pytest.raises(InvalidError, match="409"):
        await store.save(7, "json", b"beyond the tail")
    with pytest.raises(BlobNotFoundError):
        await ServerSnapshots(server.url, BASIN, "missing").list()
    assert await store.save(0, "json", b"x")
    [info] = await store.list()
    with pytest.raises(InvalidError, match="cannot be deleted"):
        await store.delete(info)


@pytest.mark.parametrize("keeping", [RetentionRules(keep=2), RetentionRules(max_age=60)])
def test_pruning_snapshots_on_a_server_is_refused_before_one_is_taken(
    keeping: RetentionRules,
) -> None:
    outside = external(ServerSnapshots("http://127.0.0.1:1", BASIN, STREAM))
    with pytest.raises(InvalidError, match="leave out keep and max_age"):
        SnapshotTaker(MemoryStream(), fold=count, initial=new, snapshots=outside, keeping=keeping)


async def test_a_server_that_is_away_is_unavailable() -> None:
    away = ServerSnapshots(f"http://127.0.0.1:{free_port()}", BASIN, STREAM)
    with pytest.raises(BlobUnavailableError):
        await away.list()
    with pytest.raises(BlobUnavailableError):
        await away.save(0, "json", b"x")


@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_a_failed_read_may_be_repeated_and_a_failed_save_is_of_unknown_outcome(
    status: int,
) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d Failed\r\nContent-Length: 0\r\n\r\n" % status)
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        store = ServerSnapshots(f"http://127.0.0.1:{port}", BASIN, STREAM)
        with pytest.raises(BlobUnavailableError):
            await store.list()
        info = SnapshotInfo(Placement.EXTERNAL, "3", 3, "json", 1, 0)
        with pytest.raises(BlobUnavailableError):
            await store.unpack(info)
        unknown = BlobUnavailableError if status == 503 else BlobOutcomeUnknownError
        with pytest.raises(unknown):
            await store.save(0, "json", b"x")


async def test_a_wrong_token_is_reported_without_being_shown() -> None:
    root = Secret("a-root-token-that-is-long-enough")
    async with running_server(configuration(root_token=root)) as server:
        with pytest.raises(UnauthenticatedError) as refusal:
            await ServerSnapshots(server.url, BASIN, STREAM, "wrong-token").list()
        assert "wrong-token" not in str(refusal.value)


@pytest.mark.parametrize("endpoint", ["localhost:80", "ftp://host", "http://"])
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    with pytest.raises(InvalidError, match="endpoint"):
        ServerSnapshots(endpoint, BASIN, STREAM)
