from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from streamfold.model.positions import SeqNum, StreamPosition, Timestamp
from streamfold.model.records import Record
from streamfold.store.engine.location import Location, open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.log.admission import AppendRequest
from streamfold.store.log.shares import AppendAck
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore, open_store
from streamfold.store.upkeep import background, reclaim
from streamfold.testing.engine_faults import FaultyEngine

BASIN = "test-basin"
STREAM = "orders"

#: 2026-01-01T00:00:00Z in milliseconds: where test clocks start.
EPOCH = 1_767_225_600_000


#: Most tests look at what a trim or a failed commit leaves, not at how long it takes to get there.
NO_GRACE = StoreSettings(trim_grace=0, leftover_grace=0)

#: Seconds after which a wait for something that must happen counts as a hang. A busy machine needs
#: less, also to open storage again after a failure.
PATIENCE = 60.0


async def until(condition: Callable[[], object]) -> None:
    """Return once the condition holds; for what no event announces."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def at_rest(store: StreamStore) -> None:
    """Return once upkeep has begun, has no request left, and waits for the next."""
    upkeep = (await store._supervisor.mounted()).upkeep
    await until(lambda: upkeep._wake._waiters and not upkeep._wake.is_set())


async def submit(
    store: StreamStore, records: Sequence[Record], **conditions: Any
) -> asyncio.Future[AppendAck]:
    """Append a batch; the future of its ack, once it is accepted."""
    submission = store.stream(BASIN, STREAM).append(records, **conditions)
    if not await submission.decided():
        await submission.ack
    return submission.ack


def later(request: AppendRequest) -> asyncio.Future[AppendRequest]:
    """The request as work under way, which is done at once."""

    async def make() -> AppendRequest:
        return request

    return asyncio.ensure_future(make())


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = EPOCH

    def __call__(self) -> int:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += int(seconds * 1000)


class Bench:
    """A store in memory on an engine that can be made to fail, and that survives restarts."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.location: Location = open_location("memory:")
        self.engines: list[FaultyEngine] = []

    @property
    def engine(self) -> FaultyEngine:
        return self.engines[-1]

    async def _open_engine(self) -> FaultyEngine:
        engine = FaultyEngine(await SlateEngine.open(self.location))
        self.engines.append(engine)
        return engine

    @asynccontextmanager
    async def store(self, settings: StoreSettings | None = None) -> AsyncIterator[StreamStore]:
        settings = replace(settings or NO_GRACE, recovery_timeout=PATIENCE)
        async with open_store(
            self.location, settings, now=self.clock, opener=self._open_engine
        ) as store:
            yield store


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bench(clock: Clock) -> Bench:
    return Bench(clock)


@pytest.fixture
async def store(bench: Bench) -> AsyncIterator[StreamStore]:
    """A store with one basin and one empty stream, whose first pass of upkeep is over."""
    async with bench.store() as opened:
        await opened.create_basin(BASIN)
        await opened.create_stream(BASIN, STREAM)
        await at_rest(opened)
        yield opened


@pytest.fixture(autouse=True)
def _patient_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a store that closes keep its counts however busy the machine is: tests look at its rows."""
    monkeypatch.setattr(background, "_CLOSING_SECONDS", PATIENCE)


@pytest.fixture
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a store that reclaims space late delete files in passes of upkeep alone."""
    monkeypatch.setattr(reclaim, "_COLLECT_PAUSE", 3600.0)


def at(seq_num: int, timestamp: int) -> StreamPosition:
    return StreamPosition(SeqNum(seq_num), Timestamp(timestamp))


def bodies(*texts: str) -> list[Record]:
    return [Record(text.encode()) for text in texts]


def incompressible(size: int, seed: int = 0) -> bytes:
    """Bytes that take as much on disk as in memory, the same for the same seed."""
    return random.Random(seed).randbytes(size)
