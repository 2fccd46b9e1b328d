from __future__ import annotations

import asyncio
import sys
from types import FrameType

import pytest

from streamfold.errors import StreamNotFoundError
from streamfold.model.configs import INFINITE, StreamConfigLayer, StreamReconfiguration
from streamfold.model.records import Record, trim_record
from streamfold.store import keys
from streamfold.store.read.requests import ReadRequest, from_seq_num
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore
from streamfold.store.upkeep import memory_release
from tests.store.conftest import (
    BASIN,
    EPOCH,
    STREAM,
    Bench,
    Clock,
    at,
    bodies,
    incompressible,
    submit,
)

EVERYTHING = ReadRequest(from_seq_num(0))


async def first_seq_num(store: StreamStore, stream: str) -> int:
    return (await store.read(BASIN, stream, EVERYTHING)).first_seq_num


async def stored_chunks(bench: Bench) -> int:
    scan = bench.engine.scan(keys.chunks_start(0), keys.CLEANUPS_START)
    return len([row async for page in scan for row in page])


async def test_records_are_forgotten_when_they_are_older_than_the_retention(
    store: StreamStore, clock: Clock, bench: Bench
) -> None:
    await store.create_stream(BASIN, "week", StreamConfigLayer(retention=60))
    await store.create_stream(BASIN, "ever", StreamConfigLayer(retention=INFINITE))
    for stream in ("week", "ever"):
        await store.append(BASIN, stream, bodies("a", "b"))
    clock.pass_seconds(59)
    for stream in ("week", "ever"):
        await store.append(BASIN, stream, bodies("c"))
    await store.upkeep()
    assert await first_seq_num(store, "week") == 0
    clock.pass_seconds(2)
    await store.upkeep()
    assert await first_seq_num(store, "week") == 2
    assert await first_seq_num(store, "ever") == 0
    assert await stored_chunks(bench) == 3
    clock.pass_seconds(1000)
    await store.upkeep()
    assert await store.check_tail(BASIN, "week") == at(3, EPOCH + 59_000)
    assert await stored_chunks(bench) == 2


async def test_a_shorter_retention_takes_effect_on_what_is_there(
    store: StreamStore, clock: Clock, bench: Bench
) -> None:
    await store.append(BASIN, STREAM, bodies("a"))
    clock.pass_seconds(100)
    await store.upkeep()
    assert await stored_chunks(bench) == 1
    await store.reconfigure_stream(BASIN, STREAM, StreamReconfiguration(retention=10))
    await store.append(BASIN, STREAM, bodies("b"))
    await store.upkeep()
    assert await first_seq_num(store, STREAM) == 1


async def test_retention_counts_from_arrival_not_from_the_client_s_timestamp(
    store: StreamStore, clock: Clock
) -> None:
    await store.create_stream(BASIN, "old", StreamConfigLayer(retention=60))
    await store.append(BASIN, "old", [Record(b"a", timestamp=1)])
    clock.pass_seconds(30)
    await store.upkeep()
    assert await first_seq_num(store, "old") == 0


async def test_trimmed_records_are_deleted_from_storage_but_not_the_rest_of_their_chunk(
    store: StreamStore, bench: Bench
) -> None:
    for _ in range(4):
        await store.append(BASIN, STREAM, bodies("a", "b", "c"))
    await store.append(BASIN, STREAM, [trim_record(7)])
    await store.upkeep()
    assert await stored_chunks(bench) == 3  # two of four went; the third holds record 7
    batch = await store.read(BASIN, STREAM, EVERYTHING)
    assert [int(record.seq_num) for record in batch.records()] == list(range(7, 13))


async def test_clean_up_is_taken_up_after_a_restart(bench: Bench, clock: Clock) -> None:
    never = StoreSettings(upkeep_interval=1e6, trim_grace=0)
    async with bench.store(never) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        for _ in range(5):
            await store.append(BASIN, STREAM, bodies("a"))
        bench.engine.hold()
        ticket = await submit(store, [trim_record(6)])
        bench.engine.resume()
        await ticket
    async with bench.store(never) as store:
        await store.upkeep()
        assert await stored_chunks(bench) == 0
        cleanups = bench.engine.scan(keys.CLEANUPS_START, keys.CLEANUPS_END)
        assert [row async for page in cleanups for row in page] == []


async def test_an_empty_stream_is_deleted_once_it_has_been_empty_for_long_enough(
    store: StreamStore, clock: Clock
) -> None:
    layer = StreamConfigLayer(retention=60, delete_on_empty_secs=100)
    await store.create_stream(BASIN, "brief", layer)
    clock.pass_seconds(50)
    await store.append(BASIN, "brief", bodies("a"))
    clock.pass_seconds(99)
    await store.upkeep()
    assert (await store.check_tail(BASIN, "brief")).seq_num == 1
    clock.pass_seconds(2)
    await store.upkeep()
    await store.upkeep()
    with pytest.raises(StreamNotFoundError):
        await store.check_tail(BASIN, "brief")
    assert (await store.check_tail(BASIN, STREAM)).seq_num == 0


async def test_a_stream_that_holds_records_is_not_deleted_as_empty(
    store: StreamStore, clock: Clock
) -> None:
    layer = StreamConfigLayer(retention=INFINITE, delete_on_empty_secs=10)
    await store.create_stream(BASIN, "kept", layer)
    await store.append(BASIN, "kept", bodies("a"))
    clock.pass_seconds(10_000)
    await store.upkeep()
    assert await first_seq_num(store, "kept") == 0


async def test_idle_streams_leave_memory_and_come_back_unchanged(bench: Bench) -> None:
    async with bench.store(StoreSettings(idle_streams=3)) as store:
        await store.create_basin(BASIN)
        for number in range(10):
            await store.create_stream(BASIN, f"s{number}")
            await store.append(BASIN, f"s{number}", bodies(str(number)))
        for number in range(10):
            ack = await store.append(BASIN, f"s{number}", bodies("again"))
            assert ack.start.seq_num == 1
            batch = await store.read(BASIN, f"s{number}", EVERYTHING)
            assert [record.body for record in batch.records()] == [str(number).encode(), b"again"]


async def test_streams_that_push_each_other_out_of_memory_keep_their_order(bench: Bench) -> None:
    async with bench.store(StoreSettings(idle_streams=1)) as store:
        await store.create_basin(BASIN)
        names = [f"s{number}" for number in range(8)]
        for name in names:
            await store.create_stream(BASIN, name)

        async def write(name: str) -> list[int]:
            acks = [await store.append(BASIN, name, bodies(str(n))) for n in range(25)]
            return [int(ack.start.seq_num) for ack in acks]

        for starts in await asyncio.gather(*(write(name) for name in names)):
            assert starts == list(range(25))


async def test_opening_a_stream_costs_the_same_however_many_are_in_memory(bench: Bench) -> None:
    few, many, opened = 30, 600, 50
    async with bench.store() as store:
        await store.create_basin(BASIN)
        names = [f"s{number}" for number in range(many + opened)]
        await asyncio.gather(*(store.create_stream(BASIN, name) for name in names))

    async def checked(idle_streams: int) -> int:
        """How many logs are checked while `opened` streams are opened beyond those in memory."""
        calls = 0

        def count(frame: FrameType, event: str, _: object) -> None:
            nonlocal calls
            calls += event == "call" and frame.f_code.co_qualname == "StreamLog.idle"

        async with bench.store(StoreSettings(idle_streams=idle_streams)) as store:
            for name in names[:idle_streams]:
                await store.check_tail(BASIN, name)
            sys.setprofile(count)
            try:
                for name in names[idle_streams : idle_streams + opened]:
                    await store.check_tail(BASIN, name)
            finally:
                sys.setprofile(None)
        return calls

    assert opened <= await checked(many) <= 2 * await checked(few)


async def test_a_store_that_is_no_longer_written_returns_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims: list[int] = []
    monkeypatch.setattr(memory_release, "trim_memory", lambda: trims.append(0))
    monkeypatch.setattr(memory_release, "_INTERVAL", 3600.0)  # the test checks, and nobody else
    batch = [Record(incompressible(10_000, number)) for number in range(100)]
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        mounted = store._supervisor.current
        assert mounted is not None
        recent, release = mounted.mount.recent, mounted.memory_release
        for _ in range(30):
            await store.append(BASIN, STREAM, batch)
        await release.check()
        assert (trims, recent._size > 20 << 20) == ([], True)
        await release.check()
        assert (trims, recent._size <= 16 << 20) == ([0], True)
        counts = []
        for _ in range(11):
            await release.check()
            counts.append(len(trims))
        assert counts == [2, 3, 4, 5, 6, 6, 6, 6, 6, 6, 7]
        request = ReadRequest(from_seq_num(0))
        assert (await store.read(BASIN, STREAM, request)).records()[0].body == batch[0].body
