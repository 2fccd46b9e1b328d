"""Background work: retention, deletion of trimmed records, streams and basins, and usage.

It can stop at any point and resume: rows in storage list the work, and every step can be repeated. It
works in small commits, so that it never delays appends.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from streamfold.errors import (
    DataCorruptError,
    DeviceFailedError,
    StorageError,
    StorageFullError,
    StreamNotFoundError,
)
from streamfold.model.names import BasinName, StreamName, StreamRef
from streamfold.store import keys, rows
from streamfold.store.catalog.access_tokens import AccessTokens
from streamfold.store.catalog.catalog import Catalog
from streamfold.store.catalog.snapshots import StreamSnapshots
from streamfold.store.engine.engine import Op, first_row
from streamfold.store.log.retention import age_limit
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.mount import Mount
from streamfold.store.read.seek import apply_retention
from streamfold.store.rows import BasinRow, CleanupRow, StateRow, StreamRow
from streamfold.store.upkeep.due_times import DueTimes
from streamfold.store.usage.recorder import UsageKeeper

logger = logging.getLogger(__name__)

#: Streams for which the oldest arrival is cached, to avoid needless reads.
_KNOWN_STREAMS = 100_000
#: Bytes of records per pass below which the store counts as unused.
_QUIET_BYTES = 1 << 20
#: Bytes of recent records that an unused store keeps in memory.
_QUIET_RECENT_BYTES = 16 << 20
#: Returns freed memory to the system; None where the C library has no such call.
_malloc_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)


@dataclass(slots=True)
class Upkeep:
    """The background work of one mount."""

    mount: Mount
    catalog: Catalog
    tokens: AccessTokens
    usage: UsageKeeper
    snapshots: StreamSnapshots
    now: Callable[[], int]
    #: Seconds from one whole pass to the next.
    interval: float
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    #: Allows one pass at a time.
    _busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Stream id to the time (ms) before which none of its records arrived.
    _oldest: dict[int, int] = field(default_factory=dict)
    _due: DueTimes = field(init=False)
    #: Bytes written when the last pass ended.
    _written: int = 0

    def __post_init__(self) -> None:
        self._due = DueTimes(self.now, self.request_pass)

    def request_pass(self) -> None:
        """Start a pass now, because there is something to clean up."""
        self._wake.set()

    def on_trimmed(self, log: StreamLog, at: int) -> None:
        """Schedule the deletion of trimmed records of `log` at the time `at`."""
        if at <= self.now():
            self.request_pass()
        else:
            self._schedule_check(log.ref, at)

    def on_delete_on_empty(self, ref: StreamRef, at: int) -> None:
        """Schedule a check, at `at`, of a new or reconfigured stream that is deleted when empty."""
        self._schedule_check(ref, at)

    def _schedule_check(self, ref: StreamRef, at: int) -> None:
        """Check the stream at `at`, unless the next pass comes first and checks it anyway."""
        if at - self.now() <= self.interval * 1000:
            self._due.add(at, ref)

    async def run(self) -> None:
        """Work until cancelled: everything every `interval` seconds, each stream when it is due."""
        try:
            with _continuing():
                await self.snapshots.sweep()
            with _continuing():
                await self._pass()  # without usage, which is written once per interval
            while True:
                deadline = asyncio.get_running_loop().time() + self.interval
                while await self._requested_before(deadline):
                    async with self._busy:
                        with _continuing():
                            await self._sweep_due()
                            await self._delete_basins()
                            await self._clean_up()
                with _continuing():
                    await self.run_once()
        finally:
            self._due.close()

    async def run_once(self) -> None:
        """One whole pass; usage is durable after it."""
        await self._pass()
        async with self._busy:
            await self.usage.write()
        await self._release_memory()

    async def _release_memory(self) -> None:
        """Return memory to the system if hardly anything was written since the last pass.

        After a load, the allocator keeps most of what the load needed, and few of the recent records
        are still read from memory.
        """
        written, self._written = self._written, self.mount.live.added
        if self._written - written < _QUIET_BYTES:
            self.mount.recent.shrink(_QUIET_RECENT_BYTES)
            if _malloc_trim is not None:
                await asyncio.to_thread(_malloc_trim, 0)

    async def _pass(self) -> None:
        async with self._busy:
            self._wake.clear()
            await self.mount.engine.check()
            await self._delete_basins()
            await self._sweep_streams()
            await self._clean_up()
            await self.tokens.remove_expired()
            await self.mount.engine.collect()

    async def _requested_before(self, deadline: float) -> bool:
        try:
            async with asyncio.timeout_at(deadline):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True

    async def _delete_basins(self) -> None:
        """Delete the streams of deleted basins, and each basin after its last stream."""
        span = keys.basins_from("", after=False), keys.BASINS_END
        async with aclosing(self.mount.engine.scan(*span, first=100)) as pages:
            async for page in pages:
                for key, value in page:
                    if rows.decode(value, BasinRow).deleted_at is not None:
                        await self._delete_basin(BasinName(keys.basin_name(key)))

    async def _delete_basin(self, basin: BasinName) -> None:
        left = 0
        span = keys.streams_from(basin, "", after=False), keys.streams_end(basin)
        async with aclosing(self.mount.engine.scan(*span, first=100)) as pages:
            async for page in pages:
                for key, _ in page:
                    left += 1
                    await self._delete_stream(_ref(*keys.stream_names(key)))
        if not left:
            async with self.catalog.locks.hold(basin):
                usage = await self.usage.forget_basin(basin)
                await self.mount.put_basin(basin, None, *usage)
        else:
            self.request_pass()  # to delete the basin after its streams

    async def _delete_stream(
        self, ref: StreamRef, when: Callable[[StreamLog], bool] = lambda log: True
    ) -> None:
        with _skipping(ref):
            await self.catalog.delete_stream(ref, when=when)
            self.request_pass()

    async def _sweep_streams(self) -> None:
        """Apply retention and delete-on-empty to every stream, and measure what each holds."""
        self.usage.begin_round()
        span = keys.STREAMS_START, keys.STREAMS_END
        async with aclosing(self.mount.engine.scan(*span, first=128)) as pages:
            async for page in pages:
                for key, value in page:
                    row = rows.decode(value, StreamRow)
                    ref = _ref(*keys.stream_names(key))
                    with _skipping(ref):
                        if row.deleted_at is None:
                            await self._sweep(ref, row)
                        await self.usage.visit(ref.basin, row.id)
        self.usage.end_round()

    async def _sweep_due(self) -> None:
        """Apply retention and delete-on-empty to the streams that are due."""
        for ref in self._due.take():
            row = await self.mount.stream(ref)
            if row is not None and row.deleted_at is None:
                with _skipping(ref):
                    await self._sweep(ref, row)

    async def _sweep(self, ref: StreamRef, row: StreamRow) -> None:
        config = row.config
        traits = row.traits
        if traits is not None and (traits.ttl is not None or traits.expires_at is not None):
            await self._delete_if_over(ref)
        limit = age_limit(config)
        # Nothing that a stream wrote itself arrived before it was created.
        created_at = 0 if row.lineage else row.created_at
        oldest = max(self._oldest.get(row.id, 0), created_at)
        if limit is not None and oldest < self.now() - limit:
            await self._expire(ref)
        if config.delete_on_empty_secs:
            await self._delete_if_empty(ref)

    @asynccontextmanager
    async def _exclusive(self, ref: StreamRef) -> AsyncIterator[StreamLog]:
        """The stream's log, while nothing else changes or deletes the stream."""
        async with self.catalog.locks.hold(*ref):
            with await self.mount.lease(ref) as log:
                yield log

    async def _expire(self, ref: StreamRef) -> None:
        """Trim the records of the stream that are too old."""
        async with self._exclusive(ref) as log:
            if log.deleting:
                return
            await apply_retention(self.mount, log)
            if len(self._oldest) >= _KNOWN_STREAMS:
                self._oldest.clear()
            self._oldest[log.id] = log.oldest_arrival
            if log.readable_from > log.trims.effective:
                log.trim(log.readable_from)
                await self._commit(log)

    async def _delete_if_empty(self, ref: StreamRef) -> None:
        with await self.mount.lease(ref) as log:
            empty = self._has_been_empty(log)
            if not empty:
                self._schedule_empty_check(log)
        if empty:
            await self._delete_stream(ref, self._has_been_empty)

    def _has_been_empty(self, log: StreamLog) -> bool:
        """Whether the stream is empty, and its last record came long enough ago."""
        min_age = log.row.config.delete_on_empty_secs * 1000
        return bool(min_age) and log.empty and log.arrived_at + min_age <= self.now()

    def _schedule_empty_check(self, log: StreamLog) -> None:
        """Schedule a check for when the stream may be deleted as empty, if that time is known."""
        min_age = log.row.config.delete_on_empty_secs * 1000
        limit, due_at = log.age_limit, log.trims.due_at
        if not min_age or not (log.empty or limit or due_at):
            return
        at = log.arrived_at + min_age
        if not log.empty:
            emptied = [due_at] if due_at else []
            emptied += [log.arrived_at + limit + 1] if limit else []
            at = max(at, min(emptied))
        self._schedule_check(log.ref, at)

    async def _delete_if_over(self, ref: StreamRef) -> None:
        with await self.mount.lease(ref) as log:
            over = log.over
        if over:
            await self._delete_stream(ref, lambda log: log.over)

    async def _clean_up(self) -> None:
        """Delete trimmed chunks and purge deleted streams, as the clean-up rows say."""
        span = keys.CLEANUPS_START, keys.CLEANUPS_END
        async with aclosing(self.mount.engine.scan(*span, first=100)) as pages:
            async for page in pages:
                for key, value in page:
                    row = rows.decode(value, CleanupRow)
                    ref = _ref(row.basin, row.stream)
                    with _skipping(ref):
                        if row.purge:
                            await self._purge(ref, keys.cleanup_stream_id(key), row.ancestors)
                        else:
                            await self._delete_trimmed(ref)

    async def _purge(self, ref: StreamRef, stream_id: int, ancestors: Sequence[int]) -> None:
        """Remove the rest of a deleted stream, its name last; wait while forks need it."""
        if await first_row(self.mount.engine, *keys.forks_span(stream_id)) is not None:
            return
        await self._delete_chunks(ref.basin, stream_id, keys.chunks_end(stream_id))
        await self.snapshots.forget(stream_id)
        async with self.catalog.locks.hold(*ref):
            row = await self.mount.stream(ref)
            ops: list[Op] = [
                (keys.state(stream_id), None),
                (keys.cleanup(stream_id), None),
                *[(keys.fork(ancestor, stream_id), None) for ancestor in ancestors],
                *await self._producers_of(stream_id),
                *await self.usage.forget_stream(stream_id),
            ]
            if row is not None and row.id == stream_id:
                await self.mount.put_stream(ref, None, *ops)
            else:  # another stream has the name by now
                await self.mount.committer.write(ops)
        if ancestors:
            self.request_pass()  # its ancestors may be removable now

    async def _producers_of(self, stream_id: int) -> list[Op]:
        ops: list[Op] = []
        span = keys.producers_span(stream_id)
        async with aclosing(self.mount.engine.scan(*span, first=100)) as pages:
            async for page in pages:
                ops += [(key, None) for key, _ in page]
        return ops

    async def _needed_from(self, stream_id: int, trim_point: int) -> int:
        """The first record below `trim_point` that a fork still needs, or `trim_point`."""
        span = keys.forks_span(stream_id)
        async with aclosing(self.mount.engine.scan(*span, first=100)) as pages:
            async for page in pages:
                for key, _ in page:
                    value = await self.mount.engine.get(keys.state(keys.fork_id(key)))
                    state = rows.decode(value, StateRow) if value else StateRow()
                    trim_point = min(trim_point, state.trim_point)
        return trim_point

    async def _delete_trimmed(self, ref: StreamRef) -> None:
        """Delete the chunks wholly below the trim point, after storing the tail."""
        async with self._exclusive(ref) as log:
            if log.deleting:
                return  # a purge has replaced this row
            trims = log.trims
            effective, due_at = trims.effective, trims.due_at
            if due_at is not None:  # readers still get the records of later trims
                self._schedule_check(ref, due_at)
                if effective <= trims.collected:
                    return
            needed = await self._needed_from(log.id, effective)
            log.remember_tail()
            await self._commit(log)
            await self._delete_chunks(ref.basin, log.id, keys.chunk(log.id, needed))
            await self.snapshots.prune(log)
            trims.collected = effective
            if needed == trims.accepted:
                log.clean_up_done()
                await self._commit(log)
            self._schedule_empty_check(log)

    async def _delete_chunks(self, basin: str, stream_id: int, end: bytes) -> None:
        await self.usage.held.settle(basin, stream_id)
        span = keys.chunks_start(stream_id), end
        async with aclosing(self.mount.engine.scan(*span)) as pages:
            async for page in pages:
                await self.usage.held.delete(basin, stream_id, page)

    async def _commit(self, log: StreamLog) -> None:
        """Make the changed state of `log` durable."""
        self.mount.committer.touch(log)
        await self.mount.committer.write([])


@contextmanager
def _continuing() -> Iterator[None]:
    """Log a storage failure: the next pass retries, and appends need not stop for it."""
    try:
        yield
    except DeviceFailedError:
        raise
    except (StorageError, StorageFullError) as error:
        logger.error("upkeep failed and will be retried at the next pass: %s", error)


@contextmanager
def _skipping(ref: StreamRef) -> Iterator[None]:
    """Skip a stream that was deleted meanwhile or cannot be read, and continue with the next."""
    try:
        yield
    except StreamNotFoundError:
        logger.debug("stream %r in basin %r was deleted meanwhile", ref.stream, ref.basin)
    except DataCorruptError as error:
        logger.error("upkeep skips stream %r in basin %r: %s", ref.stream, ref.basin, error)


def _ref(basin: str, stream: str) -> StreamRef:
    """A stream whose names come from storage, so that they need no check."""
    return StreamRef(BasinName(basin), StreamName(stream))
