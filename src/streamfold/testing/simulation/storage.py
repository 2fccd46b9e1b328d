"""Simulated storage: rows and blobs that survive their process, late answers, and seeded failures."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random

from streamfold.blob.blob_store import DEFAULT_CHUNK_SIZE, BlobMeta, BlobStore
from streamfold.errors import (
    BlobNotFoundError,
    BlobOutcomeUnknownError,
    BlobUnavailableError,
    StorageError,
    WriterFencedError,
)
from streamfold.store.engine.engine import Batch, DiskUse, Op, Row, Tables, size_of

#: Rows of a page after the first.
_PAGE_ROWS = 8


@dataclass
class Weather:
    """How storage behaves: seeded, and calm or not."""

    random: Random
    #: Simulated seconds that an answer takes at most; most take far less.
    slowest: float = 0.02
    #: Probability that a call fails.
    failures: float = 0.0

    async def pass_time(self) -> None:
        """Let other tasks run, for a moment or for long."""
        choice = self.random.random()
        if choice < 0.3:
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(self.random.random() ** 3 * self.slowest)

    def fails(self) -> bool:
        return self.random.random() < self.failures


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
    """An engine on simulated storage; `kill` ends its process between two steps."""

    def __init__(self, storage: SimulatedStorage, weather: Weather) -> None:
        storage.epoch += 1
        self.epoch = storage.epoch
        self._storage = storage
        self._weather = weather
        self._order = asyncio.Lock()
        self._dead = False
        self._closed = False
        self._failed = False

    def kill(self) -> None:
        """Let nothing of this engine reach storage any more, and no answer reach its process."""
        self._dead = True

    async def _reach(self) -> None:
        """Reach storage, or never."""
        await self._weather.pass_time()
        if self._dead:
            await asyncio.Event().wait()

    async def _use(self) -> None:
        """Reach storage; StorageError if the engine is closed."""
        await self._reach()
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
            if self._weather.fails():
                self._failed = True
                if self._weather.random.random() < 0.5:
                    self._storage.apply(batch.ops)
                if self._weather.random.random() < 0.2:
                    await asyncio.Event().wait()  # its answer is lost
                raise StorageError("simulated: the commit failed")
            self._storage.apply(batch.ops)
            await self._reach()

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
            if self._weather.random.random() < 0.1:
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
        await self._reach()
        self._check_writer()

    async def tables(self) -> Tables:
        return Tables((), ())

    async def flush(self) -> None:
        await self._reach()

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
        if self._weather.fails():
            raise StorageError("simulated: the read failed")


class SimulatedBlobs(BlobStore):
    """Blobs on simulated storage, below a prefix."""

    def __init__(self, storage: SimulatedStorage, weather: Weather, prefix: str) -> None:
        self._blobs = storage.blobs
        self._weather = weather
        self._prefix = prefix

    async def put(self, key: str, data: bytes | AsyncIterator[bytes]) -> None:
        whole = data if isinstance(data, bytes) else b"".join([piece async for piece in data])
        await self._weather.pass_time()
        failed = self._weather.fails()
        if not failed or self._weather.random.random() < 0.5:
            self._blobs[self._prefix + key] = whole
        await self._weather.pass_time()
        if failed:
            raise BlobOutcomeUnknownError("simulated: the answer to a write was lost")

    async def put_if_absent(self, key: str, data: bytes) -> str:
        raise NotImplementedError

    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        raise NotImplementedError

    async def get_with_etag(self, key: str) -> tuple[bytes, str]:
        return await self.get(key), ""

    async def get(self, key: str) -> bytes:
        await self._weather.pass_time()
        if self._weather.fails():
            raise BlobUnavailableError("simulated: the read failed")
        if self._prefix + key not in self._blobs:
            raise BlobNotFoundError(key)
        return self._blobs[self._prefix + key]

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return (await self.get(key))[start : start + length]

    async def stream(self, key: str, chunk_size: int = DEFAULT_CHUNK_SIZE) -> AsyncIterator[bytes]:
        yield await self.get(key)

    async def head(self, key: str) -> BlobMeta:
        return self._meta(key, await self.get(key))

    async def list(self, prefix: str = "") -> AsyncIterator[BlobMeta]:
        await self._weather.pass_time()
        start = self._prefix + prefix
        for key in sorted(key for key in self._blobs if key.startswith(start)):
            if (data := self._blobs.get(key)) is not None:
                yield self._meta(key.removeprefix(self._prefix), data)
            await self._weather.pass_time()

    async def delete(self, key: str) -> None:
        await self._weather.pass_time()
        if self._weather.fails():
            raise BlobUnavailableError("simulated: the deletion failed")
        self._blobs.pop(self._prefix + key, None)

    def _meta(self, key: str, data: bytes) -> BlobMeta:
        return BlobMeta(key, len(data), None, datetime.fromtimestamp(0, UTC))
