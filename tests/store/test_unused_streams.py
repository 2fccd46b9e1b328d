"""Streams that are not in use: few bytes in memory, and unchanged when they are used again."""

from __future__ import annotations

import tracemalloc

import pytest

from streamfold.errors import (
    FencingTokenMismatchError,
    InvalidError,
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
from streamfold.store.log.stream_log import StreamLog
from tests.store.conftest import BASIN, Bench, at_rest, bodies
from tests.store.many_streams import (
    CREATING,
    QUIET,
    append_in_turn,
    mount_of,
)

#: Every stream but the last used leaves memory.
ONE_READY = StoreSettings(idle_streams=1, upkeep_interval=1e6, trim_grace=0)


async def test_a_stream_that_left_memory_is_used_again_unchanged(bench: Bench) -> None:
    async with bench.store(ONE_READY) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", [fence_record("token"), *bodies("x", "y")])
        await store.append(BASIN, "a", [trim_record(2)])
        await store.upkeep()
        config = StreamReconfiguration(timestamp_mode=TimestampMode.CLIENT_REQUIRE)
        await store.reconfigure_stream(BASIN, "a", config)
        ref = StreamRef.parse(BASIN, "a")
        with await mount_of(store).lease(ref) as log:
            before = _seen(log)
        await store.append(BASIN, "b", bodies("x"))
        await store.check_tail(BASIN, "b")  # its creation is over
        assert mount_of(store).log_in_memory(ref) is None
        with await mount_of(store).lease(ref) as log:
            assert _seen(log) == before
        with pytest.raises(FencingTokenMismatchError):
            await store.append(BASIN, "a", [Record(b"z", timestamp=1)], fencing_token="other")
        with pytest.raises(InvalidError, match="timestamp"):
            await store.append(BASIN, "a", bodies("without a timestamp"))


async def test_a_stream_that_is_deleted_after_it_left_memory_is_not_used_as_it_was(
    bench: Bench,
) -> None:
    async with bench.store(ONE_READY) as store:
        await store.create_basin(BASIN, CREATING)
        for name in ("b", "c"):
            await store.append(BASIN, name, bodies("x"))
        await store.delete_stream(BASIN, "b")
        await store.append(BASIN, "c", bodies("y"))
        assert (await store.append(BASIN, "b", bodies("new"))).start.seq_num == 0
        await store.upkeep()
        assert (await store.append(BASIN, "b", bodies("newer"))).start.seq_num == 1


async def test_a_log_takes_as_much_memory_as_the_settings_say(bench: Bench) -> None:
    names = [f"stream-{number:05d}-{'x' * 100}" for number in range(2000)]
    async with bench.store(QUIET) as store:
        await store.create_basin(BASIN, CREATING)
        await append_in_turn(store, names)
    async with bench.store(QUIET) as store:
        await store.basin_config(BASIN)
        mount, refs = mount_of(store), [StreamRef.parse(BASIN, name) for name in names]
        await at_rest(store)  # a pass takes memory, too
        tracemalloc.start()
        try:
            for ref in refs:
                (await mount.lease(ref)).release()
            taken = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert all(mount.log_in_memory(ref) is not None for ref in refs)
        assert taken / len(refs) <= 1536


def _seen(log: StreamLog) -> tuple[object, ...]:
    return (log.row, log.durable, log.arrived_at, log._state_row(), log.readable_from)
