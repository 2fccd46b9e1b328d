"""Conformance tests for stream clients.

    class TestMyClient(StreamClientConformance):
        @pytest.fixture
        async def client(self) -> StreamClient:
            return MyClient(...)          # on a new, empty stream for each test

Needs pytest and pytest-asyncio: `pip install streamfold[testing]`.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from streamfold.errors import (
    FencingTokenMismatchError,
    InvalidError,
    PositionUnwrittenError,
    SeqNumMismatchError,
)
from streamfold.extras import needing_extra
from streamfold.follow.clients.client import Appended, StreamClient, StreamRecord
from streamfold.model.records import Header, Record, fence_record, trim_record

with needing_extra("testing"):
    import pytest

#: Seconds. Far more than any step takes, so that a hang fails the test that hangs.
_LIMIT = 30


class StreamClientConformance:
    """Conformance suite. Subclass it in a test module and override the `client` fixture."""

    pytestmark = pytest.mark.asyncio

    @pytest.fixture
    async def client(self) -> StreamClient:
        raise NotImplementedError("override the `client` fixture: return one on an empty stream")

    async def test_an_empty_stream_has_its_tail_at_zero(self, client: StreamClient) -> None:
        assert (await client.check_tail()).seq_num == 0
        assert list(await client.peek(0, 10)) == []

    async def test_appends_get_consecutive_seq_nums(self, client: StreamClient) -> None:
        assert await client.append(_records(b"a", b"b")) == Appended(0, 2)
        assert await client.append(_records(b"c")) == Appended(2, 3)
        assert (await client.check_tail()).seq_num == 3

    async def test_records_read_back_as_they_were_appended(self, client: StreamClient) -> None:
        headers = (Header(b"name", b"value"), Header(b"other", b"\x00\xff"))
        await client.append([Record(b"\x00body\xff", headers), Record()])
        first, second = await _read(client, 0, 2)
        assert (first.seq_num, first.body) == (0, b"\x00body\xff")
        assert [tuple(header) for header in first.headers] == [tuple(h) for h in headers]
        assert (second.seq_num, second.body, list(second.headers)) == (1, b"", [])
        assert second.timestamp >= first.timestamp > 0

    async def test_peek_returns_no_more_than_asked_for(self, client: StreamClient) -> None:
        await client.append(_records(*(b"%d" % number for number in range(10))))
        assert [record.seq_num for record in await client.peek(3, 4)] == [3, 4, 5, 6]
        assert [record.seq_num for record in await client.peek(8, 10)] == [8, 9]
        assert list(await client.peek(10, 5)) == []

    async def test_peek_returns_the_first_mebibyte_and_continues_after_it(
        self, client: StreamClient
    ) -> None:
        for _ in range(5):
            await client.append(_records(b"x" * 300_000))
        assert [record.seq_num for record in await client.peek(0, 5)] == [0, 1, 2]
        assert [record.seq_num for record in await client.peek(3, 2)] == [3, 4]

    async def test_a_read_continues_with_what_is_appended_later(self, client: StreamClient) -> None:
        await client.append(_records(b"a"))
        async with asyncio.timeout(_LIMIT), aclosing(client.read(0)) as session:
            assert [record.body for record in await anext(session)] == [b"a"]
            waiting = asyncio.ensure_future(anext(session))
            await client.append(_records(b"b"))
            assert [record.body for record in await waiting] == [b"b"]

    async def test_a_read_at_the_tail_waits_for_the_first_record(
        self, client: StreamClient
    ) -> None:
        async with asyncio.timeout(_LIMIT), aclosing(client.read(0)) as session:
            waiting = asyncio.ensure_future(anext(session))
            await client.append(_records(b"first"))
            assert [record.body for record in await waiting] == [b"first"]

    async def test_reads_of_many_records_come_in_order_and_in_batches(
        self, client: StreamClient
    ) -> None:
        bodies = [b"%d" % number for number in range(2500)]
        for start in range(0, len(bodies), 1000):
            await client.append(_records(*bodies[start : start + 1000]))
        records = await _read(client, 0, len(bodies))
        assert [record.body for record in records] == bodies
        assert [record.seq_num for record in records] == list(range(len(bodies)))

    async def test_a_read_beyond_the_tail_is_refused(self, client: StreamClient) -> None:
        await client.append(_records(b"a", b"b"))
        with pytest.raises(PositionUnwrittenError) as caught:
            await _read(client, 7, 1)
        assert caught.value.tail_seq_num == 2

    async def test_match_seq_num_lets_an_append_in_only_at_that_seq_num(
        self, client: StreamClient
    ) -> None:
        await client.append(_records(b"a"), match_seq_num=0)
        with pytest.raises(SeqNumMismatchError) as caught:
            await client.append(_records(b"b"), match_seq_num=0)
        assert caught.value.next_seq_num == 1
        await client.append(_records(b"b"), match_seq_num=1)
        assert [record.body for record in await _read(client, 0, 2)] == [b"a", b"b"]

    async def test_of_racing_appends_at_one_seq_num_one_wins(self, client: StreamClient) -> None:
        async def claim(number: int) -> bool:
            try:
                await client.append(_records(b"%d" % number), match_seq_num=0)
            except SeqNumMismatchError:
                return False
            return True

        assert sum(await asyncio.gather(*map(claim, range(8)))) == 1
        assert (await client.check_tail()).seq_num == 1

    async def test_a_fence_refuses_appends_with_another_token(self, client: StreamClient) -> None:
        await client.append([fence_record("new")])
        with pytest.raises(FencingTokenMismatchError) as caught:
            await client.append(_records(b"late"), fencing_token="old")  # noqa: S106
        assert caught.value.current == "new"
        await client.append(_records(b"ok"), fencing_token="new")  # noqa: S106
        await client.append(_records(b"shows none"))

    async def test_a_trim_moves_the_start_of_reads(self, client: StreamClient) -> None:
        await client.append(_records(b"a", b"b", b"c"))
        await client.append([trim_record(2)])
        await _trimmed(client, 2)
        assert [record.seq_num for record in await client.peek(0, 10)] == [2, 3]
        assert [record.seq_num for record in await _read(client, 0, 2)] == [2, 3]
        assert (await client.check_tail()).seq_num == 4

    @pytest.mark.parametrize(
        "batch",
        [
            [],
            [Record(b"x")] * 1001,
            [Record(b"x" * ((1 << 20) - 7))],
            [Record(b"x" * 600_000)] * 2,
            [Record(b"short", (Header(b"", b"trim"),))],
            [Record(b"", (Header(b"", b"unknown"),))],
        ],
        ids=["none", "1001", "1 MiB + 1", "two of 600 kB", "bad trim", "unknown command"],
    )
    async def test_batches_that_break_a_rule_are_refused_whole(
        self, client: StreamClient, batch: list[Record]
    ) -> None:
        with pytest.raises(InvalidError):
            await client.append(batch)
        assert (await client.check_tail()).seq_num == 0

    async def test_the_largest_batch_is_accepted(self, client: StreamClient) -> None:
        await client.append([Record(b"x" * ((1 << 20) - 8))])
        await client.append([Record(b"")] * 1000)
        assert (await client.check_tail()).seq_num == 1001


async def _trimmed(client: StreamClient, first: int) -> None:
    """Wait until a trim takes effect, which may take a few seconds."""
    async with asyncio.timeout(_LIMIT):
        while (await client.peek(0, 1))[0].seq_num < first:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)


async def _read(client: StreamClient, start: int, count: int) -> list[StreamRecord]:
    records: list[StreamRecord] = []
    async with asyncio.timeout(_LIMIT), aclosing(client.read(start)) as session:
        async for batch in session:
            assert batch, "a batch is never empty"
            records += batch
            if len(records) >= count:
                break
    return records


def _records(*bodies: bytes) -> list[Record]:
    return [Record(body) for body in bodies]
