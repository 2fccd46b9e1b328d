"""Group commit: everything that arrives during one commit forms the next.

accept ─▶ pending per stream ─▶ gather ─▶ engine.commit ─▶ settle ─▶ acks, followers
                                  ▲            │ up to `commits_in_flight`, settled in order
                                  └────────────┘
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from time import perf_counter
from typing import Final, NamedTuple

from streamfold.errors import (
    DeviceFailedError,
    OutcomeUnknownError,
    RetryLaterError,
    StoreRecoveringError,
    StreamfoldError,
    WriterFencedError,
)
from streamfold.store.engine.engine import Engine, Op
from streamfold.store.log.admission import Admission
from streamfold.store.log.chunk_files import ChunkFiles
from streamfold.store.log.shares import Share, build
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.settings import StoreSettings

#: Metered bytes from which a commit counts as large, and those that must be pending before another
#: commit starts alongside a large one: with less, the overhead per commit and file would dominate.
_LARGE: Final = 256 << 10
_BESIDE_LARGE: Final = 2 << 20
#: Maximum streams per commit: taking and settling each blocks the event loop for 10 us.
_STREAMS_MAX: Final = 1000


class CommitReport(NamedTuple):
    """Measurements of one durable commit."""

    #: Seconds from the commit's start until it was durable.
    duration: float
    #: Seconds since the start of the previous commit; None for the first.
    interval: float | None
    #: Bytes written to rows and chunk files.
    size: int


@dataclass(slots=True)
class _Rows:
    """Rows that wait for a commit, with the first content of a stream if they create one."""

    ops: Sequence[Op]
    content: Share | None
    #: `Committer._touched` when these rows arrived.
    after: int
    done: asyncio.Future[None]


@dataclass(slots=True)
class _Commit:
    shares: list[Share]
    rows: list[_Rows]
    metered: int

    @property
    def all_shares(self) -> list[Share]:
        """Also those that create streams."""
        return [*self.shares, *(row.content for row in self.rows if row.content is not None)]


class Committer:
    """Commits the streams' pending batches to the engine and settles them once durable."""

    def __init__(
        self,
        engine: Engine,
        settings: StoreSettings,
        admission: Admission,
        files: ChunkFiles,
        on_durable: Callable[[Sequence[Share]], None],
        on_commit: Callable[[CommitReport], None],
        read_only: StreamfoldError | None = None,
    ) -> None:
        """With `read_only`, all writes raise that error, and logs stay unchanged."""
        self._engine = engine
        self._files = files
        self._settings = settings
        self._admission = admission
        self._on_durable = on_durable
        self.read_only = read_only
        self._on_commit = on_commit
        self._last_start: float | None = None
        #: Logs with pending changes, in the order in which they were first touched.
        self._dirty: dict[StreamLog, None] = {}
        self._touched = 0
        self._rows: list[_Rows] = []
        self._under_way: deque[tuple[_Commit, asyncio.Task[None]]] = deque()
        self._building = asyncio.Lock()
        #: Set once the newest started commit has reached the engine.
        self._reached_engine = asyncio.Event()
        self._reached_engine.set()
        self._wake = asyncio.Event()
        self._started = asyncio.Event()
        self._settled = asyncio.Event()
        #: Whether the next commit waits for earlier ones to settle, or for more to commit.
        self._gathering = False
        #: Why commits have stopped. Late callers get this error instead of waiting forever.
        self._refusal: StreamfoldError | None = None

    def touch(self, log: StreamLog) -> None:
        """Schedule the pending changes of `log` for a commit."""
        if self._refusal is not None:
            self._admission.release(log.fail((), self._refusal, self._refusal))
            return
        if self.read_only is not None:
            return
        if not self._dirty:
            self._wake.set()  # stays set while anything is pending
        if log not in self._dirty:
            self._touched += 1
            self._dirty[log] = None
        if self._gathering:
            self._settled.set()  # to check whether enough is pending now

    def check_running(self) -> None:
        """Raise if commits have stopped: what was accepted last may not be durable."""
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)

    def check_open(self) -> None:
        """Raise if nothing can be committed, because commits stopped or the store is read-only."""
        self.check_running()
        if self.read_only is not None:
            raise self.read_only.with_traceback(None)

    async def write(self, ops: Sequence[Op], content: Share | None = None) -> None:
        """Commit `ops` and `content` after everything accepted before. Durable on return."""
        self.check_open()
        done = asyncio.get_running_loop().create_future()
        self._rows.append(_Rows(ops, content, self._touched, done))
        self._wake.set()
        await done

    async def write_with(self, log: StreamLog, ops: Sequence[Op] = ()) -> None:
        """Commit `ops` together with everything `log` has pending. Durable on return."""
        self.check_open()
        done = log.attach(ops)
        self.touch(log)
        await done

    async def run(self) -> None:
        """Commit until cancelled. Raises the cause if a commit fails.

        After that, the outcome of commits in flight is unknown and the engine must not be used.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._start_commits(group))
            group.create_task(self._settle_commits())

    async def drain(self) -> None:
        """Wait until nothing is pending or in flight."""
        while self._dirty or self._rows or self._under_way:
            self._settled.clear()
            await self._settled.wait()

    def fail(self, cause: StreamfoldError) -> None:
        """Fail everything, and reject all later work.

        Commits in flight fail with an unknown outcome; everything else certainly did not happen.
        """
        final = isinstance(cause, WriterFencedError | DeviceFailedError)
        unknown = (
            cause
            if final
            else OutcomeUnknownError(
                f"storage failed during this write, which may or may not have happened: {cause}"
            )
        )
        is_definite = final or isinstance(cause, RetryLaterError)
        unsent = cause if is_definite else StoreRecoveringError(str(cause))
        self._refusal = self._refusal or unsent
        written: dict[StreamLog, list[Share]] = {log: [] for log in self._dirty}
        for commit, _ in self._under_way:
            for share in commit.shares:
                written.setdefault(share.log, []).append(share)
            for row in commit.rows:
                _fail_rows(row, unknown)
        for row in self._rows:
            _fail_rows(row, unsent)
        for log, shares in written.items():
            self._admission.release(log.fail(shares, unknown, unsent))
        self._dirty.clear()
        self._rows.clear()
        self._under_way.clear()
        self._settled.set()

    async def _start_commits(self, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        next_start = 0.0
        while True:
            await self._wake.wait()
            while not self._may_start():
                self._settled.clear()
                self._gathering = True
                await self._settled.wait()
            self._gathering = False
            if (pause := next_start - loop.time()) > 0:
                await asyncio.sleep(pause)
            next_start = loop.time() + self._settings.commit_interval
            commit = self._gather()
            task = group.create_task(self._commit(commit))
            self._under_way.append((commit, task))
            self._started.set()

    def _may_start(self) -> bool:
        """Return whether another commit may start alongside those in flight."""
        if len(self._under_way) >= self._settings.commits_in_flight:
            return False
        metered = sum([commit.metered for commit, _ in self._under_way])
        return metered < _LARGE or self._admission.used - metered >= _BESIDE_LARGE

    def _gather(self) -> _Commit:
        """Collect everything pending; with many streams, those touched first.

        Rows go with or after all records accepted before them, because they may depend on these.
        """
        logs = list(islice(self._dirty, _STREAMS_MAX))
        for log in logs:
            del self._dirty[log]
        last = self._touched - len(self._dirty)
        rows = list(takewhile(lambda row: row.after <= last, self._rows))
        del self._rows[: len(rows)]
        if not self._dirty and not self._rows:
            self._wake.clear()
        shares = [log.take() for log in logs]
        return _Commit(shares, rows, sum([share.metered for share in shares]))

    async def _commit(self, commit: _Commit) -> None:
        start, before = perf_counter(), self._last_start  # the event loop's clock may be coarse
        # The lock is first come, first served: a commit does not overtake a slow one being built.
        async with self._building:
            # Set before building: if building fails, later commits wait until they are cancelled.
            earlier, reached = self._reached_engine, asyncio.Event()
            self._reached_engine = reached
            # Records first: rows may depend on records accepted before them.
            rows = [op for row in commit.rows for op in row.ops]
            built = await build(commit.all_shares, rows, self._files, self._engine.prepare)
        batch = built.batch
        if batch.ops:
            self._last_start = start
        try:
            async with asyncio.timeout(self._settings.commit_timeout):
                if built.files:
                    await self._files.write(built.files)
                # A commit without files must not overtake one whose files take long to write.
                await earlier.wait()
                reached.set()
                await self._engine.commit(batch)
        except TimeoutError:
            raise OutcomeUnknownError(
                f"storage did not answer within {self._settings.commit_timeout} s"
            ) from None
        if batch.ops:
            interval = None if before is None else start - before
            self._on_commit(CommitReport(perf_counter() - start, interval, built.size))

    async def _settle_commits(self) -> None:
        while True:
            while not self._under_way:
                self._started.clear()
                await self._started.wait()
            commit, task = self._under_way[0]
            await task
            self._under_way.popleft()
            self._on_durable(commit.shares)
            for share in commit.shares:
                share.log.settle(share)
            self._admission.release(commit.metered)
            for share in commit.shares:
                for attached in share.attached:
                    attached.settle()
            for row in commit.rows:
                if not row.done.done():
                    row.done.set_result(None)
            self._settled.set()


def _fail_rows(row: _Rows, error: StreamfoldError) -> None:
    if not row.done.done():
        row.done.set_exception(error)
        row.done.exception()
