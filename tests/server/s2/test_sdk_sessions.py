"""Sessions and producers through the official Python client."""

from __future__ import annotations

import asyncio

import pytest
from s2_sdk import (
    S2,
    AppendInput,
    BasinConfig,
    Compression,
    ReadLimit,
    ReadUnwrittenError,
    Record,
    S2Basin,
    S2ServerError,
    S2Stream,
    SeqNum,
    SeqNumMismatchError,
    StreamConfig,
)

from streamfold.server.main import Server
from tests.server.conftest import BASIN, STREAM, sdk


def numbered(first: int, count: int = 1) -> AppendInput:
    return AppendInput(
        records=[Record(body=b"%d" % number) for number in range(first, first + count)]
    )


async def test_batches_of_a_session_are_acknowledged_in_order(stream: S2Stream) -> None:
    async with stream.append_session() as session:
        tickets = [await session.submit(numbered(10 * number, 10)) for number in range(50)]
        acks = [await ticket for ticket in tickets]
    assert [ack.start.seq_num for ack in acks] == list(range(0, 500, 10))
    assert [ack.end.seq_num for ack in acks] == list(range(10, 510, 10))
    bodies = [record.body for record in (await stream.read(start=SeqNum(0))).records]
    assert bodies == [b"%d" % number for number in range(500)]


@pytest.mark.parametrize("compression", Compression)
async def test_a_session_survives_every_compression(
    server: Server, compression: Compression
) -> None:
    body = b"again and again " * 10_000
    async with sdk(server, compression=compression) as client:
        stream = client.basin(BASIN).stream(STREAM)
        async with stream.append_session() as session:
            tickets = [
                await session.submit(AppendInput(records=[Record(body=body)])) for _ in range(10)
            ]
            for ticket in tickets:
                await ticket
        got = []
        async with stream.read_session(start=SeqNum(0), limit=ReadLimit(count=10)) as reading:
            async for batch in reading:
                got.extend(batch.records)
    assert [record.body for record in got] == [body] * 10


async def test_the_first_refused_batch_ends_the_session_and_none_after_it_is_applied(
    stream: S2Stream,
) -> None:
    session = stream.append_session()
    first = await session.submit(numbered(0))
    refused = await session.submit(AppendInput(records=[Record(body=b"x")], match_seq_num=9))
    after = await session.submit(numbered(1))
    assert (await first).end.seq_num == 1
    with pytest.raises(SeqNumMismatchError) as mismatch:
        await refused
    assert mismatch.value.expected_seq_num == 1
    with pytest.raises(SeqNumMismatchError):
        await after
    with pytest.raises(SeqNumMismatchError):
        await session.close()
    assert (await stream.check_tail()).seq_num == 1


async def test_a_session_on_a_missing_stream_is_refused(basin: S2Basin) -> None:
    session = basin.stream("missing").append_session()
    ticket = await session.submit(numbered(0))
    with pytest.raises(S2ServerError) as missing:
        await ticket
    assert missing.value.code == "stream_not_found"
    with pytest.raises(S2ServerError):
        await session.close()


async def test_a_session_creates_its_stream_with_the_config_it_brings(
    s2: S2, basin: S2Basin
) -> None:
    await s2.reconfigure_basin(BASIN, config=BasinConfig(create_stream_on_append=True))
    config = StreamConfig(retention_policy=321)
    async with basin.stream("made").append_session(stream_config=config) as session:
        await (await session.submit(numbered(0)))
    assert (await basin.get_stream_config("made")).retention_policy == 321


async def test_a_producer_batches_and_numbers_its_records(stream: S2Stream) -> None:
    async with stream.producer(match_seq_num=0) as producer:
        tickets = [await producer.submit(Record(body=b"%d" % number)) for number in range(200)]
        acks = [await ticket for ticket in tickets]
    assert [ack.seq_num for ack in acks] == list(range(200))
    assert (await stream.check_tail()).seq_num == 200


async def test_a_read_session_gives_what_is_there_and_then_what_comes(stream: S2Stream) -> None:
    await stream.append(numbered(0, 5))
    seen: list[bytes] = []
    async with stream.read_session(start=SeqNum(0)) as reading:
        caught_up = asyncio.ensure_future(reading.caught_up())
        async for batch in reading:
            seen.extend(record.body for record in batch.records)
            if len(seen) == 5:
                break
        following = asyncio.ensure_future(anext(reading))
        assert (await caught_up).seq_num == 5
        await stream.append(numbered(5, 2))
        batch = await following
        assert [record.body for record in batch.records] == [b"5", b"6"]
        assert batch.tail.seq_num == 7
    assert seen == [b"%d" % number for number in range(5)]


async def test_a_stored_batch_that_ends_at_the_tail_carries_the_tail(stream: S2Stream) -> None:
    for _ in range(3):
        await stream.append(numbered(0, 500))
    tails: list[tuple[int, int | None]] = []
    async with stream.read_session(start=SeqNum(0), limit=ReadLimit(count=1500)) as reading:
        async for batch in reading:
            tail = None if batch.tail is None else batch.tail.seq_num
            tails.append((batch.records[-1].seq_num + 1, tail))
    assert len(tails) > 1
    assert [tail for end, tail in tails if end < 1500] == [None] * (len(tails) - 1)
    assert tails[-1] == (1500, 1500)


async def test_a_read_session_with_a_limit_ends_at_the_limit(stream: S2Stream) -> None:
    await stream.append(numbered(0, 10))
    got: list[int] = []
    async with stream.read_session(start=SeqNum(0), limit=ReadLimit(count=7)) as reading:
        async for batch in reading:
            got.extend(record.seq_num for record in batch.records)
    assert got == list(range(7))


async def test_a_read_session_ends_when_nothing_came_for_as_long_as_it_would_wait(
    stream: S2Stream,
) -> None:
    await stream.append(numbered(0, 1))
    got: list[int] = []
    async with stream.read_session(start=SeqNum(0), wait=1) as reading:
        async for batch in reading:
            got.extend(record.seq_num for record in batch.records)
    assert got == [0]


async def test_a_read_session_beyond_the_tail_is_refused(stream: S2Stream) -> None:
    async with stream.read_session(start=SeqNum(5)) as reading:
        with pytest.raises(ReadUnwrittenError) as refused:
            await anext(reading)
    assert refused.value.tail.seq_num == 0


async def test_a_follower_keeps_up_with_a_long_pipelined_append(stream: S2Stream) -> None:
    total = 3000
    await stream.append(numbered(0))
    async with asyncio.TaskGroup() as group:
        following = group.create_task(follow_from(stream, 1, total))
        async with stream.append_session() as session:
            for first in range(1, total + 1, 10):
                await session.submit(numbered(first, 10))
    assert following.result() == [b"%d" % number for number in range(1, total + 1)]


async def follow_from(stream: S2Stream, first: int, count: int) -> list[bytes]:
    bodies: list[bytes] = []
    async with stream.read_session(start=SeqNum(first)) as reading:
        async for batch in reading:
            bodies.extend(record.body for record in batch.records)
            if len(bodies) >= count:
                return bodies
    return bodies


async def test_a_stream_that_is_deleted_ends_its_followers(
    basin: S2Basin, stream: S2Stream
) -> None:
    await stream.append(numbered(0))
    async with stream.read_session(start=SeqNum(0)) as reading:
        await anext(reading)
        following = asyncio.ensure_future(anext(reading))
        await reading.caught_up()
        await basin.delete_stream(STREAM)
        with pytest.raises(S2ServerError) as ended:
            await following
    assert ended.value.code in ("stream_deletion_pending", "stream_not_found")
