"""All stream clients give the same guarantees."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from s2_sdk import S2, Retry

from streamfold.errors import NotFoundError, OutcomeUnknownError, RetryLaterError
from streamfold.follow import MemoryStream, StreamClient
from streamfold.follow.clients.client import EncodedBatch
from streamfold.follow.clients.embedded import EmbeddedClient
from streamfold.follow.clients.s2 import S2Client
from streamfold.model.records import Record, fence_record
from streamfold.records.protobuf import delimited
from streamfold.store import ReadRequest, from_seq_num, open_store
from streamfold.testing.faults import ScriptedFaults
from streamfold.testing.stream_client_kit import StreamClientConformance
from streamfold.testing.stream_faults import FaultyStream
from tests.follow.conftest import BASIN, QUICK_TRIMS, STREAM
from tests.sdk import sdk_client


class TestMemoryStream(StreamClientConformance):
    @pytest.fixture
    async def client(self) -> StreamClient:
        return MemoryStream()


class TestFaultyStreamWithoutFaults(StreamClientConformance):
    @pytest.fixture
    async def client(self) -> StreamClient:
        return FaultyStream(MemoryStream(), ScriptedFaults())


@pytest.fixture
async def embedded() -> AsyncIterator[StreamClient]:
    async with open_store("memory:", QUICK_TRIMS) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        yield EmbeddedClient(store.stream(BASIN, STREAM), lambda at: ReadRequest(from_seq_num(at)))


class TestEmbeddedStore(StreamClientConformance):
    @pytest.fixture
    async def client(self, embedded: StreamClient) -> StreamClient:
        return embedded


class TestS2(StreamClientConformance):
    @pytest.fixture
    async def client(self, s2_client: S2Client) -> StreamClient:
        return s2_client


async def test_a_stream_that_does_not_exist_is_not_found(s2: S2) -> None:
    client = S2Client(s2.basin(BASIN).stream("absent"))
    with pytest.raises(NotFoundError, match="absent"):
        await client.check_tail()
    with pytest.raises(NotFoundError, match="absent"):
        await client.append([Record(b"x")])


async def test_an_append_that_was_not_received_certainly_had_no_effect() -> None:
    once = Retry(max_attempts=1)
    async with sdk_client("http://127.0.0.1:1", retry=once) as s2:
        client = S2Client(s2.basin(BASIN).stream(STREAM))
        with pytest.raises(RetryLaterError):
            await client.check_tail()
        with pytest.raises(RetryLaterError):
            await client.append([Record(b"x")])


async def test_an_append_whose_connection_breaks_has_an_unknown_outcome() -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(24)  # the HTTP/2 preface: the client is talking by now
        writer.write(bytes.fromhex("000000040000000000"))  # empty SETTINGS
        await reader.read(1 << 16)
        writer.close()
        await writer.wait_closed()

    listener = await asyncio.start_server(swallow, "127.0.0.1", 0)
    endpoint = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    once = Retry(max_attempts=1)
    async with listener, sdk_client(endpoint, retry=once) as s2:
        client = S2Client(s2.basin(BASIN).stream(STREAM))
        with pytest.raises(OutcomeUnknownError):
            await client.append([Record(b"x")])


@pytest.mark.parametrize("body", [b"the same text " * 20, random.Random(1).randbytes(300)])
async def test_large_encoded_appends_arrive_as_they_are(s2_client: S2Client, body: bytes) -> None:
    part = EncodedBatch.of([Record(b"%d " % number + body) for number in range(500)])
    before = (await s2_client.append([fence_record("us")])).end
    end = await s2_client.append_encoded([part] * 3, match_seq_num=before, fencing_token="us")
    found: list[bytes] = []
    while before + len(found) < end:
        found += [r.body for r in await s2_client.peek(before + len(found), 1000)]
    assert found == [b"%d " % number + body for number in range(500)] * 3


async def test_encoded_appends_that_are_compressed_in_pieces_keep_their_order(
    s2_client: S2Client,
) -> None:
    rng = random.Random(2)
    bodies = [b"%d " % at + bytes(rng.choice((0, 10, 60_000, 900_000))) for at in range(40)]
    assert sum(map(len, bodies)) > 4 << 20
    parts = [EncodedBatch.of([Record(body)]) for body in bodies]
    before = (await s2_client.append([fence_record("us")])).end
    end = await s2_client.append_encoded(parts, match_seq_num=before, fencing_token="us")
    assert end == before + len(bodies)
    found: list[bytes] = []
    while before + len(found) < end:
        found += [r.body for r in await s2_client.peek(before + len(found), 1000)]
    assert found == bodies


@pytest.mark.parametrize(
    ("count", "message"),
    [(1, "acknowledged an append up to 0"), (2, "the server ended the session")],
)
async def test_encoded_appends_without_an_acknowledgement_have_an_unknown_outcome(
    count: int, message: str
) -> None:
    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(24)  # the HTTP/2 preface
        writer.write(bytes.fromhex("000000040000000000"))  # empty SETTINGS
        await reader.readuntil(b"body")  # the client has sent its request by now
        writer.write(bytes.fromhex("00000101050000000188"))  # the end of stream 1, with status 200
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(end, "127.0.0.1", 0)
    endpoint = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    batch = EncodedBatch(1, 12, delimited(b"\x0a", delimited(b"\x1a", b"body")))
    async with listener, sdk_client(endpoint) as s2:
        client = S2Client(s2.basin(BASIN).stream(STREAM))
        with pytest.raises(OutcomeUnknownError, match=message):
            await client.append_encoded([batch] * count, match_seq_num=0, fencing_token="")
