from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamfold.errors import (
    AlreadyExistsError,
    BasinDeletingError,
    BasinNotFoundError,
    InvalidError,
    StreamDeletingError,
    StreamNotFoundError,
)
from streamfold.model.configs import (
    INFINITE,
    SYSTEM_DEFAULTS,
    BasinConfig,
    BasinReconfiguration,
    Cipher,
    StorageClass,
    StreamConfig,
    StreamConfigLayer,
    StreamReconfiguration,
    TimestampMode,
)
from streamfold.model.resources import Provision
from streamfold.store import keys, rows
from streamfold.store.read.requests import ReadRequest, from_seq_num
from streamfold.store.rows import StreamRow
from streamfold.store.store import StreamStore
from tests.store.conftest import BASIN, STREAM, Bench, bodies
from tests.store.durable_streams import create, fork_of

LAYER = StreamConfigLayer(retention=INFINITE, timestamp_mode=TimestampMode.ARRIVAL)


async def test_a_basin_can_be_created_once(store: StreamStore) -> None:
    info, result = await store.create_basin("other-basin")
    assert (info.name, info.deleted_at, result) == ("other-basin", None, Provision.CREATED)
    with pytest.raises(AlreadyExistsError, match="other-basin"):
        await store.create_basin("other-basin")


async def test_a_repeated_creation_with_its_token_is_the_same_creation(store: StreamStore) -> None:
    config = BasinConfig(default_stream_config=LAYER)
    first, _ = await store.create_basin("other-basin", config, request_token="t1")
    again, result = await store.create_basin("other-basin", config, request_token="t1")
    assert (again, result) == (first, Provision.NOOP)
    with pytest.raises(AlreadyExistsError):
        await store.create_basin("other-basin", config, request_token="t2")
    with pytest.raises(AlreadyExistsError):
        await store.create_basin("other-basin", BasinConfig(), request_token="t1")

    made, _ = await store.create_stream(BASIN, "s", LAYER, request_token="t1")
    again_stream, result = await store.create_stream(BASIN, "s", LAYER, request_token="t1")
    assert (again_stream, result) == (made, Provision.NOOP)
    with pytest.raises(AlreadyExistsError):
        await store.create_stream(BASIN, "s", LAYER)


async def test_ensure_creates_then_updates_then_does_nothing(store: StreamStore) -> None:
    config = BasinConfig(create_stream_on_append=True)
    assert (await store.ensure_basin("other-basin", config))[1] is Provision.CREATED
    assert (await store.ensure_basin("other-basin", config))[1] is Provision.NOOP
    assert (await store.ensure_basin("other-basin"))[1] is Provision.UPDATED
    assert await store.basin_config("other-basin") == BasinConfig()

    assert (await store.ensure_stream(BASIN, "s", LAYER))[1] is Provision.CREATED
    assert (await store.ensure_stream(BASIN, "s", LAYER))[1] is Provision.NOOP
    assert (await store.ensure_stream(BASIN, "s"))[1] is Provision.UPDATED
    assert await store.stream_config(BASIN, "s") == SYSTEM_DEFAULTS


async def test_a_stream_takes_its_configuration_from_request_basin_and_system_in_that_order(
    store: StreamStore,
) -> None:
    defaults = StreamConfigLayer(retention=60, timestamp_mode=TimestampMode.ARRIVAL)
    config = BasinConfig(default_stream_config=defaults, stream_cipher=Cipher.AES_256_GCM)
    await store.create_basin("other-basin", config)
    info, _ = await store.create_stream("other-basin", "s", StreamConfigLayer(retention=5))
    assert info.cipher is Cipher.AES_256_GCM
    expected = StreamConfig(retention=5, timestamp_mode=TimestampMode.ARRIVAL)
    assert await store.stream_config("other-basin", "s") == expected

    await store.ensure_basin("other-basin")
    assert await store.stream_config("other-basin", "s") == expected


async def test_a_reconfiguration_keeps_what_it_does_not_mention_and_resets_what_it_nulls(
    store: StreamStore,
) -> None:
    defaults = StreamConfigLayer(retention=60)
    await store.create_basin("other-basin", BasinConfig(default_stream_config=defaults))
    layer = StreamConfigLayer(retention=5, delete_on_empty_secs=9)
    await store.create_stream("other-basin", "s", layer)
    change = StreamReconfiguration(retention=None, storage_class=StorageClass.STANDARD)
    config = await store.reconfigure_stream("other-basin", "s", change)
    assert config == StreamConfig(
        storage_class=StorageClass.STANDARD, retention=60, delete_on_empty_secs=9
    )
    assert await store.stream_config("other-basin", "s") == config


async def test_a_basin_reconfiguration_clears_members_and_keeps_others(store: StreamStore) -> None:
    defaults = StreamConfigLayer(retention=60, timestamp_uncapped=True)
    basin = BasinConfig(default_stream_config=defaults, create_stream_on_read=True)
    await store.create_basin("other-basin", basin)
    change = BasinReconfiguration(default_stream_config=StreamReconfiguration(retention=None))
    assert await store.reconfigure_basin("other-basin", change) == BasinConfig(
        default_stream_config=StreamConfigLayer(timestamp_uncapped=True),
        create_stream_on_read=True,
    )
    change = BasinReconfiguration(default_stream_config=None, create_stream_on_read=False)
    assert await store.reconfigure_basin("other-basin", change) == BasinConfig()


async def test_listings_are_in_byte_order_and_come_in_pages(store: StreamStore) -> None:
    names = ["a", "a/b", "b", "é", "zz"]
    for name in reversed(names):
        await store.create_stream(BASIN, name)
    everything = sorted([*names, STREAM], key=str.encode)
    page = await store.list_streams(BASIN)
    assert [item.name for item in page.items] == everything
    assert not page.has_more

    page = await store.list_streams(BASIN, limit=2)
    assert ([item.name for item in page.items], page.has_more) == (everything[:2], True)
    page = await store.list_streams(BASIN, start_after=everything[1], limit=4)
    assert ([item.name for item in page.items], page.has_more) == (everything[2:], False)
    page = await store.list_streams(BASIN, prefix="a", start_after="a")
    assert [item.name for item in page.items] == ["a/b"]
    page = await store.list_streams(BASIN, prefix="b", start_after="a")
    assert [item.name for item in page.items] == ["b"]
    page = await store.list_streams(BASIN, prefix="a", limit=2)
    assert ([item.name for item in page.items], page.has_more) == (["a", "a/b"], False)
    assert (await store.list_streams(BASIN, start_after="éé")).items == ()
    assert len((await store.list_streams(BASIN, limit=0)).items) == len(everything)
    assert len((await store.list_streams(BASIN, limit=1500)).items) == len(everything)


async def test_a_listing_does_not_reach_into_the_next_basin(store: StreamStore) -> None:
    await store.create_basin("test-basin-2")
    await store.create_stream("test-basin-2", "x")
    assert [item.name for item in (await store.list_streams(BASIN)).items] == [STREAM]
    basins = await store.list_basins(prefix="test-basin-")
    assert [item.name for item in basins.items] == ["test-basin-2"]
    basins = await store.list_basins(start_after="test-basin")
    assert [item.name for item in basins.items] == ["test-basin-2"]


async def test_the_name_of_a_deleted_stream_can_be_given_to_a_new_one_at_once(
    store: StreamStore, bench: Bench
) -> None:
    await store.append(BASIN, STREAM, bodies("old"))
    former = await bench.engine.get(keys.stream(BASIN, STREAM))
    await store.delete_stream(BASIN, STREAM)
    for turn in range(3):  # also a stream that replaced a deleted one
        create = store.ensure_stream if turn == 1 else store.create_stream
        _, provision = await create(BASIN, STREAM)
        assert provision is Provision.CREATED
        assert (await store.append(BASIN, STREAM, bodies("new"))).start.seq_num == 0
        if turn < 2:
            await store.delete_stream(BASIN, STREAM)
    for _ in range(2):  # removes what is left of the former ones
        await store.upkeep()
    assert former is not None
    stream_id = rows.decode(former, StreamRow).id
    assert await bench.engine.get(keys.state(stream_id)) is None
    assert await bench.engine.get(keys.chunk(stream_id, 0)) is None
    batch = await store.read(BASIN, STREAM, ReadRequest(from_seq_num(0)))
    assert [record.body for record in batch.records()] == [b"new"]


async def test_a_deleted_stream_stops_at_once_and_its_name_starts_again_at_zero(
    store: StreamStore, bench: Bench
) -> None:
    await store.append(BASIN, STREAM, bodies("old"))
    await store.delete_stream(BASIN, STREAM)
    bench.engine.hold()  # or the background may be done with it before the test is
    await store.delete_stream(BASIN, STREAM)
    listed = (await store.list_streams(BASIN)).items
    assert [item.deleted_at is not None for item in listed] == [True]
    request = ReadRequest(from_seq_num(0))
    with pytest.raises(StreamDeletingError):
        await store.append(BASIN, STREAM, bodies("x"))
    with pytest.raises(StreamDeletingError):
        await store.read(BASIN, STREAM, request)
    with pytest.raises(StreamDeletingError):
        await store.check_tail(BASIN, STREAM)
    with pytest.raises(StreamDeletingError):
        await store.stream_config(BASIN, STREAM)

    bench.engine.resume()
    await store.upkeep()
    assert (await store.list_streams(BASIN)).items == ()
    with pytest.raises(StreamNotFoundError):
        await store.delete_stream(BASIN, STREAM)
    await store.create_stream(BASIN, STREAM)
    assert (await store.check_tail(BASIN, STREAM)).seq_num == 0
    await store.append(BASIN, STREAM, bodies("new"))
    batch = await store.read(BASIN, STREAM, request)
    assert [record.body for record in batch.records()] == [b"new"]


async def test_a_deletion_that_a_restart_interrupts_is_finished(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        for _ in range(20):
            await store.append(BASIN, STREAM, bodies("x"))
        await store.delete_stream(BASIN, STREAM)
    async with bench.store() as store:
        await store.upkeep()
        assert (await store.list_streams(BASIN)).items == ()
        rows = [row async for page in bench.engine.scan(b"\x02", b"\xff") for row in page]
        assert rows == []


async def test_a_deleted_basin_goes_with_its_streams(store: StreamStore, bench: Bench) -> None:
    await store.create_stream(BASIN, "other")
    await store.append(BASIN, "other", bodies("x"))
    await store.delete_basin(BASIN)
    bench.engine.hold()  # or the background may be done with it before the test is
    await store.delete_basin(BASIN)
    with pytest.raises(BasinDeletingError):
        await store.create_stream(BASIN, "third")
    with pytest.raises(BasinDeletingError):
        await store.create_basin(BASIN)
    with pytest.raises(BasinDeletingError):
        await store.reconfigure_basin(BASIN, BasinReconfiguration(stream_cipher=None))
    bench.engine.resume()
    await store.upkeep()
    await store.upkeep()
    assert (await store.list_basins()).items == ()
    with pytest.raises(BasinNotFoundError):
        await store.delete_basin(BASIN)
    await store.create_basin(BASIN)
    assert (await store.list_streams(BASIN)).items == ()


async def test_streams_are_created_on_append_or_on_read_only_where_the_basin_says_so(
    store: StreamStore,
) -> None:
    request = ReadRequest(from_seq_num(0), wait=0.01)
    with pytest.raises(StreamNotFoundError):
        await store.append(BASIN, "new", bodies("x"))
    await store.reconfigure_basin(BASIN, BasinReconfiguration(create_stream_on_append=True))
    with pytest.raises(StreamNotFoundError):
        await store.read(BASIN, "new", request)
    ack = await store.append(BASIN, "new", bodies("x"), create_with=StreamConfigLayer(retention=5))
    assert ack.end.seq_num == 1
    assert (await store.stream_config(BASIN, "new")).retention == 5

    await store.reconfigure_basin(BASIN, BasinReconfiguration(create_stream_on_read=True))
    assert (await store.check_tail(BASIN, "seen")).seq_num == 0
    assert (await store.read(BASIN, "read", request)).count == 0
    with pytest.raises(BasinNotFoundError):
        await store.append("no-such-basin", "new", bodies("x"))


async def test_an_append_or_read_right_after_a_deletion_creates_the_stream_anew(
    store: StreamStore,
) -> None:
    for change in (
        BasinReconfiguration(create_stream_on_append=True),
        BasinReconfiguration(create_stream_on_read=True),
    ):
        await store.reconfigure_basin(BASIN, change)
    await store.append(BASIN, "new", bodies("old", "older"))
    deletion = asyncio.create_task(store.delete_stream(BASIN, "new"))
    await asyncio.sleep(0)  # it is under way, or durable
    assert (await store.append(BASIN, "new", bodies("x"))).start.seq_num in (0, 2)
    await deletion
    await store.append(BASIN, "new", bodies("x"))
    await store.delete_stream(BASIN, "new")
    assert (await store.append(BASIN, "new", bodies("x"))).start.seq_num == 0
    await store.delete_stream(BASIN, "new")
    assert (await store.check_tail(BASIN, "new")).seq_num == 0
    await store.upkeep()
    assert (await store.append(BASIN, "new", bodies("x"))).start.seq_num == 0


async def test_an_append_after_a_deletion_never_replaces_a_stream_that_forks_need(
    store: StreamStore,
) -> None:
    await store.reconfigure_basin(BASIN, BasinReconfiguration(create_stream_on_append=True))
    await create(store, "source", b"x")
    await create(store, "fork", fork=fork_of("source"))
    await store.delete_stream(BASIN, "source")
    with pytest.raises(StreamDeletingError):
        await store.append(BASIN, "source", bodies("y"))


async def test_many_who_create_one_stream_by_appending_all_succeed(store: StreamStore) -> None:
    await store.reconfigure_basin(BASIN, BasinReconfiguration(create_stream_on_append=True))
    acks = await asyncio.gather(*(store.append(BASIN, "new", bodies("x")) for _ in range(20)))
    assert sorted(ack.start.seq_num for ack in acks) == list(range(20))


@pytest.mark.parametrize("basin", ["abc", "UPPER-CASE", "a" * 65, "with space", "with.dot", ""])
async def test_bad_basin_names_are_refused(store: StreamStore, basin: str) -> None:
    with pytest.raises(InvalidError, match="bucket name"):
        await store.create_basin(basin)


async def test_unknown_classes_locations_and_ciphers_are_refused_with_those_that_there_are(
    store: StreamStore,
) -> None:
    unchecked: Any = "cheap"
    with pytest.raises(InvalidError, match=r"storage class 'cheap'.*choose from standard, express"):
        await store.create_stream(BASIN, "new", StreamConfigLayer(storage_class=unchecked))
    with pytest.raises(InvalidError, match="choose from standard, express"):
        StreamReconfiguration(storage_class=unchecked)
    with pytest.raises(InvalidError, match=r"cipher 'cheap'.*choose from aegis-256, aes-256-gcm"):
        await store.create_basin("new-basin", BasinConfig(stream_cipher=unchecked))
    with pytest.raises(InvalidError, match=r"location 'far'.*choose from local:memory"):
        await store.create_basin("new-basin", location="far")
    assert [stream.name for stream in (await store.list_streams(BASIN)).items] == [STREAM]


@pytest.mark.parametrize("stream", ["", ".", "..", "nul\0", "é" * 257, "\ud800"])
async def test_bad_stream_names_are_refused(store: StreamStore, stream: str) -> None:
    with pytest.raises(InvalidError, match="stream name"):
        await store.create_stream(BASIN, stream)


async def test_bad_configurations_are_refused(store: StreamStore) -> None:
    with pytest.raises(InvalidError, match="retention age 0"):
        StreamConfigLayer(retention=0)
    with pytest.raises(InvalidError, match="retention age -1"):
        StreamReconfiguration(retention=-1)
    with pytest.raises(InvalidError, match="delete-on-empty age -1"):
        StreamConfigLayer(delete_on_empty_secs=-1)
    with pytest.raises(InvalidError, match="request token of 37 bytes"):
        await store.create_basin("other-basin", request_token="t" * 37)
    with pytest.raises(InvalidError, match="must not be empty"):
        await store.create_basin("other-basin", request_token="")


async def test_what_the_catalog_says_survives_a_restart(bench: Bench) -> None:
    async with bench.store() as store:
        config = BasinConfig(default_stream_config=LAYER, create_stream_on_append=True)
        basin, _ = await store.create_basin(BASIN, config, request_token="t")
        stream, _ = await store.create_stream(BASIN, STREAM, StreamConfigLayer(retention=7))
    async with bench.store() as store:
        assert await store.basin_config(BASIN) == config
        assert (await store.list_basins()).items == (basin,)
        assert (await store.list_streams(BASIN)).items == (stream,)
        assert (await store.stream_config(BASIN, STREAM)).retention == 7
        assert (await store.create_basin(BASIN, config, request_token="t"))[1] is Provision.NOOP
