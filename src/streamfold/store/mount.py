"""One opening of storage: the engine, its committer and the stream logs in memory.

A failure discards the whole mount and opens another, so that no in-memory state outlives it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from streamfold.errors import (
    BasinDeletingError,
    DataCorruptError,
    StoreClosingError,
    StreamfoldError,
    StreamNotFoundError,
)
from streamfold.model.names import StreamRef
from streamfold.model.positions import STREAM_START
from streamfold.store import keys, rows
from streamfold.store.damage import (
    KnownDamage,
    StoreDamagedError,
    StreamDamagedError,
    stream_damaged,
)
from streamfold.store.engine.engine import Engine, Op
from streamfold.store.log.admission import Admission
from streamfold.store.log.chunk_files import ChunkFiles
from streamfold.store.log.committer import CommitReport, Committer
from streamfold.store.log.log_leases import LogLease
from streamfold.store.log.log_reader import LogReader
from streamfold.store.log.recent_chunks import RecentChunks
from streamfold.store.log.retention import TrimPoints
from streamfold.store.log.shares import Share
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.opening_rows import (
    DeletingBasins,
    deleting_basins,
    live_bytes,
    next_stream_id,
    own_row,
)
from streamfold.store.read.requests import OpenScans
from streamfold.store.rows import (
    BasinRow,
    CounterRow,
    StateRow,
    StreamRow,
)
from streamfold.store.settings import StoreSettings
from streamfold.store.upkeep.live_bytes import LiveBytes

#: Maximum producers over all logs in memory. Each takes about 500 bytes, and a stream may have
#: 4096.
_PRODUCERS_MAX = 250_000
#: Logs checked per eviction. More than one, so that the number of logs can shrink.
_CHECKED_AT_ONCE = 32
#: Logs read concurrently. Each may take a scan and a 64 KiB block.
_READ_AT_ONCE = 256
#: Maximum basin rows in memory. Creating a stream needs its basin's row.
_BASINS_MAX = 1000
#: Maximum names known to have no stream. Creating one looks it up twice, before and under the lock.
_MISSING_MAX = 1000
#: Stream ids that one commit reserves. A restart skips the unassigned ids.
_IDS_AT_ONCE = 256

#: Appends to a new stream, in the step that creates it. Must not fail.
FirstAppend: TypeAlias = Callable[[StreamLog], object]


@dataclass(slots=True)
class _Load:
    """A log being read from storage or created, and the callers that wait for it."""

    waiters: list[asyncio.Future[LogLease]] = field(default_factory=list)
    #: Whether the stream's row was replaced after it was read.
    outdated: bool = False


class MountObserver:
    """Observes what becomes durable. This base class ignores it. Methods must not fail."""

    __slots__ = ()

    def trimmed(self, log: StreamLog, deletable_at: int) -> None:
        """Records were trimmed.

        They can be deleted from `deletable_at` (ms since the Unix epoch) on.
        """

    def stream_written(self, ref: StreamRef, row: StreamRow) -> None:
        """A stream's row was written."""

    def content_stored(self, share: Share) -> None:
        """A new stream and its initial content were stored."""

    def appended(self, shares: Sequence[Share]) -> None:
        """Records became durable. Called before acks resolve and followers wake."""

    def committed(self, report: CommitReport) -> None:
        """A commit became durable."""


class Mount:
    """The engine, the committer and all state read since storage was opened."""

    def __init__(
        self,
        engine: Engine,
        settings: StoreSettings,
        admission: Admission,
        now: Callable[[], int],
        next_stream_id: int | DataCorruptError,
        live: LiveBytes,
        files: ChunkFiles,
        damage: KnownDamage,
        basins: DeletingBasins,
        observe: Callable[[Mount], MountObserver] | None = None,
    ) -> None:
        """`observe` creates the mount's observer, which may use the mount."""
        self.engine = engine
        self.damage = damage
        self.files = files
        self.now = now
        self.recent = RecentChunks(settings.recent_bytes)
        self.scans = OpenScans()
        self.live = live
        self.committer = Committer(
            engine,
            settings,
            admission,
            files,
            self._on_durable,
            self._on_commit,
            damage.read_only,
        )
        self._settings = settings
        #: Milliseconds.
        self._trim_grace = round(settings.trim_grace * 1000)
        #: Why no stream can be created; None if the next stream id is known.
        self._ids_unknown = next_stream_id if isinstance(next_stream_id, Exception) else None
        self._next_stream_id = next_stream_id if isinstance(next_stream_id, int) else 0
        #: The first stream id that storage has not reserved.
        self._ids_end = self._next_stream_id
        self._basins: dict[str, BasinRow] = {}
        #: Deleted basins that still have rows. Their streams reject appends and reads.
        self._deleting_basins = basins
        #: Counts the starts and ends of basin writes. A row read across one of them may be
        #: outdated.
        self._basin_writes = 0
        self._logs: OrderedDict[StreamRef, StreamLog] = OrderedDict()
        self._reader = LogReader(engine, now, self._trim_grace)
        self._loads: dict[StreamRef, _Load] = {}
        #: Forks in progress, by the id of each stream whose records they may inherit.
        self._forking: Counter[int] = Counter()
        #: Names known to have no stream on storage, until one is written.
        self._missing: set[StreamRef] = set()
        #: Logs to read in the next event loop iteration.
        self._unread: list[StreamRef] = []
        #: Referenced here, because the event loop keeps no reference to them.
        self._reading: set[asyncio.Task[None]] = set()
        #: Producers per stream id for the logs in memory that have any, and their total.
        self._producer_counts: dict[int, int] = {}
        self._producer_total = 0
        self.observer = MountObserver() if observe is None else observe(self)

    @classmethod
    async def start(
        cls,
        engine: Engine,
        settings: StoreSettings,
        admission: Admission,
        now: Callable[[], int],
        files: ChunkFiles,
        damage: KnownDamage,
        observe: Callable[[Mount], MountObserver],
    ) -> Mount:
        """Start from the contents of `engine`, which must have been opened for this mount alone.

        An unreadable row never counts as missing: `damage` records what does not work without it.
        """
        following = await next_stream_id(engine, damage)
        live, basins = await live_bytes(engine), await deleting_basins(engine)
        return cls(
            engine, settings, admission, now, following, live, files, damage, basins, observe
        )

    def new_stream_id(self) -> int:
        """Return an unused stream id. Commit it together with `id_rows(id)`.

        Raises StoreDamagedError if storage cannot tell which ids have been used.
        """
        if self._ids_unknown is not None:
            raise self._ids_unknown
        self._next_stream_id += 1
        return self._next_stream_id - 1

    def id_rows(self, stream_id: int) -> list[Op]:
        """Return the rows that reserve `stream_id` for good. Commit them in the same step."""
        if stream_id < self._ids_end:
            return []
        self._ids_end = stream_id + _IDS_AT_ONCE
        return [(keys.STREAM_IDS, rows.encode(CounterRow(self._ids_end)))]

    async def basin(self, name: str) -> BasinRow | None:
        if (cached := self._basins.get(name)) is not None:
            return cached
        writes = self._basin_writes
        row = await own_row(self.engine, keys.basin(name), BasinRow)
        if isinstance(row, DataCorruptError):
            raise self._basin_damaged(name, row) from row
        if row is None:
            return None
        if writes == self._basin_writes:
            if len(self._basins) >= _BASINS_MAX:
                self._basins.clear()
            self._basins[name] = row
        return row

    def _basin_damaged(self, name: str, error: DataCorruptError) -> StoreDamagedError:
        effect = f"basin {name!r} cannot be used: its configuration cannot be read"
        return self.damage.note_row(effect, error)

    async def put_basin(self, name: str, row: BasinRow | None, *ops: Op) -> None:
        """Commit the basin's row, or its removal, together with `ops`. The caller holds its lock.

        A row marked as deleted stops all streams of the basin in this step.
        """
        self.committer.check_open()
        self._basin_writes += 1
        value = None if row is None else rows.encode(row)
        if row is not None and row.deleted_at is not None:
            self._deleting_basins.names.add(name)
            for log in self._logs.values():
                if log.basin == name:
                    log.delete_with_basin()
        await self.committer.write([(keys.basin(name), value), *ops])
        self._basin_writes += 1
        self._basins.pop(name, None)
        if row is None:
            self._deleting_basins.names.discard(name)

    @property
    def deleting_basins(self) -> list[str]:
        """The basins known to be deleted, or whose deletion is in the next commit, in order."""
        return sorted(self._deleting_basins.names)

    def check_basin(self, name: str) -> None:
        """Raise if the basin is being deleted.

        Call this in the same step as the commit it guards.
        """
        if name in self._deleting_basins.names:
            raise BasinDeletingError(name)
        if damage := self._deleting_basins.damage_of(name):
            raise self._basin_damaged(name, damage)

    async def stream(self, ref: StreamRef) -> StreamRow | None:
        row = await own_row(self.engine, keys.stream(*ref), StreamRow)
        if isinstance(row, DataCorruptError):
            damaged = stream_damaged(ref, None, row)
            self.damage.note(damaged.damage)
            raise damaged from row
        return row

    async def put_stream(
        self, ref: StreamRef, row: StreamRow | None, *ops: Op, content: Share | None = None
    ) -> None:
        """Commit the stream's row, or its removal, with `ops` and `content`.

        The caller holds its lock.

        Updates the log in memory. If the name now belongs to another stream, or to none, the log is
        evicted and everything that still uses it fails.
        """
        value = None if row is None else rows.encode(row)
        await self.committer.write([(keys.stream(*ref), value), *ops], content)
        if content is not None and content.chunks:
            self.live.add(len(content.chunks), sum(content.stored_bytes))
            self.observer.content_stored(content)
        if row is not None:
            self.observer.stream_written(ref, row)
        self._missing.discard(ref)
        if load := self._loads.get(ref):
            load.outdated = True
        log = self._logs.get(ref)
        if log is None:
            return
        if row is not None and row.id == log.id:
            log.replace_row(row)
            return
        self._drop(log)
        log.failure = StreamNotFoundError(*ref)

    @contextmanager
    def forking(self, source: StreamLog) -> Iterator[None]:
        """Retain all records that a fork of `source` may inherit while it is being created."""
        ids = (source.id, *source.row.ancestors)
        self._forking.update(ids)
        try:
            yield
        finally:
            self._forking.subtract(ids)
            for stream_id in ids:
                if not self._forking[stream_id]:
                    del self._forking[stream_id]

    def is_forking(self, stream_id: int) -> bool:
        """Return whether a fork being created may inherit records of the stream."""
        return stream_id in self._forking

    async def create_stream(
        self, ref: StreamRef, row: StreamRow, *, first: FirstAppend
    ) -> LogLease:
        """Commit a new stream together with what `first` appends. The caller holds its lock.

        There must be no such stream, or only a deleted one that no fork needs. Other callers wait
        for the log until the new stream is durable.
        """
        while ref in self._loads:
            with suppress(StreamNotFoundError):
                (await self.lease(ref)).release()
        if (former := self._logs.get(ref)) is not None:
            self._drop(former)
            former.failure = StreamNotFoundError(*ref)
        load = self._loads[ref] = _Load()
        self._missing.discard(ref)
        log = self._reader.log_of(ref, row, StateRow(), STREAM_START, row.created_at)
        lease = LogLease(log)
        try:
            self.check_basin(ref.basin)
            first(log)
            log.write_state()  # a stream without records has a tail too
            stream: Op = keys.stream(*ref), rows.encode(row)
            await self.committer.write_with(log, [stream, *self.id_rows(row.id)])
        except BaseException as error:
            self._end_load(ref, load, error)
            raise
        self.observer.stream_written(ref, row)
        self._end_load(ref, load, log)
        return lease

    async def lease(self, ref: StreamRef) -> LogLease:
        """Return a lease of the stream's log.

        Raises StreamNotFoundError if the stream does not exist.

        A stream never has two logs: callers share the one in memory, or wait together until it is
        read.
        """
        if log := self.log_in_memory(ref):
            return LogLease(log)
        if self.is_missing(ref):
            raise StreamNotFoundError(*ref)
        load = self._loads.get(ref)
        if load is None:
            load = self._loads[ref] = _Load()
            self._want(ref)
        waiter: asyncio.Future[LogLease] = asyncio.get_running_loop().create_future()
        load.waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release()  # granted just as the caller was cancelled
            raise
        finally:
            # Deleted because its error refers to this call: otherwise each stream created by an
            # append would leave a reference cycle in memory until the garbage collector runs.
            del waiter

    def is_missing(self, ref: StreamRef) -> bool:
        """Return whether the stream is known not to exist and nobody is creating it."""
        return ref in self._missing and ref not in self._loads

    def log_in_memory(self, ref: StreamRef) -> StreamLog | None:
        """Return the stream's log if it is in memory.

        Without a lease, use it before the next `await`.
        """
        log = self._logs.get(ref)
        if log is not None:
            self._logs.move_to_end(ref)
        return log

    def trims_in_memory(self, ref: StreamRef, stream_id: int) -> TrimPoints | None:
        """Return the stream's trim points; None if all those on storage are already in effect."""
        log = self._logs.get(ref)
        return log.trims if log is not None and log.id == stream_id else None

    async def settle(self, log: StreamLog) -> None:
        """Wait until the state behind a rejection is durable, so that clients may rely on it."""
        await log.settled()
        if log.terms.closed and not log.durable_closed:
            await self.committer.write([])  # a close without a record: no ack to wait for

    async def drain(self) -> None:
        """Wait until nothing is pending, then end all followers with StoreClosingError."""
        await self.committer.drain()
        for log in self._logs.values():
            log.dismiss(StoreClosingError())

    def abandon(self, cause: StreamfoldError) -> None:
        """Fail everything outstanding. The mount must not be used afterwards."""
        self.committer.fail(cause)
        for log in self._logs.values():
            if log.failure is None:
                log.fail((), cause, cause)

    def _want(self, ref: StreamRef) -> None:
        """Read the log together with all others requested in this event loop iteration."""
        if not self._unread:
            task = asyncio.create_task(self._read_wanted())
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)
        self._unread.append(ref)

    async def _read_wanted(self) -> None:
        """Read the requested logs and hand them to their waiters."""
        unread, self._unread = self._unread, []
        for first in range(0, len(unread), _READ_AT_ONCE):
            refs = unread[first : first + _READ_AT_ONCE]
            for ref in refs:
                self._loads[ref].outdated = False
            for ref, outcome in zip(refs, await self._reader.read(refs), strict=True):
                load = self._loads[ref]
                if load.outdated:
                    self._want(ref)
                else:
                    self._end_load(ref, load, outcome)

    def _end_load(self, ref: StreamRef, load: _Load, outcome: StreamLog | BaseException) -> None:
        """Keep the log in memory, and give each waiter a lease."""
        del self._loads[ref]
        if damage := self._deleting_basins.damage_of(ref.basin):
            outcome = self._basin_damaged(ref.basin, damage)  # it may be deleted
        if isinstance(outcome, StreamLog):
            if ref.basin in self._deleting_basins.names:
                outcome.delete_with_basin()
            self._logs[ref] = outcome
            self._count_producers(outcome)
        elif isinstance(outcome, StreamNotFoundError):
            if len(self._missing) >= _MISSING_MAX:
                self._missing.clear()
            self._missing.add(ref)
        elif isinstance(outcome, StreamDamagedError):
            self.damage.note(outcome.damage)
        waiters, load.waiters = load.waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if isinstance(outcome, StreamLog):
                waiter.set_result(LogLease(outcome))
            elif isinstance(outcome, Exception):
                waiter.set_exception(outcome)
            else:
                waiter.cancel()
        self._shrink()

    def _shrink(self) -> None:
        """Evict idle logs, least recently used first, while there are too many.

        Checks only a few per call: with 10,000 logs in memory, checking all of them would take 10
        ms for each log loaded.
        """
        for _ in range(min(_CHECKED_AT_ONCE, len(self._logs))):
            if not self._crowded():
                return
            ref, log = next(iter(self._logs.items()))
            if log.idle:
                self._drop(log)
            else:
                self._logs.move_to_end(ref)

    def _crowded(self) -> bool:
        """Return whether more logs are in memory than the limits allow."""
        return (
            len(self._logs) > self._settings.idle_streams or self._producer_total > _PRODUCERS_MAX
        )

    def _drop(self, log: StreamLog) -> None:
        del self._logs[log.ref]
        self.recent.forget(log.id)
        self._producer_total -= self._producer_counts.pop(log.id, 0)

    def _count_producers(self, log: StreamLog) -> None:
        count = log.terms.producer_count
        if not count and log.id not in self._producer_counts:
            return
        self._producer_total += count - self._producer_counts.get(log.id, 0)
        self._producer_counts[log.id] = count

    def _on_commit(self, report: CommitReport) -> None:
        self.observer.committed(report)

    def _on_durable(self, shares: Sequence[Share]) -> None:
        self.live.commits += 1
        add_recent = self.recent.add
        count = size = 0
        for share in shares:
            log = share.log
            for chunk in share.chunks:
                add_recent(log.id, chunk)
            count += len(share.chunks)
            size += sum(share.stored_bytes)
            if log.terms.has_producers and self._logs.get(log.ref) is log:
                self._count_producers(log)
            if share.trimmed:
                at_once = share.trim_point_at_once > log.trims.effective
                deletable_at = self.now() + (0 if at_once else self._trim_grace)
                self.observer.trimmed(log, deletable_at)
        self.live.add(count, size)
        self.observer.appended(shares)
        if self._producer_total > _PRODUCERS_MAX:
            self._shrink()
