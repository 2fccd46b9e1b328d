"""Simulated storage: rows that survive their process, late or lost answers and seeded failures."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from datetime import UTC, datetime

from streamfold.blob.blob_store import DEFAULT_CHUNK_SIZE, BlobMeta, BlobStore
from streamfold.errors import (
    BlobNotFoundError,
    BlobOutcomeUnknownError,
    BlobUnavailableError,
    StorageError,
    WriterFencedError,
)
from streamfold.store.engine.engine import DiskUse, Op, Row, Tables, WriteBatch, size_of
from streamfold.testing.simulation.loop import chance

#: Rows per page after the first page.
_PAGE_ROWS = 8


@dataclass
class Weather:
    """How slow and unreliable storage is. The dice of each call decide the rest."""

    #: Maximum simulated seconds of an answer. Most are far faster.
    slowest: float = 0.02
    #: Probability that a call fails.
    failures: float = 0.0
    #: Faults so far, by kind.
    injected: Counter[str] = field(default_factory=Counter)

    async def pass_time(self) -> None:
        """Let other tasks run, briefly or for up to `slowest` seconds."""
        random = chance().random
        if random() < 0.3:
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(random() ** 3 * self.slowest)

    async def perform(self, effect: Callable[[], None], after: float = 0.0) -> None:
        """Apply an effect to storage, no earlier than loop time `after`.

        Once requested, the effect takes place even if the caller dies or stops waiting.
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
        """Decide whether a call fails now, and count a failure as `kind`."""
        if not self.failures or chance().random() >= self.failures:
            return False
        self.injected[kind] += 1
        return True


@dataclass
class SimulatedStorage:
    """The state that survives a crash."""

    rows: dict[bytes, bytes] = field(default_factory=dict)
    keys: list[bytes] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    #: Number of times a writer has opened the storage.
    epoch: int = 0

    def apply(self, ops: Sequence[Op]) -> None:
        """Apply a commit atomically."""
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
        #: Loop time at which the last commit takes effect. The next one takes effect later.
        self._last = 0.0
        self._closed = False
        self._failed = False

    async def _use(self) -> None:
        """Simulate a round trip to storage. Raises StorageError if the engine is closed."""
        await self._weather.pass_time()
        if self._closed:
            raise StorageError("simulated: the engine is closed")

    @property
    def damaged_files(self) -> Sequence[str]:
        return ()

    def prepare(self, ops: list[Op]) -> WriteBatch:
        return WriteBatch(ops, size_of(ops))

    async def commit(self, batch: WriteBatch) -> None:
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
        """Write in call order. Raises WriterFencedError if another writer has taken over."""

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


class SimulatedBlobs(BlobStore):
    """Blobs on simulated storage, under a prefix.

    A write of unknown outcome leaves the whole blob, nothing, or half of it. The blob store contract
    rules out the half, but nothing may read a blob whose write was never acknowledged anyway.
    """

    def __init__(self, storage: SimulatedStorage, weather: Weather, prefix: str) -> None:
        self._blobs = storage.blobs
        self._weather = weather
        self._prefix = prefix

    async def put(self, key: str, data: bytes | AsyncIterator[bytes]) -> None:
        weather = self._weather
        if weather.fails("blob writes refused"):
            raise BlobUnavailableError("simulated: the write was refused")
        whole = data if isinstance(data, bytes) else await self._gather(data)
        if weather.fails("answers to blob writes lost"):
            await self._lose(key, whole)
            raise BlobOutcomeUnknownError("simulated: the answer to a write was lost")
        await weather.perform(lambda: self._blobs.__setitem__(self._prefix + key, whole))
        await weather.pass_time()

    async def _gather(self, pieces: AsyncIterator[bytes]) -> bytes:
        """Join the pieces. An error from the sender ends the write without effect."""
        parts = []
        async for piece in pieces:
            parts.append(piece)
            await self._weather.pass_time()
        return b"".join(parts)

    async def _lose(self, key: str, whole: bytes) -> None:
        choice = chance().random()
        if choice < 0.4:
            return
        if choice < 0.6:
            self._weather.injected["blobs torn"] += 1
            whole = whole[: len(whole) // 2]
        await self._weather.perform(lambda: self._blobs.__setitem__(self._prefix + key, whole))

    async def put_if_absent(self, key: str, data: bytes) -> str:
        raise NotImplementedError

    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        raise NotImplementedError

    async def get_with_etag(self, key: str) -> tuple[bytes, str]:
        return await self.get(key), ""

    async def get(self, key: str) -> bytes:
        await self._weather.pass_time()
        data = self._blobs.get(self._prefix + key)
        await self._weather.pass_time()
        if self._weather.fails("blob reads failed"):
            raise BlobUnavailableError("simulated: the read failed")
        if data is None:
            raise BlobNotFoundError(key)
        return data

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return (await self.get(key))[start : start + length]

    async def stream(self, key: str, chunk_size: int = DEFAULT_CHUNK_SIZE) -> AsyncIterator[bytes]:
        data = await self.get(key)
        for start in range(0, len(data), chunk_size):
            yield data[start : start + chunk_size]
            await self._weather.pass_time()

    async def head(self, key: str) -> BlobMeta:
        return self._meta(key, await self.get(key))

    async def list(self, prefix: str = "") -> AsyncIterator[BlobMeta]:
        await self._weather.pass_time()
        if self._weather.fails("blob reads failed"):
            raise BlobUnavailableError("simulated: the listing failed")
        start = self._prefix + prefix
        for key in sorted(key for key in self._blobs if key.startswith(start)):
            if (data := self._blobs.get(key)) is not None:
                yield self._meta(key.removeprefix(self._prefix), data)
            await self._weather.pass_time()

    async def delete(self, key: str) -> None:
        await self._weather.pass_time()
        if self._weather.fails("blob deletions failed"):
            if chance().random() < 0.5:
                await self._weather.perform(lambda: self._remove(key))
            raise BlobUnavailableError("simulated: the deletion failed")
        await self._weather.perform(lambda: self._remove(key))

    def _remove(self, key: str) -> None:
        self._blobs.pop(self._prefix + key, None)

    def _meta(self, key: str, data: bytes) -> BlobMeta:
        return BlobMeta(key, len(data), None, datetime.fromtimestamp(0, UTC))
