"""Many streams for tests: appends to them in turn, and counts reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from streamfold.model.configs import BasinConfig
from streamfold.store import StoreSettings, StreamStore, keys
from streamfold.store.engine.engine import Engine, Row
from streamfold.store.mount import Mount
from streamfold.testing.engine_faults import FaultyEngine
from tests.store.conftest import BASIN, Bench, bodies

#: Appends under way at once.
WRITERS = 100
CREATING = BasinConfig(create_stream_on_append=True)
#: The background does nothing unless a test asks for it.
QUIET = StoreSettings(upkeep_interval=1e6, trim_grace=0)


class WatchedEngine(FaultyEngine):
    """Notes which rows are read together."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.read: list[list[bytes]] = []
        #: Rows of streams, and chunks, that scans returned.
        self.stream_rows = self.chunks = 0

    async def get_many(self, wanted: Sequence[bytes]) -> list[bytes | None]:
        self.read.append(list(wanted))
        return await super().get_many(wanted)

    @property
    def read_by_callers(self) -> list[list[bytes]]:
        """Without the first pass of upkeep, which reads what streams hold whenever it gets to that."""
        held = keys.stream_bytes(0)[:1]
        return [read for read in self.read if not all(key.startswith(held) for key in read)]

    async def scan(
        self,
        start: bytes,
        end: bytes,
        *,
        first: int = 2,
        descending: bool = False,
        eager: bool = False,
    ) -> AsyncGenerator[list[Row]]:
        async for page in super().scan(start, end, first=first, descending=descending, eager=eager):
            for key, _ in page:
                self.stream_rows += keys.STREAMS_START <= key < keys.STREAMS_END
                self.chunks += keys.is_chunk(key)
            yield page


def watch(bench: Bench) -> WatchedEngine:
    """Watch what is read from storage from now on."""
    watched = bench.engine.inner = WatchedEngine(bench.engine.inner)
    return watched


def mount_of(store: StreamStore) -> Mount:
    assert store._supervisor.current is not None
    return store._supervisor.current.mount


async def append_in_turn(store: StreamStore, names: Sequence[str]) -> None:
    turns = iter(names)

    async def write() -> None:
        for name in turns:
            await store.append(BASIN, name, bodies(name))

    async with asyncio.TaskGroup() as group:
        for _ in range(WRITERS):
            group.create_task(write())
