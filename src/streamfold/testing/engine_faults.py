"""A fault-injecting engine, for testing code built on one."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from streamfold.errors import StorageError, StorageFullError
from streamfold.store import keys
from streamfold.store.engine.engine import DiskUse, Engine, Op, Row, Tables, WriteBatch


class CommitFault(enum.Enum):
    """What happens to one commit."""

    #: Succeeds, so that a script can fail a later commit.
    NONE = "none"
    #: Fails without writing anything.
    BEFORE = "before"
    #: Writes everything, then reports failure.
    AFTER = "after"
    #: Never returns.
    SILENCE = "silence"
    #: Fails with a full disk, without writing anything.
    FULL = "full"


class HeldRead:
    """An engine answer that a test holds back while other state changes."""

    def __init__(self) -> None:
        #: Set when `inner` has answered.
        self.answered = asyncio.Event()
        #: The test sets this to deliver the answer.
        self.release = asyncio.Event()


class FaultyEngine:
    """Forwards every call to `inner`, except commits that a test makes fail.

    `hold()` stops commits before they reach `inner` until `resume()`, so that a test can observe
    records that are not durable yet. `hold_read()` and `hold_scan()` hold back a single answer.
    """

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.commits: list[list[Op]] = []
        #: Pending faults, next first, each with whether it applies only to commits with records.
        self._faults: list[tuple[CommitFault, bool]] = []
        self._open = asyncio.Event()
        self._open.set()
        self._order = asyncio.Lock()
        #: Whether a commit has failed. All later commits must then fail too.
        self._failed = False
        self._held_reads: dict[bytes, HeldRead] = {}
        self._held_scans: dict[bytes, HeldRead] = {}

    @property
    def epoch(self) -> int:
        return self.inner.epoch

    @property
    def damaged_files(self) -> Sequence[str]:
        return self.inner.damaged_files

    def fail_next(self, fault: CommitFault, *, with_records: bool = False) -> None:
        """Inject `fault` into the next commit. `with_records` skips background commits."""
        self._faults.append((fault, with_records))

    def forget_faults(self) -> None:
        """Drop the pending faults."""
        self._faults.clear()

    def hold(self) -> None:
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    def hold_read(self, key: bytes) -> HeldRead:
        """Hold back the answer to the next read of `key`."""
        return self._held_reads.setdefault(key, HeldRead())

    def hold_scan(self, start: bytes) -> HeldRead:
        """Hold back the first page of the next scan that starts at `start`."""
        return self._held_scans.setdefault(start, HeldRead())

    def prepare(self, ops: list[Op]) -> WriteBatch:
        return self.inner.prepare(ops)

    async def commit(self, batch: WriteBatch) -> None:
        async with self._order:  # no commit overtakes a held or failing one
            await self._open.wait()
            if self._failed:
                raise StorageError("an earlier commit failed: open the store again")
            fault = self._take_fault(batch.ops)
            self._failed = fault is not None
            if fault is CommitFault.BEFORE:
                raise StorageError("injected: failed before the write")
            if fault is CommitFault.FULL:
                raise StorageFullError("injected: the disk is full")
            if fault is CommitFault.SILENCE:
                await asyncio.Event().wait()
            await self.inner.commit(batch)
            self.commits.append(list(batch.ops))
            if fault is CommitFault.AFTER:
                raise StorageError("injected: failed after the write")

    def _take_fault(self, ops: Sequence[Op]) -> CommitFault | None:
        if not self._faults:
            return None
        with_records = self._faults[0][1]
        if with_records and not any(keys.is_chunk(key) and value for key, value in ops):
            return None
        return self._faults.pop(0)[0]

    async def get(self, key: bytes) -> bytes | None:
        value = await self.inner.get(key)
        await self._hold_answers([key])
        return value

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        values = await self.inner.get_many(keys)
        await self._hold_answers(keys)
        return values

    async def _hold_answers(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if read := self._held_reads.pop(key, None):
                read.answered.set()
                await read.release.wait()

    def scan(
        self,
        start: bytes,
        end: bytes,
        *,
        first: int = 2,
        descending: bool = False,
        eager: bool = False,
    ) -> AsyncGenerator[list[Row]]:
        pages = self.inner.scan(start, end, first=first, descending=descending, eager=eager)
        read = self._held_scans.pop(start, None)
        return pages if read is None else _held_back(pages, read)

    async def check(self) -> None:
        await self.inner.check()

    async def frozen(self) -> bool:
        return await self.inner.frozen()

    async def tables(self) -> Tables:
        return await self.inner.tables()

    async def flush(self) -> None:
        await self.inner.flush()

    async def merge(self, runs: Sequence[int], *, young: bool) -> bool:
        return await self.inner.merge(runs, young=young)

    async def collect(self) -> DiskUse:
        return await self.inner.collect()

    async def close(self, *, flush: bool = True) -> None:
        await self.inner.close(flush=flush)


async def _held_back(pages: AsyncGenerator[list[Row]], read: HeldRead) -> AsyncGenerator[list[Row]]:
    async with aclosing(pages):
        page = await anext(pages, None)
        read.answered.set()
        await read.release.wait()
        while page is not None:
            yield page
            page = await anext(pages, None)
