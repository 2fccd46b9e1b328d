"""Usage counts operations and stored bytes exactly."""

from __future__ import annotations

import pytest

from streamfold.errors import BasinNotFoundError, InvalidError, StreamNotFoundError
from streamfold.model.access_tokens import Right
from streamfold.model.configs import StorageClass, StreamConfigLayer
from streamfold.model.metrics import Accumulation, Gauge, Interval, Label, Metric, Point, Unit
from streamfold.model.records import metered_size, trim_record
from streamfold.store import keys
from streamfold.store.engine.engine import commit_rows
from streamfold.store.read.requests import ReadRequest, from_seq_num
from streamfold.store.store import StreamStore
from streamfold.store.usage import recorder
from streamfold.testing.engine_faults import CommitFault
from tests.store.conftest import BASIN, STREAM, Bench, Clock, bodies
from tests.store.usage.usage_questions import NOW, ONE, stored

DAY = 86_400


def series(metrics: tuple[Metric, ...]) -> dict[str, list[Point]]:
    """Points by the name of their series, without those that are zero."""
    found: dict[str, list[Point]] = {}
    for metric in metrics:
        assert isinstance(metric, Accumulation | Gauge)
        found[metric.name] = [point for point in metric.values if point[1]]
    return found


async def of_basin(store: StreamStore, metric_set: str, seconds: int) -> dict[str, list[Point]]:
    return series(await store.account.basin_metrics(BASIN, metric_set, NOW, NOW + seconds))


async def of_account(store: StreamStore, metric_set: str, end: int) -> tuple[Metric, ...]:
    return await store.account.account_metrics(metric_set, NOW, end)


async def test_appends_count_by_storage_class_once_they_are_durable(
    store: StreamStore, clock: Clock
) -> None:
    await store.create_stream(BASIN, "slow", StreamConfigLayer(storage_class=StorageClass.STANDARD))
    await store.append(BASIN, STREAM, bodies("a", "b"))
    await store.append(BASIN, STREAM, bodies("c"))
    await store.append(BASIN, "slow", bodies("d"))
    clock.pass_seconds(61)
    await store.append(BASIN, STREAM, bodies("e"))
    assert await of_basin(store, "append-ops", 120) == {
        "standard": [(NOW, 1)],
        "express": [(NOW, 2), (NOW + 60, 1)],
    }
    assert await of_basin(store, "append-throughput", 120) == {
        "append-throughput": [(NOW, 4 * ONE), (NOW + 60, ONE)]
    }


async def test_appends_that_fail_do_not_count(store: StreamStore, bench: Bench) -> None:
    with pytest.raises(InvalidError):
        await store.append(BASIN, STREAM, [])
    bench.engine.fail_next(CommitFault.BEFORE)
    with pytest.raises(Exception, match="injected"):
        await store.append(BASIN, STREAM, bodies("a"))
    assert await of_basin(store, "append-ops", 60) == {"standard": [], "express": []}


async def test_reads_count_by_kind_and_by_what_they_return(store: StreamStore) -> None:
    await store.append(BASIN, STREAM, bodies("a", "b"))
    await store.read(BASIN, STREAM, ReadRequest(from_seq_num(0)))
    await store.read(BASIN, STREAM, ReadRequest(from_seq_num(1), count=1))
    async with store.follow(BASIN, STREAM, ReadRequest(from_seq_num(0), wait=0)) as reading:
        assert [batch.count async for batch in reading] == [2]
    assert await of_basin(store, "read-ops", 60) == {
        "unary": [(NOW, 2)],
        "streaming": [(NOW, 1)],
    }
    assert await of_basin(store, "read-throughput", 60) == {"read-throughput": [(NOW, 5 * ONE)]}


async def test_operations_count_for_the_account_or_for_their_basin(store: StreamStore) -> None:
    usage = store.usage
    usage.record_operation(Right.LIST_BASINS)
    usage.record_operation(Right.CREATE_BASIN, BASIN)
    usage.record_operation(Right.CREATE_BASIN, "another-basin")
    usage.record_operation(Right.CREATE_STREAM, BASIN)
    usage.record_operation(Right.CHECK_TAIL, BASIN)
    usage.record_operation(Right.APPEND, BASIN)  # counted when it is durable
    usage.record_operation(Right.CREATE_STREAM, "another-basin")
    assert series(await of_account(store, "account-ops", NOW + 1)) == {
        "list-basins": [(NOW, 1)],
        "create-basin": [(NOW, 2)],
    }
    assert await of_basin(store, "basin-ops", 1) == {
        "create-stream": [(NOW, 1)],
        "check-tail": [(NOW, 1)],
    }


async def test_every_operation_but_appends_and_reads_counts_somewhere(store: StreamStore) -> None:
    for operation in Right:
        store.usage.record_operation(operation, BASIN)
    counted = {
        *series(await of_account(store, "account-ops", NOW + 1)),
        *await of_basin(store, "basin-ops", 1),
    }
    assert counted == set(Right) - {"append", "read", "trim", "fence"}


async def test_amounts_are_summed_up_by_the_interval_asked_for(
    store: StreamStore, clock: Clock
) -> None:
    for _ in range(30):
        store.usage.record_read(BASIN, 10)
        clock.pass_seconds(3600)
    span = (NOW, NOW + 30 * 3600)
    [by_day] = await store.account.basin_metrics(BASIN, "read-throughput", *span, Interval.DAY)
    assert by_day == Accumulation(
        "read-throughput", Unit.BYTES, Interval.DAY, ((NOW, 240), (NOW + DAY, 60))
    )
    [by_hour] = await store.account.basin_metrics(BASIN, "read-throughput", *span, Interval.HOUR)
    assert isinstance(by_hour, Accumulation)
    assert [amount for _, amount in by_hour.values] == [10] * 30
    [by_minute] = await store.account.basin_metrics(BASIN, "read-throughput", *span)
    assert isinstance(by_minute, Accumulation)
    assert (by_minute.interval, len(by_minute.values)) == (Interval.MINUTE, 30 * 60)
    assert sum(amount for _, amount in by_minute.values) == 300


async def test_only_the_time_asked_for_is_reported(store: StreamStore, clock: Clock) -> None:
    for _ in range(4):
        store.usage.record_read(BASIN, 1)
        clock.pass_seconds(60)
    metrics = await store.account.basin_metrics(BASIN, "read-throughput", NOW + 60, NOW + 180)
    assert series(metrics) == {"read-throughput": [(NOW + 60, 1), (NOW + 120, 1)]}
    assert await of_basin(store, "read-throughput", 0) == {"read-throughput": []}


async def test_intervals_to_come_and_too_long_ago_are_left_out(
    store: StreamStore, clock: Clock
) -> None:
    ahead = await store.account.basin_metrics(BASIN, "read-throughput", NOW, NOW + 60)
    assert isinstance(ahead[0], Accumulation)
    assert ahead[0].values == ((NOW, 0),)
    clock.pass_seconds(40 * DAY)
    past = await store.account.basin_metrics(BASIN, "read-throughput", NOW, NOW + DAY)
    assert isinstance(past[0], Accumulation)
    assert past[0].values == ()


async def test_counts_survive_a_restart_and_continue(bench: Bench, clock: Clock) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        store.usage.record_read(BASIN, 1)
        store.usage.record_operation(Right.LIST_BASINS)
        await store.upkeep()
    async with bench.store() as store:
        store.usage.record_read(BASIN, 2)
        assert await of_basin(store, "read-throughput", 60) == {"read-throughput": [(NOW, 3)]}
        await store.upkeep()
        clock.pass_seconds(3600)
        store.usage.record_read(BASIN, 4)
        await store.upkeep()
    async with bench.store() as store:
        assert await of_basin(store, "read-throughput", 3660) == {
            "read-throughput": [(NOW, 3), (NOW + 3600, 4)]
        }
        assert series(await of_account(store, "account-ops", NOW + 60)) == {
            "list-basins": [(NOW, 1)]
        }


@pytest.mark.parametrize("fault", [CommitFault.BEFORE, CommitFault.AFTER])
async def test_counts_whose_write_failed_are_neither_lost_nor_doubled(
    bench: Bench, fault: CommitFault
) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        store.usage.record_read(BASIN, 1)
        bench.engine.fail_next(fault)
        with pytest.raises(Exception, match="injected"):
            await store.upkeep()
        await store.upkeep()
    async with bench.store() as store:
        assert await of_basin(store, "read-throughput", 60) == {"read-throughput": [(NOW, 1)]}


async def test_an_hour_that_cannot_be_read_does_not_stop_the_counting(
    store: StreamStore, bench: Bench
) -> None:
    await commit_rows(bench.engine, [(keys.usage(BASIN, NOW // 3600), b"\xc1")])
    store.usage.record_read(BASIN, 1)
    assert await of_basin(store, "read-throughput", 60) == {"read-throughput": [(NOW, 1)]}
    await store.upkeep()
    assert await of_basin(store, "read-throughput", 60) == {"read-throughput": [(NOW, 1)]}


async def test_usage_older_than_a_month_is_deleted(
    store: StreamStore, bench: Bench, clock: Clock
) -> None:
    for _ in range(3):
        store.usage.record_read(BASIN, 1)
        await store.upkeep()
        clock.pass_seconds(3600)
    clock.pass_seconds(31 * DAY)
    store.usage.record_read(BASIN, 1)
    await store.upkeep()
    assert await stored(bench, keys.usage(BASIN, 0), keys.usage_end(BASIN)) == 1


async def test_usage_goes_with_its_basin(store: StreamStore, bench: Bench) -> None:
    store.usage.record_read(BASIN, 1)
    await store.upkeep()
    assert await stored(bench, keys.usage(BASIN, 0), keys.usage_end(BASIN)) == 1
    await store.delete_basin(BASIN)
    store.usage.record_read(BASIN, 1)
    for _ in range(3):
        await store.upkeep()
    store.usage.record_read(BASIN, 1)
    await store.upkeep()
    assert await stored(bench, keys.usage(BASIN, 0), keys.usage_end(BASIN)) == 0
    with pytest.raises(BasinNotFoundError):
        await of_basin(store, "read-ops", 60)


async def test_memory_for_what_cannot_be_written_is_bounded(
    store: StreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_HOURS_MAX", 3)
    for n in range(10):
        store.usage.record_read(f"basin-{n:03}", 1)
    store.usage.fold()
    assert len(store.usage.hours) <= 3


async def test_basins_are_active_while_they_have_a_stream(store: StreamStore, clock: Clock) -> None:
    await store.create_basin("empty-basin")
    await store.create_basin("other-basin")
    await store.create_stream("other-basin", "s")

    async def active(start: int, end: int) -> tuple[str, ...]:
        [label] = await store.account.account_metrics("active-basins", start, end)
        assert isinstance(label, Label)
        return label.values

    assert await active(NOW, NOW + 1) == ("other-basin", BASIN)
    await store.upkeep()
    await store.delete_basin("other-basin")
    clock.pass_seconds(7200)
    for _ in range(3):
        await store.upkeep()
    assert await active(NOW + 3600, NOW + 7200) == (BASIN,)
    assert await active(NOW, NOW + 7200) == ("other-basin", BASIN)
    assert await active(NOW - DAY, NOW - 3600) == ()


async def test_the_bytes_of_a_basin_are_reported_for_hours_in_which_they_were_measured(
    store: StreamStore, clock: Clock
) -> None:
    await store.create_stream(BASIN, "second")
    await store.append(BASIN, STREAM, bodies("a"))
    await store.append(BASIN, "second", bodies("b", "c"))
    await store.upkeep()
    clock.pass_seconds(2 * 3600)
    await store.append(BASIN, STREAM, [trim_record(1)])
    await store.upkeep()
    trim = metered_size(trim_record(1))
    assert await of_basin(store, "storage", 3 * 3600 - 3599) == {
        "storage": [(NOW, 3 * ONE), (NOW + 7200, 2 * ONE + trim)]
    }


@pytest.mark.parametrize("metric_set", ["", "storage", "x" * 1000])
async def test_a_set_that_the_account_does_not_have_is_refused(
    store: StreamStore, metric_set: str
) -> None:
    with pytest.raises(InvalidError, match="active-basins, account-ops"):
        await of_account(store, metric_set, NOW)


async def test_the_bill_is_nothing_for_each_hour_that_is_over(
    store: StreamStore, clock: Clock
) -> None:
    await store.append(BASIN, STREAM, bodies("a"))
    clock.pass_seconds(2 * 3600 + 60)
    first = NOW // 3600 * 3600
    for interval, starts in (
        (None, range(first, clock.now // 1000 // 3600 * 3600, 3600)),
        (Interval.DAY, range(NOW // DAY * DAY, clock.now // 1000, DAY)),
    ):
        bill = await store.account.account_metrics(
            "estimated-billable-usage", NOW, clock.now // 1000, interval
        )
        names = [one.name for one in bill if isinstance(one, Accumulation)]
        assert names[-1] == "total"
        assert {"storage", "append-throughput", "read-throughput"} < set(names)
        for one in bill:
            assert isinstance(one, Accumulation)
            assert (one.unit, one.interval) == (Unit.USD, interval or Interval.HOUR)
            assert one.values == tuple((ts, 0) for ts in starts)
    with pytest.raises(InvalidError, match="hour or day"):
        await store.account.account_metrics("estimated-billable-usage", NOW, NOW, Interval.MINUTE)


async def test_a_series_needs_a_start_and_an_end_that_make_sense(store: StreamStore) -> None:
    for metric_set in ("active-basins", "account-ops"):
        with pytest.raises(InvalidError, match="start and end"):
            await store.account.account_metrics(metric_set, None, NOW)
    for metric_set in ("storage", "append-ops", "basin-ops"):
        with pytest.raises(InvalidError, match="future"):
            await store.account.basin_metrics(BASIN, metric_set, NOW, NOW + 61)
    with pytest.raises(InvalidError, match="30 days"):
        await store.account.stream_metrics(BASIN, STREAM, "storage", NOW - 31 * DAY, NOW)
    with pytest.raises(InvalidError, match="choose from storage"):
        await store.account.stream_metrics(BASIN, STREAM, "append-ops", NOW, NOW)


async def test_what_does_not_exist_has_no_usage(store: StreamStore) -> None:
    with pytest.raises(BasinNotFoundError):
        await store.account.basin_metrics("other-basin", "storage", NOW, NOW)
    with pytest.raises(BasinNotFoundError):
        await store.account.stream_metrics("other-basin", "s", "storage", NOW, NOW)
    with pytest.raises(StreamNotFoundError):
        await store.account.stream_metrics(BASIN, "s", "storage", NOW, NOW)
