"""Encryption, usage metrics and locations through the official client."""

from __future__ import annotations

import time

import pytest
from s2_sdk import (
    S2,
    AccountMetricSet,
    Accumulation,
    AppendInput,
    BasinConfig,
    BasinMetricSet,
    Encryption,
    Gauge,
    MetricUnit,
    Record,
    S2ServerError,
    SeqNum,
    StreamMetricSet,
    TimeseriesInterval,
)

from streamfold.server.main import Server
from tests.server.conftest import BASIN, STREAM

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.mark.parametrize("cipher", list(Encryption))
async def test_records_are_sealed_and_opened_with_the_caller_s_key(
    s2: S2, cipher: Encryption
) -> None:
    await s2.create_basin("sealed-basin", config=BasinConfig(stream_cipher=cipher))
    basin = s2.basin("sealed-basin")
    info = await basin.create_stream("secret")
    assert info.cipher is cipher
    stream = basin.stream("secret", encryption_key=KEY)
    await stream.append(AppendInput([Record(b"hidden")]))
    async with stream.append_session() as session:
        await (await session.submit(AppendInput([Record(b"too")])))
    batch = await stream.read(start=SeqNum(0))
    assert [record.body for record in batch.records] == [b"hidden", b"too"]
    async with basin.stream("secret", encryption_key=KEY).read_session(start=SeqNum(0)) as reading:
        async for found in reading:
            assert found.records[0].body == b"hidden"
            break

    with pytest.raises(S2ServerError) as refused:
        await basin.stream("secret").append(AppendInput([Record(b"x")]))
    assert refused.value.code == "bad_header"
    assert cipher.value in str(refused.value)
    with pytest.raises(S2ServerError) as refused:
        await basin.stream("secret", encryption_key=OTHER).read(start=SeqNum(0))
    assert refused.value.code == "decryption_failed"


async def test_usage_comes_from_the_servers_own_counters(s2: S2, server: Server) -> None:
    stream = s2.basin(BASIN).stream(STREAM)
    await stream.append(AppendInput([Record(b"x" * 92)]))
    await stream.read(start=SeqNum(0))
    now = int(time.time())
    span = {"start": now - 3600, "end": now + 30}
    appended = await s2.basin_metrics(
        BASIN, set=BasinMetricSet.APPEND_THROUGHPUT, interval=TimeseriesInterval.MINUTE, **span
    )
    assert isinstance(appended[0], Accumulation)
    assert sum(value for _, value in appended[0].values) == 100
    reads = await s2.basin_metrics(
        BASIN, set=BasinMetricSet.READ_OPS, interval=TimeseriesInterval.MINUTE, **span
    )
    counted = [one for one in reads if isinstance(one, Accumulation)]
    assert sum(value for one in counted for _, value in one.values) == 1
    held = await s2.stream_metrics(BASIN, STREAM, set=StreamMetricSet.STORAGE, **span)
    assert isinstance(held[0], Gauge)
    assert held[0].values[-1][1] == 100


async def test_the_official_client_gets_a_bill_of_nothing(s2: S2) -> None:
    now = int(time.time())
    bill = await s2.account_metrics(
        set=AccountMetricSet.ESTIMATED_BILLABLE_USAGE, start=now - 7200, end=now
    )
    total = bill[-1]
    assert isinstance(total, Accumulation)
    assert (total.name, total.unit, total.interval) == (
        "total", MetricUnit.USD, TimeseriesInterval.HOUR,
    )  # fmt: skip
    assert total.values
    assert not any(amount for _, amount in total.values)


async def test_the_one_location_is_the_default_one(s2: S2) -> None:
    (location,) = await s2.list_locations()
    assert (location.name, location.is_private) == ("local:memory", True)
    assert await s2.get_default_location() == location
    assert await s2.set_default_location(location.name) == location
    with pytest.raises(S2ServerError) as refused:
        await s2.set_default_location("aws:us-east-1")
    assert refused.value.code == "invalid"
    with pytest.raises(
        S2ServerError, match=r"'aws:us-east-1'.*choose from local:memory"
    ) as refused:
        await s2.create_basin("other-basin", location="aws:us-east-1")
    assert refused.value.code == "invalid"


async def test_the_location_of_a_basin_is_shown_however_it_was_created(
    s2: S2, server: Server
) -> None:
    assert (
        await s2.create_basin("given-basin", location="local:memory")
    ).location == "local:memory"
    assert (await s2.create_basin("default-basin")).location == "local:memory"
    ensured = await s2.ensure_basin("ensured-basin")
    assert ensured.basin.location == "local:memory"
    await server.store.open_basin("bucket-basin")
    listed = {basin.name: basin.location for basin in (await s2.list_basins()).items}
    assert set(listed.values()) == {"local:memory"}
    assert len(listed) == 5


async def test_storage_is_known_by_the_hour_of_basins_and_by_the_minute_of_streams(
    s2: S2,
) -> None:
    hour, minute, day = (
        TimeseriesInterval.HOUR,
        TimeseriesInterval.MINUTE,
        TimeseriesInterval.DAY,
    )
    now = int(time.time())
    span = {"start": now - 3600, "end": now}
    for interval in (hour, None):
        await s2.basin_metrics(BASIN, set=BasinMetricSet.STORAGE, interval=interval, **span)
    for interval in (minute, None):
        await s2.stream_metrics(
            BASIN, STREAM, set=StreamMetricSet.STORAGE, interval=interval, **span
        )
    for interval in (minute, day):
        with pytest.raises(S2ServerError, match="choose hour") as refused:
            await s2.basin_metrics(BASIN, set=BasinMetricSet.STORAGE, interval=interval, **span)
        assert (refused.value.status_code, refused.value.code) == (422, "invalid")
    for interval in (hour, day):
        with pytest.raises(S2ServerError, match="choose minute") as refused:
            await s2.stream_metrics(
                BASIN, STREAM, set=StreamMetricSet.STORAGE, interval=interval, **span
            )
        assert (refused.value.status_code, refused.value.code) == (422, "invalid")
