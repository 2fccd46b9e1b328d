"""Parts that nobody publishes go after a day, and never while they are used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from streamfold.blob import BlobStore, open_blob_store
from streamfold.errors import InvalidError, WriterFencedError
from streamfold.store.catalog.staged_parts import PART_LIFETIME, PartsBusyError, StagedParts
from streamfold.store.engine.disk_space import DiskSpace
from streamfold.testing.blob_faults import FaultyBlobStore
from streamfold.testing.faults import ScriptedFaults
from tests.store.conftest import Clock

HOUR = 3_600_000


async def body(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def allowed() -> None:
    """The store is still this process's."""


async def refused() -> None:
    raise WriterFencedError


class SlowDeletes(FaultyBlobStore):
    """Deletes nothing before `proceed` is set."""

    def __init__(self) -> None:
        super().__init__(open_blob_store("memory:"), ScriptedFaults())
        self.deleting, self.proceed = asyncio.Event(), asyncio.Event()

    async def delete(self, key: str) -> None:
        self.deleting.set()
        await self.proceed.wait()
        await super().delete(key)


@pytest.fixture
def parts(blobs: BlobStore, clock: Clock) -> StagedParts:
    return StagedParts(blobs, DiskSpace(None, None), clock)


async def names(parts: StagedParts, stream_id: int = 1) -> list[str]:
    return [part.part for part in await parts.list(stream_id)]


async def test_a_part_goes_after_a_day_and_not_before(parts: StagedParts, clock: Clock) -> None:
    old = await parts.stage(1, body(b"old"), 3)
    clock.now += HOUR
    young = await parts.stage(1, body(b"young"), 5)
    clock.now += PART_LIFETIME - HOUR - 1
    await parts.sweep(allowed)
    assert await names(parts) == [old, young]
    clock.now += HOUR - 1
    await parts.sweep(allowed)
    assert await names(parts) == [old, young], "it searches once an hour"
    clock.now += 1
    await parts.sweep(allowed)
    assert await names(parts) == [young]


async def test_parts_that_are_being_published_stay(parts: StagedParts, clock: Clock) -> None:
    used = await parts.stage(1, body(b"used"), 4)
    await parts.stage(2, body(b"forgotten"), 9)
    clock.now += PART_LIFETIME
    with parts.alone(1):
        await parts.sweep(allowed)
    assert (await names(parts, 1), await names(parts, 2)) == ([used], [])


async def test_a_publication_that_begins_during_a_search_keeps_its_parts(
    parts: StagedParts, clock: Clock
) -> None:
    old = await parts.stage(1, body(b"day-old"), 7)
    clock.now += PART_LIFETIME
    with ExitStack() as publication:

        async def begun() -> None:
            """The search has its list, and asks whether the store is still this process's."""
            publication.enter_context(parts.alone(1))

        await parts.sweep(begun)
        staged = await parts.find(1, [old])
        assert b"".join([piece async for piece in parts.read(1, staged)]) == b"day-old"


async def test_no_publication_begins_while_a_part_of_its_stream_goes(clock: Clock) -> None:
    blobs = SlowDeletes()
    parts = StagedParts(blobs, DiskSpace(None, None), clock)
    old = await parts.stage(1, body(b"day-old"), 7)
    clock.now += PART_LIFETIME
    sweeping = asyncio.create_task(parts.sweep(allowed))
    await blobs.deleting.wait()
    with pytest.raises(PartsBusyError), parts.alone(1):
        pass
    with parts.alone(2):
        blobs.proceed.set()
        await sweeping
    with parts.alone(1), pytest.raises(InvalidError, match="older than a day"):
        await parts.find(1, [old])


async def test_a_process_that_lost_the_store_deletes_no_parts(
    parts: StagedParts, clock: Clock
) -> None:
    part = await parts.stage(1, body(b"part"), 4)
    clock.now += PART_LIFETIME
    with pytest.raises(WriterFencedError):
        await parts.sweep(refused)
    assert await names(parts) == [part]


async def test_other_blobs_are_left_alone(
    parts: StagedParts, blobs: BlobStore, clock: Clock
) -> None:
    await blobs.put("parts/readme", b"not ours")
    await blobs.put(f"{1:016x}/snapshot", b"a snapshot")
    clock.now += 10 * PART_LIFETIME
    await parts.sweep(allowed)
    assert [meta.key async for meta in blobs.list()] == [f"{1:016x}/snapshot", "parts/readme"]


async def test_few_snapshots_are_put_together_at_once(parts: StagedParts) -> None:
    with parts.alone(1), pytest.raises(PartsBusyError), parts.alone(1):
        pass
    with parts.alone(1), parts.alone(2), pytest.raises(PartsBusyError), parts.alone(3):
        pass
    with parts.alone(3):
        pass
