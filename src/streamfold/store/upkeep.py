"""Background work: retention, deletion of what is trimmed, of streams and of basins, bookkeeping.

All of it can stop anywhere and be taken up again: what is to be done is told by rows in storage, and
every step is repeated harmlessly. It works in small commits, so that appends are never held up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from streamfold.errors import (
    DataCorruptError,
    DeviceFailedError,
    StorageError,
    StorageFullError,
    StreamNotFoundError,
)
from streamfold.model.configs import INFINITE
from streamfold.model.names import BasinName, StreamName
from streamfold.store import chunks, keys, rows
from streamfold.store.access_tokens import AccessTokens
from streamfold.store.catalog import Catalog
from streamfold.store.engine import Op, first_row
from streamfold.store.log import StreamLog
from streamfold.store.rows import BasinRow, CleanupRow, StateRow, StreamRow
from streamfold.store.session import Session
from streamfold.store.snapshot_shelf import SnapshotShelf
from streamfold.store.usage.keeper import UsageKeeper

logger = logging.getLogger(__name__)

#: Streams whose oldest record's arrival is remembered, so that they are not read in vain.
_KNOWN_STREAMS = 100_000


@dataclass(slots=True)
class Upkeep:
    """The background work of one session."""

    session: Session
    catalog: Catalog
    tokens: AccessTokens
    usage: UsageKeeper
    snapshots: SnapshotShelf
    now: Callable[[], int]
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    #: One pass at a time, whoever asks for it.
    _busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Stream id to the time (ms) before which none of its records arrived.
    _oldest: dict[int, int] = field(default_factory=dict)

    def poke(self) -> None:
        """There is something to clean up: do not wait for the next pass."""
        self._wake.set()

    async def run(self, interval: float) -> None:
        """Work until cancelled: everything every `interval` seconds, clean-up also when poked."""
        with _going_on():
            await self.snapshots.sweep()
        with _going_on():
            await self._pass()  # usage is to gather for an interval before it is written
        while True:
            deadline = asyncio.get_running_loop().time() + interval
            while await self._poked_before(deadline):
                async with self._busy:
                    with _going_on():
                        await self._delete_basins()
                        await self._clean_up()
            with _going_on():
                await self.run_once()

    async def run_once(self) -> None:
        """One whole pass; usage is durable after it."""
        await self._pass()
        async with self._busy:
            await self.usage.write()

    async def _pass(self) -> None:
        async with self._busy:
            self._wake.clear()
            await self.session.engine.check()
            await self._delete_basins()
            await self._sweep_streams()
            await self._clean_up()
            await self.tokens.remove_expired()
            await self.session.engine.collect()

    async def _poked_before(self, deadline: float) -> bool:
        try:
            async with asyncio.timeout_at(deadline):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True

    async def _delete_basins(self) -> None:
        """Delete the streams of basins that are going, and each basin after its last stream."""
        span = keys.basins_from("", after=False), keys.BASINS_END
        async with aclosing(self.session.engine.scan(*span, first=100)) as pages:
            async for page in pages:
                for key, value in page:
                    if rows.decode(value, BasinRow).deleted_at is not None:
                        await self._delete_basin(BasinName(keys.basin_name(key)))

    async def _delete_basin(self, basin: BasinName) -> None:
        left = 0
        span = keys.streams_from(basin, "", after=False), keys.streams_end(basin)
        async with aclosing(self.session.engine.scan(*span, first=100)) as pages:
            async for page in pages:
                for key, _ in page:
                    left += 1
                    stream = StreamName(keys.stream_names(key)[1])
                    await self._delete_stream(basin, stream)
        if not left:
            async with self.catalog.locks.hold(basin):
                usage = await self.usage.forget_basin(basin)
                await self.session.committer.write([(keys.basin(basin), None), *usage])
        else:
            self.poke()  # once the streams are gone, the basin goes

    async def _delete_stream(
        self,
        basin: BasinName,
        stream: StreamName,
        when: Callable[[StreamLog], bool] = lambda log: True,
    ) -> None:
        with _skipping(basin, stream):
            await self.catalog.delete_stream(basin, stream, when=when)
            self.poke()

    async def _sweep_streams(self) -> None:
        """Apply retention and delete-on-empty to every stream, and look at what each holds."""
        self.usage.begin_round()
        span = keys.STREAMS_START, keys.STREAMS_END
        async with aclosing(self.session.engine.scan(*span, first=128)) as pages:
            async for page in pages:
                for key, value in page:
                    row = rows.decode(value, StreamRow)
                    basin, stream = keys.stream_names(key)
                    with _skipping(basin, stream):
                        if row.deleted_at is None:
                            await self._sweep(BasinName(basin), StreamName(stream), row)
                        await self.usage.visit(basin, row.id)
        self.usage.end_round()

    async def _sweep(self, basin: BasinName, stream: StreamName, row: StreamRow) -> None:
        config = row.config
        traits = row.traits
        if traits is not None and (traits.ttl is not None or traits.expires_at is not None):
            await self._delete_if_over(basin, stream)
        if config.retention != INFINITE:
            age = int(config.retention) * 1000
            if self._oldest.get(row.id, 0) < self.now() - age:
                await self._expire(basin, stream, age)
        if config.delete_on_empty_secs:
            await self._delete_if_empty(basin, stream, config.delete_on_empty_secs * 1000)

    async def _expire(self, basin: BasinName, stream: StreamName, age: int) -> None:
        """Trim the records of `stream` that arrived more than `age` ms ago."""
        async with self.catalog.locks.hold(basin, stream), self.session.log(basin, stream) as log:
            if log.deleting:
                return
            horizon = self.now() - age
            expired = log.durable_trim_point
            oldest = self.now()
            span = keys.chunk(log.id, expired), keys.chunk(log.id, log.durable.seq_num)
            async with aclosing(self.session.engine.scan(*span)) as pages:
                async for page in pages:
                    parts = [chunks.decode(value) for _, value in page]
                    old = [part for part in parts if part.arrived_at < horizon]
                    if old:
                        expired = old[-1].last_seq_num + 1
                    if len(old) < len(parts):
                        oldest = parts[len(old)].arrived_at
                        break
            if len(self._oldest) >= _KNOWN_STREAMS:
                self._oldest.clear()
            self._oldest[log.id] = oldest
            if expired > log.durable_trim_point:
                log.trim(expired)
                await self._commit(log)

    async def _delete_if_empty(self, basin: BasinName, stream: StreamName, age: int) -> None:
        def is_empty(log: StreamLog) -> bool:
            return log.empty and log.arrived_at + age <= self.now()

        async with self.session.log(basin, stream) as log:
            empty = is_empty(log)
        if empty:
            await self._delete_stream(basin, stream, is_empty)

    async def _delete_if_over(self, basin: BasinName, stream: StreamName) -> None:
        async with self.session.log(basin, stream) as log:
            over = log.over
        if over:
            await self._delete_stream(basin, stream, lambda log: log.over)

    async def _clean_up(self) -> None:
        """Delete trimmed chunks and purge deleted streams, as the clean-up rows say."""
        span = keys.CLEANUPS_START, keys.CLEANUPS_END
        async with aclosing(self.session.engine.scan(*span, first=100)) as pages:
            async for page in pages:
                for key, value in page:
                    row = rows.decode(value, CleanupRow)
                    with _skipping(row.basin, row.stream):
                        if row.purge:
                            await self._purge(keys.cleanup_stream_id(key), row)
                        else:
                            await self._delete_trimmed(row.basin, row.stream)

    async def _purge(self, stream_id: int, cleanup: CleanupRow) -> None:
        """Remove all that is left of a deleted stream, its name last; not while forks need it."""
        basin, stream = cleanup.basin, cleanup.stream
        if await first_row(self.session.engine, *keys.forks_span(stream_id)) is not None:
            return
        await self._delete_chunks(basin, stream_id, keys.chunks_end(stream_id))
        await self.snapshots.forget(stream_id)
        async with self.catalog.locks.hold(basin, stream):
            # Another stream may have the name by now.
            row = await self.session.stream(basin, stream)
            named = row is not None and row.id == stream_id
            await self.session.committer.write(
                [
                    (keys.state(stream_id), None),
                    (keys.cleanup(stream_id), None),
                    *([(keys.stream(basin, stream), None)] if named else []),
                    *[(keys.fork(ancestor, stream_id), None) for ancestor in cleanup.ancestors],
                    *await self._producers_of(stream_id),
                    *await self.usage.forget_stream(stream_id),
                ]
            )
            log = self.session.cached_log(basin, stream)
            if log is not None and log.id == stream_id:
                self.session.forget(log)
        if cleanup.ancestors:
            self.poke()  # those it came from may go now

    async def _producers_of(self, stream_id: int) -> list[Op]:
        ops: list[Op] = []
        span = keys.producers_span(stream_id)
        async with aclosing(self.session.engine.scan(*span, first=100)) as pages:
            async for page in pages:
                ops += [(key, None) for key, _ in page]
        return ops

    async def _needed_from(self, stream_id: int, trim_point: int) -> int:
        """The first record below `trim_point` that a fork still needs, or `trim_point`."""
        span = keys.forks_span(stream_id)
        async with aclosing(self.session.engine.scan(*span, first=100)) as pages:
            async for page in pages:
                for key, _ in page:
                    value = await self.session.engine.get(keys.state(keys.fork_id(key)))
                    state = rows.decode(value, StateRow) if value else StateRow()
                    trim_point = min(trim_point, state.trim_point)
        return trim_point

    async def _delete_trimmed(self, basin: str, stream: str) -> None:
        """Remove the chunks that lie wholly below the trim point, and write down the tail first."""
        async with self.catalog.locks.hold(basin, stream), self.session.log(basin, stream) as log:
            if log.deleting:
                return  # a purge has taken the place of this row
            trim_point = log.durable_trim_point
            needed = await self._needed_from(log.id, trim_point)
            log.remember_tail()
            await self._commit(log)
            await self._delete_chunks(basin, log.id, keys.chunk(log.id, needed))
            await self.snapshots.prune(log)
            if log.durable_trim_point == needed and not log.trim_pending:
                await self.session.committer.write([(keys.cleanup(log.id), None)])

    async def _delete_chunks(self, basin: str, stream_id: int, end: bytes) -> None:
        await self.usage.held.settle(basin, stream_id)
        span = keys.chunks_start(stream_id), end
        async with aclosing(self.session.engine.scan(*span)) as pages:
            async for page in pages:
                await self.usage.held.delete(basin, stream_id, page)

    async def _commit(self, log: StreamLog) -> None:
        """Make the changed state of `log` durable."""
        self.session.committer.touch(log)
        await self.session.committer.write([])


@contextmanager
def _going_on() -> Iterator[None]:
    """Storage that cannot be read now may be readable at the next pass: appends need not wait."""
    try:
        yield
    except DeviceFailedError:
        raise
    except (StorageError, StorageFullError) as error:
        logger.error("upkeep failed, to be tried again at the next pass: %s", error)


@contextmanager
def _skipping(basin: str, stream: str) -> Iterator[None]:
    """Leave a stream alone that went away meanwhile, or that cannot be read: others come next."""
    try:
        yield
    except StreamNotFoundError:
        logger.debug("stream %r in basin %r went away", stream, basin)
    except DataCorruptError as error:
        logger.error("no upkeep for stream %r in basin %r: %s", stream, basin, error)
