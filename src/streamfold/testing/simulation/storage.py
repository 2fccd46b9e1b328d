"""Simulated storage: rows that survive their process, late answers, lost ones, and seeded failures."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field

from streamfold.errors import StorageError, WriterFencedError
from streamfold.store.engine.engine import Batch, DiskUse, Op, Row, Tables, size_of
from streamfold.testing.simulation.loop import chance

#: Rows of a page after the first.
_PAGE_ROWS = 8


@dataclass
class Weather:
    """How storage behaves: calm or not. The dice of each call decide the rest."""

    #: Simulated seconds that an answer takes at most; most take far less.
    slowest: float = 0.02
    #: Probability that a call fails.
    failures: float = 0.0
    #: Faults so far, by kind.
    injected: Counter[str] = field(default_factory=Counter)

    async def pass_time(self) -> None:
        """Let other tasks run, for a moment or for long."""
        random = chance().random
        if random() < 0.3:
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(random() ** 3 * self.slowest)

    async def perform(self, effect: Callable[[], None], after: float = 0.0) -> None:
        """Have storage do something, not before the time `after`.

        Once asked for, it happens whether or not the caller lives or waits.
        """
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def run() -> None:
            try:
                effect()
            except Exception as error:
                if not done.done():
                    done.set_exception(error)
                    done.exception()
            else:
                if not done.done():
                    done.set_result(None)

        delay = chance().random() ** 3 * self.slowest
        loop.call_at(max(loop.time() + delay, after), run, context=Context())
        await done

    def fails(self, kind: str) -> bool:
        """Whether a call fails now; counted as `kind`."""
        if not self.failures or chance().random() >= self.failures:
            return False
        self.injected[kind] += 1
        return True


@dataclass
class SimulatedStorage:
    """What survives a crash."""

    rows: dict[bytes, bytes] = field(default_factory=dict)
    keys: list[bytes] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    #: Openings as a writer so far.
    epoch: int = 0

    def apply(self, ops: Sequence[Op]) -> None:
        """Apply a commit as a whole."""
        for key, value in ops:
            at = bisect_left(self.keys, key)
            present = at < len(self.keys) and self.keys[at] == key
            if value is None:
                if present:
                    del self.keys[at]
                    del self.rows[key]
            else:
                if not present:
                    self.keys.insert(at, key)
                self.rows[key] = bytes(value)


class SimulatedEngine:
    """An engine on simulated storage."""

    def __init__(self, storage: SimulatedStorage, weather: Weather) -> None:
        storage.epoch += 1
        self.epoch = storage.epoch
        self._storage = storage
        self._weather = weather
        self._order = asyncio.Lock()
        #: When the last commit takes effect: the next one does so later.
        self._last = 0.0
        self._closed = False
        self._failed = False

    async def _use(self) -> None:
        """Reach storage; StorageError if the engine is closed."""
        await self._weather.pass_time()
        if self._closed:
            raise StorageError("simulated: the engine is closed")

    @property
    def damaged_files(self) -> Sequence[str]:
        return ()

    def prepare(self, ops: list[Op]) -> Batch:
        return Batch(ops, size_of(ops))

    async def commit(self, batch: Batch) -> None:
        async with self._order:
            await self._use()
            self._check_writer()
            if self._failed:
                raise StorageError("simulated: an earlier commit failed")
            if self._weather.fails("commits failed"):
                self._failed = True
                if chance().random() < 0.5:
                    self._weather.injected["commits failed after their effect"] += 1
                    await self._apply(batch.ops)
                if chance().random() < 0.2:
                    self._weather.injected["answers to commits lost"] += 1
                    await asyncio.Event().wait()
                raise StorageError("simulated: the commit failed")
            await self._apply(batch.ops)
            await self._weather.pass_time()

    async def _apply(self, ops: Sequence[Op]) -> None:
        """Write in the order of the calls, unless another writer has come."""

        def write() -> None:
            self._check_writer()
            self._storage.apply(ops)

        now = asyncio.get_running_loop().time()
        self._last = max(self._last, now) + 1e-6
        await self._weather.perform(write, self._last)

    async def get(self, key: bytes) -> bytes | None:
        await self._use()
        value = self._storage.rows.get(key)
        await self._use()
        self._fail_sometimes()
        return value

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        values = []
        await self._use()
        for key in keys:
            if chance().random() < 0.1:
                await self._use()
            values.append(self._storage.rows.get(key))
        await self._use()
        self._fail_sometimes()
        return values

    async def scan(
        self,
        start: bytes,
        end: bytes,
        *,
        first: int = 2,
        descending: bool = False,
        eager: bool = False,
    ) -> AsyncGenerator[list[Row]]:
        size = first
        while True:
            await self._use()
            keys = self._storage.keys
            low, high = bisect_left(keys, start), bisect_left(keys, end)
            part = keys[max(low, high - size) : high] if descending else keys[low:high][:size]
            page = [(key, self._storage.rows[key]) for key in part]
            await self._use()
            self._fail_sometimes()
            if not page:
                return
            if descending:
                page.reverse()
                end = page[-1][0]
            else:
                start = page[-1][0] + b"\x00"
            yield page
            size = _PAGE_ROWS

    async def check(self) -> None:
        await self._weather.pass_time()
        self._check_writer()

    async def frozen(self) -> bool:
        return False

    async def tables(self) -> Tables:
        return Tables((), ())

    async def flush(self) -> None:
        await self._weather.pass_time()

    async def merge(self, runs: Sequence[int], *, young: bool) -> bool:
        return False

    async def collect(self) -> DiskUse:
        return DiskUse(0, 0)

    async def close(self, *, flush: bool = True) -> None:
        self._closed = True

    def _check_writer(self) -> None:
        if self._storage.epoch != self.epoch:
            raise WriterFencedError

    def _fail_sometimes(self) -> None:
        if self._weather.fails("reads failed"):
            raise StorageError("simulated: the read failed")
