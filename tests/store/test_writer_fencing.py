"""One writer: a process that opens a store fences the one before, which acknowledges nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from streamfold.errors import OutcomeUnknownError, WriterFencedError
from streamfold.model.records import Record
from streamfold.store.engine import slatedb
from streamfold.store.engine.engine import commit_rows
from streamfold.store.engine.local_disk import LocalDisk
from streamfold.store.engine.location import Location, open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.log.shares import AppendAck
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore, open_store
from streamfold.testing.engine_faults import CommitFault, FaultyEngine
from tests.proving import seeds
from tests.s3 import S3Server
from tests.store.conftest import PATIENCE
from tests.store.crash.ledger import Event, Ledger, Stored
from tests.store.crash.load import STREAMS, Load, prepare
from tests.store.crash.process import WriterProcess
from tests.store.crash.verify import BASIN, read_all, verify

SEEDS = seeds(1, proving=5)
#: Short, so that upkeep of both writers gets into each other's way. Seconds.
SETTINGS = StoreSettings(upkeep_interval=0.05, trim_grace=0, recovery_timeout=PATIENCE)
#: With upkeep as usual.
PATIENT = StoreSettings(recovery_timeout=PATIENCE)
STREAM = STREAMS[0]


@pytest.fixture(params=["local", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """An empty location; every writer of a test opens the same."""
    if request.param == "local":
        return open_location(tmp_path.as_uri())
    server: S3Server = request.getfixturevalue("s3_server")
    return open_location(f"s3://{server.bucket}/{request.node.name}", server.environment())


@asynccontextmanager
async def two_writers(location: Location) -> AsyncIterator[tuple[StreamStore, StreamStore]]:
    """A writer with one acknowledged record, and a second one that has just replaced it."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(open_store(location, PATIENT))
        await prepare(first)
        await first.append(BASIN, STREAM, [Record(b"before")])
        opening = open_store(location, PATIENT, take_over=True)
        second = await stack.enter_async_context(opening)
        yield first, second


async def test_a_replaced_writer_cannot_append(location: Location) -> None:
    async with two_writers(location) as (first, second):
        with pytest.raises((WriterFencedError, OutcomeUnknownError)):
            await first.append(BASIN, STREAM, [Record(b"lost")])
        with pytest.raises(WriterFencedError, match="took over"):
            await first.append(BASIN, STREAM, [Record(b"lost, too")])
        ack = await second.append(BASIN, STREAM, [Record(b"after")])
        assert ack.start.seq_num == 1
    async with open_store(location) as third:
        assert [record.body for record in await read_all(third, STREAM)] == [b"before", b"after"]


async def test_a_replaced_writer_cannot_change_basins_and_streams(location: Location) -> None:
    async with two_writers(location) as (first, second):
        with pytest.raises((WriterFencedError, OutcomeUnknownError)):
            await first.create_stream(BASIN, "of-first")
        with pytest.raises(WriterFencedError):
            await first.delete_stream(BASIN, STREAM)
        await second.create_stream(BASIN, "of-second")
        names = [info.name for info in (await second.list_streams(BASIN)).items]
        assert names == sorted([*STREAMS, "of-second"])


async def test_a_writer_learns_from_upkeep_that_it_was_replaced(location: Location) -> None:
    async with two_writers(location) as (first, second):
        with pytest.raises(WriterFencedError):
            await first.upkeep()
        await second.upkeep()
        assert [record.body for record in await read_all(second, STREAM)] == [b"before"]


@pytest.mark.parametrize("seed", SEEDS)
async def test_writers_that_replace_each_other_under_load_lose_nothing(
    location: Location, seed: int
) -> None:
    """What is readable in the end is what all of them acknowledged, and of the rest whole batches."""
    ledger = Ledger()
    loads: list[Load] = []
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for number in range(3):
            opening = open_store(location, SETTINGS, take_over=True)
            store = await stack.enter_async_context(opening)
            await prepare(store)
            acked = asyncio.Event()
            load = Load(store, f"writer{number}", seed, _noting(ledger, acked))
            loads.append(load)
            group.create_task(load.run(writers=3))
            await acked.wait()
        loads[-1].stop()
    assert [type(load.ended_by) for load in loads] == [
        WriterFencedError,
        WriterFencedError,
        type(None),
    ]
    async with open_store(location, SETTINGS) as store:
        await verify(store, ledger)


def _noting(ledger: Ledger, acked: asyncio.Event, acks: int = 20) -> Callable[[Event], None]:
    left = acks

    def note(event: Event) -> None:
        nonlocal left
        ledger.apply(event)
        if isinstance(event, Stored):
            left -= 1
            if not left:
                acked.set()

    return note


@pytest.mark.parametrize("seed", SEEDS)
async def test_processes_that_replace_each_other_under_load_lose_nothing(
    tmp_path: Path, seed: int
) -> None:
    ledger = Ledger()
    url = tmp_path.as_uri()
    writers: list[WriterProcess] = []
    async with asyncio.TaskGroup() as group:
        for number in range(3):
            writer = await WriterProcess.start(url, f"process{number}", seed)
            writers.append(writer)
            acked = asyncio.Event()
            group.create_task(_follow(writer, _noting(ledger, acked, 100), acked))
            await acked.wait()
        writers[-1].kill()
    ends = [await writer.end() for writer in writers]
    assert [code for code, _ in ends] == [0, 0, -9], ends
    async with open_store(url, SETTINGS) as store:
        await verify(store, ledger)


async def _follow(
    writer: WriterProcess, note: Callable[[Event], None], acked: asyncio.Event
) -> None:
    while event := await writer.event():
        note(event)
    if not acked.is_set():
        raise AssertionError(f"the writer ended before its acks: {await writer.end()}")


async def test_a_writer_that_reopens_its_storage_does_not_take_it_from_its_replacement(
    location: Location,
) -> None:
    """The replacement starts after the first writer has checked that the store is still its own."""
    engines: list[FaultyEngine] = []
    async with AsyncExitStack() as stack:
        second: StreamStore | None = None

        async def open_engine() -> FaultyEngine:
            nonlocal second
            if engines:
                opening = open_store(location, PATIENT, take_over=True)
                second = await stack.enter_async_context(opening)
            disk = LocalDisk(location.folder) if location.folder is not None else None
            engines.append(FaultyEngine(await SlateEngine.open(location, disk)))
            return engines[-1]

        opening = open_store(location, PATIENT, opener=open_engine)
        first = await stack.enter_async_context(opening)
        await prepare(first)
        await first.append(BASIN, STREAM, [Record(b"before")])
        engines[-1].fail_next(CommitFault.BEFORE)
        with pytest.raises(OutcomeUnknownError):
            await first.append(BASIN, STREAM, [Record(b"failed")])
        with pytest.raises(WriterFencedError):
            await first.append(BASIN, STREAM, [Record(b"lost")])
        assert second is not None
        with suppress(OutcomeUnknownError, WriterFencedError):  # it was fenced for a moment
            await second.append(BASIN, STREAM, [Record(b"at once")])
        ack: AppendAck | None = None
        while ack is None:
            with suppress(WriterFencedError):  # until it has opened the store again
                ack = await second.append(BASIN, STREAM, [Record(b"after")])
        bodies = [record.body for record in await read_all(second, STREAM)]
        assert bodies in ([b"before", b"after"], [b"before", b"at once", b"after"])
        assert ack.end.seq_num == len(bodies)


async def test_a_writer_takes_its_store_back_once_and_no_more(location: Location) -> None:
    """From processes that do not claim the store, as those of earlier versions."""
    async with open_store(location, PATIENT) as store:
        await prepare(store)
        for expected in ([None], [WriterFencedError]):
            other = await SlateEngine.open(location)
            with suppress(OutcomeUnknownError, WriterFencedError):
                await store.append(BASIN, STREAM, [Record(b"fenced")])
            error: Exception | None = None
            try:
                await store.append(BASIN, STREAM, [Record(b"again")])
            except WriterFencedError as fenced:
                error = fenced
            assert [error and type(error)] == expected
            await other.close(flush=False)


async def test_an_opening_does_not_take_the_number_of_another_one(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two with one number would write chunk files of the same names, and neither would stop."""
    build = slatedb._build
    others: list[SlateEngine] = []

    async def build_slowly(*arguments: Any, synced: bool) -> Any:
        opened = await build(*arguments, synced=synced)
        if not others:
            monkeypatch.setattr(slatedb, "_build", build)
            others.append(await SlateEngine.open(location))
        return opened

    monkeypatch.setattr(slatedb, "_build", build_slowly)
    with pytest.raises(WriterFencedError):
        await SlateEngine.open(location)
    await commit_rows(others[0], [(b"key", b"value")])
    await others[0].close()


async def test_a_start_that_is_fenced_by_the_process_that_it_replaces_tries_again(
    location: Location,
) -> None:
    """The former writer opens its storage again just before the new one has finished its start."""
    former: list[SlateEngine] = []

    async def open_engine() -> SlateEngine:
        disk = LocalDisk(location.folder) if location.folder is not None else None
        engine = await SlateEngine.open(location, disk)
        if not former:
            former.append(await SlateEngine.open(location))
        return engine

    async with open_store(location, PATIENT, opener=open_engine) as store:
        await prepare(store)
        ack = await store.append(BASIN, STREAM, [Record(b"first")])
        assert ack.start.seq_num == 0
    await former[0].close(flush=False)
