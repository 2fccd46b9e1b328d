"""A stream gets its content type before its first record, or not at all."""

from __future__ import annotations

import asyncio

import pytest

from streamfold.errors import AlreadyExistsError, InvalidError
from streamfold.records.batch import RecordBatch
from streamfold.store.log.admission import AppendRequest
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore
from tests.store.conftest import BASIN, STREAM, Bench, bodies
from tests.store.durable_streams import create, read

JSON = "application/json"


def plain(content_type: str, batch: RecordBatch) -> None:
    if content_type == JSON:
        raise InvalidError("not JSON")


async def append(store: StreamStore, body: str = "plain") -> None:
    """Append as S2 does, which knows nothing of content types."""
    batch = RecordBatch.of(bodies(body))
    await store.stream(BASIN, STREAM).submit(AppendRequest((batch,), check=plain)).ack


async def until_on_its_way(bench: Bench) -> None:
    while not bench.engine._order.locked():  # noqa: ASYNC110  # there is no event for it
        await asyncio.sleep(0)


async def test_a_stream_whose_first_record_is_on_its_way_gets_no_content_type(
    store: StreamStore, bench: Bench
) -> None:
    bench.engine.hold()
    appending = asyncio.create_task(append(store))
    await until_on_its_way(bench)
    creation = asyncio.create_task(create(store, STREAM, content_type=JSON))
    await asyncio.sleep(0.05)
    bench.engine.resume()
    await appending
    with pytest.raises(AlreadyExistsError):
        await creation


async def test_an_append_that_comes_while_a_stream_gets_its_content_type_is_checked(
    store: StreamStore, bench: Bench
) -> None:
    bench.engine.hold()
    creation = asyncio.create_task(create(store, STREAM, content_type=JSON))
    await until_on_its_way(bench)
    appending = asyncio.create_task(append(store))
    await asyncio.sleep(0.05)
    bench.engine.resume()
    await creation
    with pytest.raises(InvalidError):
        await appending
    assert await read(store, STREAM) == []


async def test_an_append_that_waits_for_room_is_checked_when_there_is_some(bench: Bench) -> None:
    async with bench.store(StoreSettings(inflight_bytes=1 << 20)) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        await store.create_stream(BASIN, "other")
        bench.engine.hold()
        fills = asyncio.create_task(store.append(BASIN, "other", bodies("x" * 1_040_000)))
        await until_on_its_way(bench)
        appending = asyncio.create_task(append(store, "plain" * 2000))
        await asyncio.sleep(0.05)
        creation = asyncio.create_task(create(store, STREAM, content_type=JSON))
        await asyncio.sleep(0.05)
        bench.engine.resume()
        await fills
        result = await asyncio.gather(creation, appending, return_exceptions=True)
        assert sum(isinstance(found, Exception) for found in result) == 1
