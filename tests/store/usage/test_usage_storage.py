"""Reported stored bytes always equal those of the stored chunks."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from streamfold.errors import StreamfoldError
from streamfold.model.configs import StreamConfigLayer
from streamfold.model.metrics import Gauge
from streamfold.model.records import Record, metered_size, trim_record
from streamfold.store import keys, rows
from streamfold.store.engine.engine import Row, commit_rows
from streamfold.store.log import chunks
from streamfold.store.log.shares import Share
from streamfold.store.rows import HeldRow, StreamRow
from streamfold.store.store import StreamStore
from streamfold.store.upkeep.background import Upkeep
from streamfold.store.upkeep.due import Visit
from streamfold.store.usage import held_bytes
from streamfold.store.usage.held_bytes import HeldBytes
from streamfold.store.usage.recorder import UsageKeeper
from streamfold.testing.engine_faults import CommitFault
from tests.proving import seeds
from tests.store import durable_streams
from tests.store.conftest import BASIN, STREAM, Bench, Clock, bodies
from tests.store.durable_streams import fork_of
from tests.store.usage.usage_questions import ONE, held_now, stored_levels

HOUR = 3600
TRIM = metered_size(trim_record(0))


async def basin_held_now(store: StreamStore, clock: Clock) -> float:
    now = clock.now // 1000
    [gauge] = await store.account.basin_metrics(BASIN, "storage", now, now + 1)
    assert isinstance(gauge, Gauge)
    return gauge.values[-1][1]


async def stored_bytes(bench: Bench) -> Counter[int]:
    """Metered bytes of the chunks that are in storage, by stream id."""
    found: Counter[int] = Counter()
    async for page in bench.engine.scan(keys.chunks_start(0), keys.CLEANUPS_START):
        for key, value in page:
            found[int.from_bytes(key[1:9], "big")] += chunks.decode(value).metered
    return found


async def stored_rows(bench: Bench) -> dict[int, int]:
    """What the rows say is held, by stream id."""
    return {
        int.from_bytes(key[1:], "big"): rows.decode(value, HeldRow).size
        async for page in bench.engine.scan(keys.stream_bytes(0), keys.level(0, 0))
        for key, value in page
    }


async def test_appended_records_are_held_at_once(store: StreamStore, clock: Clock) -> None:
    assert await held_now(store, clock) == 0
    await store.append(BASIN, STREAM, bodies("a", "b"))
    assert await held_now(store, clock) == 2 * ONE
    await store.upkeep()
    await store.append(BASIN, STREAM, bodies("c"))
    assert await held_now(store, clock) == 3 * ONE


async def test_trimmed_records_are_held_until_their_chunk_is_deleted(
    store: StreamStore, clock: Clock
) -> None:
    await store.append(BASIN, STREAM, bodies("a", "b"))
    await store.append(BASIN, STREAM, bodies("c", "d"))
    await store.append(BASIN, STREAM, [trim_record(3)])
    await store.upkeep()
    assert await held_now(store, clock) == 2 * ONE + TRIM  # the chunk of c and d has d still
    await store.append(BASIN, STREAM, [trim_record(6)])
    await store.upkeep()
    assert await held_now(store, clock) == 0


async def test_expired_records_are_no_longer_held(store: StreamStore, clock: Clock) -> None:
    await store.create_stream(BASIN, "short", StreamConfigLayer(retention=60))
    await store.append(BASIN, "short", bodies("a"))
    clock.pass_seconds(61)
    await store.append(BASIN, "short", bodies("b"))
    await store.upkeep()
    assert await held_now(store, clock, "short") == ONE
    assert await basin_held_now(store, clock) == ONE


async def test_a_deleted_stream_holds_nothing_and_leaves_nothing(
    store: StreamStore, bench: Bench, clock: Clock
) -> None:
    for _ in range(3):
        await store.append(BASIN, STREAM, bodies("a"))
        await store.upkeep()
        clock.pass_seconds(HOUR)
    assert await stored_levels(bench) == 2
    await store.create_stream(BASIN, "other")
    await store.append(BASIN, "other", bodies("b"))
    await store.delete_stream(BASIN, STREAM)
    await store.upkeep()
    assert list((await stored_rows(bench)).values()) == [ONE]
    assert await stored_levels(bench) == 0
    assert await basin_held_now(store, clock) == ONE
    await store.create_stream(BASIN, STREAM)
    assert await held_now(store, clock) == 0


async def test_a_stream_holds_what_it_was_created_with(
    store: StreamStore, bench: Bench, clock: Clock
) -> None:
    await store.upkeep()
    await durable_streams.create(store, "new", b"content")
    assert await held_now(store, clock, "new") == metered_size(Record(b"content"))
    await store.upkeep()
    assert await basin_held_now(store, clock) == metered_size(Record(b"content"))
    assert (await stored_bytes(bench)).total() == metered_size(Record(b"content"))


async def test_what_is_held_survives_a_stop_without_a_pass_of_upkeep(
    bench: Bench, clock: Clock
) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        await store.append(BASIN, STREAM, bodies("a"))
        await store.upkeep()
        await store.append(BASIN, STREAM, bodies("b", "c"))
    async with bench.store() as store:
        await store.append(BASIN, STREAM, bodies("d"))
        await store.upkeep()
        assert await held_now(store, clock) == 4 * ONE
        assert await basin_held_now(store, clock) == 4 * ONE


async def test_streams_that_were_never_counted_are_counted_from_their_chunks(
    store: StreamStore, bench: Bench, clock: Clock
) -> None:
    await store.append(BASIN, STREAM, bodies("a"))
    await store.upkeep()
    [stream_id] = await stored_rows(bench)
    await commit_rows(
        bench.engine, [(keys.stream_bytes(stream_id), None)]
    )  # as an older version leaves it
    await store.append(BASIN, STREAM, bodies("b"))
    await store.upkeep()
    assert await held_now(store, clock) == 2 * ONE


async def test_a_row_that_cannot_be_read_is_counted_anew(
    store: StreamStore, bench: Bench, clock: Clock
) -> None:
    await store.append(BASIN, STREAM, bodies("a"))
    await store.upkeep()
    [stream_id] = await stored_rows(bench)
    await commit_rows(bench.engine, [(keys.stream_bytes(stream_id), b"\xc1")])
    await store.append(BASIN, STREAM, [trim_record(1)])
    await store.upkeep()
    assert await held_now(store, clock) == TRIM


async def test_more_streams_than_are_remembered_are_counted_from_storage(
    store: StreamStore, bench: Bench, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_bytes, "_FRESH_MAX", 3)
    for n in range(10):
        await store.create_stream(BASIN, f"s{n}")
        await store.append(BASIN, f"s{n}", bodies("a"))
    await store.upkeep()
    await store.upkeep()
    assert await stored_rows(bench) == await stored_bytes(bench)
    assert await basin_held_now(store, clock) == 10 * ONE


async def test_more_streams_than_are_remembered_may_be_appended_to_while_they_are_counted(
    store: StreamStore, bench: Bench, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_bytes, "_FRESH_MAX", 3)
    await store.append(BASIN, STREAM, bodies("a"))
    await store.upkeep()
    [stream_id] = await stored_rows(bench)
    # Before the append: with so few to remember, it makes the background count at once.
    held = bench.engine.hold_read(keys.stream_bytes(stream_id))
    await store.append(BASIN, STREAM, bodies("b"))
    upkeep = asyncio.create_task(store.upkeep())
    await held.answered.wait()
    for n in range(4):
        await store.create_stream(BASIN, f"s{n}")
        await store.append(BASIN, f"s{n}", bodies("a"))
    held.release.set()
    await upkeep
    await store.upkeep()
    assert await stored_rows(bench) == await stored_bytes(bench)
    assert await basin_held_now(store, clock) == 6 * ONE


async def test_appends_to_many_streams_are_counted_while_upkeep_visits_all_streams(
    store: StreamStore, bench: Bench, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = store._supervisor.current
    assert mounted is not None
    names = [f"s{n}" for n in range(300)]  # more than a page
    for name in names:
        await store.create_stream(BASIN, name)
    await store.upkeep()
    monkeypatch.setattr(held_bytes, "_FRESH_MAX", 200)
    visit = Upkeep._visit

    async def appending(upkeep: Upkeep, key: bytes, row: StreamRow, oldest: int) -> Visit:
        await store.append(*keys.stream_names(key), bodies("a"))
        return await visit(upkeep, key, row, oldest)

    with monkeypatch.context() as patched:
        patched.setattr(Upkeep, "_visit", appending)
        clock.pass_seconds(8 * 86_400)  # all streams are due: they keep records for a week
        await store.upkeep()
    assert mounted.usage.held_bytes.forgotten == 0
    assert await basin_held_now(store, clock) == 301 * ONE


async def test_appends_to_many_streams_are_counted_while_all_streams_are_counted_from_storage(
    store: StreamStore, bench: Bench, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = store._supervisor.current
    assert mounted is not None
    held, names = mounted.usage.held_bytes, [f"s{n}" for n in range(300)]  # more than a page
    for name in names:
        await store.create_stream(BASIN, name)
        await store.append(BASIN, name, bodies("a"))
    await store.upkeep()
    monkeypatch.setattr(held_bytes, "_FRESH_MAX", 200)
    count_page = HeldBytes._count_page
    extra = iter(range(1000))

    async def appending(held: HeldBytes, page: list[Row], counting: Any) -> None:
        for name in names:
            await store.append(BASIN, name, bodies("b"))
        late = f"a{next(extra)}"  # in a page that is counted already
        await store.create_stream(BASIN, late)
        await store.append(BASIN, late, bodies("c"))
        await count_page(held, page, counting)

    with monkeypatch.context() as patched:
        patched.setattr(HeldBytes, "_count_page", appending)
        held.by_basin = None  # as after a crash
        await store.upkeep()
    pages = next(extra)
    assert pages > 1
    assert held.forgotten == 0
    assert await basin_held_now(store, clock) == 300 * ONE + pages * 301 * ONE
    assert await stored_rows(bench) == await stored_bytes(bench)


async def test_records_that_were_counted_before_they_were_reported_count_once(
    store: StreamStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = store._supervisor.current
    assert mounted is not None
    shares: list[Share] = []
    monkeypatch.setattr(UsageKeeper, "appended", lambda _, more: shares.extend(more))
    await store.append(BASIN, STREAM, bodies("a"))
    await store.append(BASIN, STREAM, bodies("b"))
    stream_id = shares[0].log.id
    ledger = HeldBytes(mounted.mount, clock)
    assert (await ledger.settle(BASIN, stream_id)).size == 2 * ONE  # storage has them already
    for share in shares:
        ledger.appended(share)
    await store.append(BASIN, STREAM, bodies("c"))
    ledger.appended(shares[2])
    assert (await ledger.settle(BASIN, stream_id)).size == 3 * ONE
    assert (await ledger.settle(BASIN, stream_id)).size == 3 * ONE


@pytest.mark.parametrize("seed", seeds(2, proving=40))
async def test_rows_are_the_same_whether_they_are_scanned_or_read_by_their_keys(
    store: StreamStore, bench: Bench, clock: Clock, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chosen = random.Random(seed)
    monkeypatch.setattr(held_bytes, "_SCANNED_FROM", chosen.choice((1, 2, 5)))
    monkeypatch.setattr(held_bytes, "_SCANNED_GAP", chosen.choice((1, 3)))
    stored = chosen.sample(range(1, 200), 90)
    values = [rows.encode(HeldRow(7, number, 3)) for number in stored]
    values[0] = b"\xc1"
    await commit_rows(bench.engine, list(zip(map(keys.stream_bytes, stored), values, strict=True)))
    assert store._supervisor.current is not None
    held = HeldBytes(store._supervisor.current.mount, lambda: clock.now)
    held._unwritten = {number: HeldRow(8, 9) for number in chosen.sample(range(1, 250), 20)}
    for wanted in (*([number] for number in stored[:3]), chosen.sample(range(1, 250), 120), []):
        found = await held._rows(wanted)
        assert list(found) == wanted
        assert found == {number: await held.row(number) for number in wanted}


@pytest.mark.parametrize("remembered", [4, 100_000])
@pytest.mark.parametrize("seed", seeds(2, proving=40))
async def test_what_is_held_is_what_the_chunks_hold_whatever_happened(
    bench: Bench, clock: Clock, seed: int, remembered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_bytes, "_FRESH_MAX", remembered)
    monkeypatch.setattr(held_bytes, "_SCANNED_FROM", (1, 256)[seed % 2])
    chance = random.Random(seed)
    streams = tuple("abcdefgh")

    async def do_something() -> None:
        stream = chance.choice(streams)
        try:
            if chance.random() < 0.2:
                source = fork_of(chance.choice(streams)) if chance.random() < 0.5 else None
                await durable_streams.create(store, stream, b"content", fork=source)
            await store.ensure_stream(BASIN, stream, StreamConfigLayer(retention=600))
            await _do_something(store, stream, chance, bench, clock)
        except StreamfoldError:
            bench.engine.forget_faults()

    for _ in range(4):
        async with bench.store() as store:
            await store.ensure_basin(BASIN)
            for _ in range(15):
                await asyncio.gather(*[do_something() for _ in range(chance.randrange(1, 6))])
            bench.engine.forget_faults()
    async with bench.store() as store:
        await store.upkeep()
        await store.upkeep()  # after the first one, too many may have been appended to
        known, truth = await stored_rows(bench), await stored_bytes(bench)
        assert {stream: size for stream, size in known.items() if size} == truth
        for stream in streams:
            if row := await _stream_row(bench, stream):
                assert await held_now(store, clock, stream) == truth[row.id]
        assert await basin_held_now(store, clock) == truth.total()


async def _do_something(
    store: StreamStore, stream: str, chance: random.Random, bench: Bench, clock: Clock
) -> None:
    clock.pass_seconds(chance.choice((0, 1, 60, 200)))
    match chance.choice("aaaaaattuuucdf"):
        case "a":
            size = chance.randrange(1, 50)
            await store.append(BASIN, stream, [Record(b"x" * size)] * chance.randrange(1, 4))
        case "t":
            tail = (await store.check_tail(BASIN, stream)).seq_num
            await store.append(BASIN, stream, [trim_record(chance.randrange(tail + 2))])
        case "u":
            await store.upkeep()
        case "c":
            if mounted := store._supervisor.current:
                mounted.usage.held_bytes.by_basin = None  # as after a crash
            await store.upkeep()
        case "d":
            await store.delete_stream(BASIN, stream)
        case "f":
            bench.engine.fail_next(chance.choice((CommitFault.BEFORE, CommitFault.AFTER)))


async def _stream_row(bench: Bench, stream: str) -> StreamRow | None:
    value = await bench.engine.get(keys.stream(BASIN, stream))
    row = rows.decode(value, StreamRow) if value else None
    return row if row and row.deleted_at is None else None
