"""Streams that are not in use: kept ready, or in few bytes, and unchanged when they are used again."""

from __future__ import annotations

import tracemalloc

import pytest

from streamfold.errors import (
    FencingTokenMismatchError,
    InvalidError,
    StreamDeletingError,
)
from streamfold.model.configs import (
    StreamReconfiguration,
    TimestampMode,
)
from streamfold.model.names import StreamRef
from streamfold.model.records import Record, fence_record, trim_record
from streamfold.store import (
    StoreSettings,
)
from streamfold.store import mount as mount_module
from streamfold.store.log.stream_log import StreamLog
from tests.store.conftest import BASIN, Bench, bodies
from tests.store.many_streams import (
    CREATING,
    QUIET,
    append_in_turn,
    mount_of,
    watch,
)

#: Every stream but the last used is idle.
ONE_READY = StoreSettings(idle_streams=1, upkeep_interval=1e6, trim_grace=0)


async def test_an_idle_stream_is_used_again_without_a_read_and_unchanged(bench: Bench) -> None:
    async with bench.store(ONE_READY) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", [fence_record("token"), *bodies("x", "y")])
        await store.append(BASIN, "a", [trim_record(2)])
        await store.upkeep()
        config = StreamReconfiguration(timestamp_mode=TimestampMode.CLIENT_REQUIRE)
        await store.reconfigure_stream(BASIN, "a", config)
        ref = StreamRef.parse(BASIN, "a")
        before = _seen(mount_of(store).log_in_memory(ref))
        await store.append(BASIN, "b", bodies("x"))
        assert ref not in mount_of(store)._logs
        watched = watch(bench)
        after = _seen(mount_of(store).log_in_memory(ref))
        assert after == before
        with pytest.raises(FencingTokenMismatchError):
            await store.append(BASIN, "a", [Record(b"z", timestamp=1)], fencing_token="other")
        with pytest.raises(InvalidError, match="timestamp"):
            await store.append(BASIN, "a", bodies("without a timestamp"))
        assert watched.read_by_callers == []


async def test_an_idle_stream_that_is_reconfigured_or_deleted_is_not_used_as_it_was(
    bench: Bench,
) -> None:
    async with bench.store(ONE_READY) as store:
        await store.create_basin(BASIN, CREATING)
        for name in ("a", "b", "c"):
            await store.append(BASIN, name, bodies("x"))
        assert len(mount_of(store).idle) == 2
        required = StreamReconfiguration(timestamp_mode=TimestampMode.CLIENT_REQUIRE)
        await store.reconfigure_stream(BASIN, "a", required)
        with pytest.raises(InvalidError, match="timestamp"):
            await store.append(BASIN, "a", bodies("without a timestamp"))
        await store.delete_stream(BASIN, "b")
        await store.append(BASIN, "c", bodies("y"))
        with pytest.raises(StreamDeletingError):
            await store.append(BASIN, "b", bodies("y"))
        await store.upkeep()
        assert (await store.append(BASIN, "b", bodies("new"))).start.seq_num == 0


async def test_what_an_idle_stream_takes_is_counted(bench: Bench) -> None:
    settings = StoreSettings(idle_streams=1, upkeep_interval=1e6)
    async with bench.store(settings) as store:
        await store.create_basin(BASIN, CREATING)
        await append_in_turn(store, [f"warm-{number:05d}" for number in range(200)])
        idle = mount_of(store).idle
        counted = idle._size
        copies = [StreamRef.parse(BASIN, f"copy-{number:05d}") for number in range(2000)]
        log = mount_of(store).log_in_memory(StreamRef.parse(BASIN, "warm-00007"))
        assert log is not None
        tracemalloc.start()
        try:
            for log.ref in copies:
                idle.add(log)
            taken = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        log.ref = StreamRef.parse(BASIN, "warm-00007")
        assert taken <= 1.1 * (idle._size - counted)
        assert idle._size / len(idle) < 600


async def test_a_log_takes_no_more_memory_than_is_counted(bench: Bench) -> None:
    async with bench.store(QUIET) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "warm", bodies("a"))
        mount = mount_of(store)
        log = mount.log_in_memory(StreamRef.parse(BASIN, "warm"))
        assert log is not None
        for number in range(2000):
            log.ref = StreamRef.parse(BASIN, f"copy-{number:05d}-{'x' * 100}")
            mount.idle.add(log)
        log.ref = StreamRef.parse(BASIN, "warm")
        tracemalloc.start()
        try:
            for number in range(2000):
                ref = StreamRef.parse(BASIN, f"copy-{number:05d}-{'x' * 100}")
                assert mount.log_in_memory(ref) is not None
            taken = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert len(mount.idle) == 0
        assert taken / 2000 <= mount_module._LOG_BYTES


async def test_streams_stay_ready_for_use_while_idle_ones_leave_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    always, room = 3, 20_000
    monkeypatch.setattr(mount_module, "_READY_ALWAYS", always)
    names = [f"s-{number:03d}" for number in range(100)]
    async with bench.store(StoreSettings(idle_bytes=room, upkeep_interval=1e6)) as store:
        await store.create_basin(BASIN, CREATING)
        logs, idle = mount_of(store)._logs, mount_of(store).idle
        seen = set()
        for turn in range(2):
            for number, name in enumerate(names):
                ack = await store.append(BASIN, name, bodies(name))
                assert ack.end.seq_num == turn + 1
                further = (len(logs) - always) * mount_module._LOG_BYTES
                assert max(0, further) + idle._size <= room
                assert len(logs) >= min(always, turn * 100 + number + 1)
                if turn == 0 and number < room // mount_module._LOG_BYTES:
                    assert len(idle) == 0
                seen.add(len(logs) > always)
        assert seen == {True, False}
        assert len(logs) + len(idle) < len(names)  # the others are in storage


def _seen(log: StreamLog | None) -> tuple[object, ...]:
    assert log is not None
    return (log.row, log.durable, log.arrived_at, log.state_row(), log.readable_from)
