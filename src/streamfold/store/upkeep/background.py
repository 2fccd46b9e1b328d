"""Background work: retention, deletion of trimmed records, streams and basins, and usage.

Its cost depends on what is due and what was appended, not on the number of streams.

It can stop at any point and resume, because rows in storage list the work and every step can be
repeated. Its commits are small, so it never delays appends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from streamfold.errors import (
    DataCorruptError,
    DeviceFailedError,
    StorageError,
    StorageFullError,
    StoreClosingError,
    StreamfoldError,
)
from streamfold.model.names import BasinName, StreamRef
from streamfold.store import keys, rows
from streamfold.store.catalog.access_tokens import AccessTokens
from streamfold.store.catalog.catalog import Catalog
from streamfold.store.catalog.snapshots import StreamSnapshots
from streamfold.store.catalog.staged_parts import StagedParts
from streamfold.store.engine.engine import first_row, readable_pages
from streamfold.store.leftovers import Leftovers
from streamfold.store.log.retention import age_limit
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.mount import Mount
from streamfold.store.read.seek import apply_retention
from streamfold.store.rows import StreamRow
from streamfold.store.upkeep.clean_up import (
    FILES_FAILED,
    CleanUp,
    exclusive,
    skipping,
    stored_ref,
)
from streamfold.store.upkeep.due import NEVER, DueRanges, DueTimes, Visit
from streamfold.store.usage.recorder import UsageKeeper

logger = logging.getLogger(__name__)

#: Fraction of the time between two passes that a pass may spend visiting streams. The next pass
#: visits the rest.
_VISITING = 0.1
#: Seconds that upkeep may take to finish when the store is closed.
_CLOSING_SECONDS = 2.0
#: Seconds until appends are counted again after a failure.
_RETRY_SECONDS = 1.0


@dataclass(slots=True)
class Upkeep:
    """The background work of one mount."""

    mount: Mount
    catalog: Catalog
    tokens: AccessTokens
    usage: UsageKeeper
    snapshots: StreamSnapshots
    parts: StagedParts
    leftover_chunks: Leftovers
    now: Callable[[], int]
    #: Seconds from one full pass to the next.
    interval: float
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    #: Held by the current pass, so that passes do not overlap.
    _busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Streams due before the next pass.
    _due: DueTimes = field(init=False)
    #: The due times of all streams.
    _ranges: DueRanges = field(default_factory=DueRanges)
    _clean_up: CleanUp = field(init=False)
    _ended: bool = False

    def __post_init__(self) -> None:
        self._due = DueTimes(self.now, self.request_pass)
        self._clean_up = CleanUp(
            self.mount,
            self.catalog,
            self.usage,
            self.snapshots,
            request_pass=self.request_pass,
            check_at=self._schedule_check,
            on_deleted=self._check_if_emptied,
        )

    def request_pass(self) -> None:
        """Start a pass now, because there is something to clean up."""
        self._wake.set()

    def on_trimmed(self, log: StreamLog, at: int) -> None:
        """Schedule the deletion of trimmed records of `log` at time `at` (ms since the Unix epoch)."""
        if at <= self.now():
            self.request_pass()
        else:
            self._schedule_check(log.ref, at)

    def on_stream_written(self, ref: StreamRef, row: StreamRow) -> None:
        """Schedule the first visit of a new or changed stream."""
        self._ranges.add(ref, _first_due(row))
        if min_age := row.config.delete_on_empty_secs:
            self._schedule_check(ref, row.created_at + min_age * 1000)

    def _schedule_check(self, ref: StreamRef, at: int) -> None:
        """Schedule a check of the stream at `at`, or in the first pass after it if that is far off."""
        if at - self.now() <= self.interval * 1000:
            self._due.add(at, ref)
        else:
            self._ranges.add(ref, at)

    def _check_if_emptied(self, log: StreamLog) -> None:
        """Schedule a check for delete-on-empty after records of the stream were deleted."""
        self._schedule_check(log.ref, self._empty_at(log))

    async def run(self) -> None:
        """Run a pass every `interval` seconds, and visit streams when due, until cancelled."""
        try:
            with _continuing():
                await self.snapshots.sweep()
                await self.parts.sweep(self.mount.engine.check)
            with _continuing():
                await self.mount.files.sweep(self.mount.engine, self.leftover_chunks)
            with _continuing():
                await self._pass()  # without usage, which is written once per interval
            with _continuing():
                await self._delete_obsolete()
            while True:
                deadline = asyncio.get_running_loop().time() + self.interval
                while await self._requested_before(deadline):
                    async with self._turn():
                        with _continuing():
                            await self.usage.held_bytes.restore()
                            await self._sweep_due()
                            await self._delete_basins()
                            await self._clean_up.run()
                with _continuing():
                    await self.run_once()
                with _continuing():
                    await self.parts.sweep(self.mount.engine.check)
        except StoreClosingError:
            await asyncio.Event().wait()  # until it is cancelled
        finally:
            self._due.close()

    async def _delete_obsolete(self) -> None:
        """Delete rows that earlier builds wrote and nothing reads any more."""
        span = keys.OBSOLETE_START, keys.OBSOLETE_END
        async with aclosing(self.mount.engine.scan(*span, first=100)) as pages:
            async for page in pages:
                await self.mount.committer.write([(key, None) for key, _ in page])

    async def settle(self) -> None:
        """Until cancelled, update the counts whenever many streams were appended to.

        Runs independently of passes, because appends continue while a pass visits all streams.
        """
        held_bytes = self.usage.held_bytes
        while True:
            await held_bytes.many.wait()
            with _continuing():
                await held_bytes.settle_many()
                continue
            await asyncio.sleep(_RETRY_SECONDS)

    async def run_once(self) -> None:
        """Run one full pass. Usage is durable afterwards."""
        await self._pass()
        async with self._turn():
            await self.usage.write()

    async def rest(self) -> None:
        """Store what the next opening would otherwise have to count, then make no more changes."""
        try:
            async with asyncio.timeout(_CLOSING_SECONDS), self._turn():
                await self.usage.held_bytes.keep()
                self._ended = True
        except TimeoutError:
            logger.debug(
                "upkeep was busy while the store was closed: the next opening counts again"
            )
        except StreamfoldError as error:
            logger.debug("the store is closed without the bytes held: %s", error)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Exclude other passes. Raises StoreClosingError once the store is being closed."""
        async with self._busy:
            if self._ended:
                raise StoreClosingError
            yield

    async def _pass(self) -> None:
        async with self._turn():
            self._wake.clear()
            await self.mount.engine.check()
            await self.usage.held_bytes.restore()
            for effect, step in (
                ("basins are not deleted", self._delete_basins),
                ("retention is not applied to all streams", self._sweep_streams),
                ("trimmed and deleted records are not all removed", self._clean_up.run),
                ("expired access tokens are not removed", self.tokens.remove_expired),
                ("leftover files are not deleted", self._delete_leftovers),
                ("files are not collected", self.mount.engine.collect),
                ("usage is not counted", self.usage.measure),
            ):
                try:
                    await step()
                except DataCorruptError as error:  # the next pass retries
                    self.mount.damage.note_row(effect, error)

    async def _delete_leftovers(self) -> None:
        """Search for files without a row again once some of those found may be deleted.

        Also searches if no search has succeeded yet. The rest of the pass does not depend on this.
        """
        try:
            if self.snapshots.leftovers.due_at <= self.now():
                await self.snapshots.sweep()
            if self.leftover_chunks.due_at <= self.now():
                await self.mount.files.sweep(self.mount.engine, self.leftover_chunks)
        except FILES_FAILED as error:
            logger.error("files without a row are searched for again at the next pass: %s", error)

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
        for name in self.mount.deleting_basins:
            await self._delete_basin(BasinName(name))

    async def _delete_basin(self, basin: BasinName) -> None:
        """Delete the basin's streams, or the basin itself once they are gone.

        `CleanUp` requests another pass after removing each stream.
        """
        left = 0
        span = keys.streams_from(basin, "", after=False), keys.streams_end(basin)
        async with aclosing(self.mount.engine.scan(*span, first=100)) as pages:
            async for page in pages:
                for key, _ in page:
                    left += 1
                    await self._delete_stream(stored_ref(*keys.stream_names(key)))
        if left:
            return
        async with self.catalog.locks.hold(basin):
            # Streams checked before the deletion was durable may still be in the process of being
            # created.
            await self.mount.committer.write([])
            if await first_row(self.mount.engine, *span) is None:
                usage = await self.usage.forget_basin(basin)
                await self.mount.put_basin(basin, None, *usage)
                return
        self.request_pass()  # to delete those streams

    async def _delete_stream(
        self, ref: StreamRef, when: Callable[[StreamLog], bool] = lambda log: True
    ) -> None:
        with skipping(ref):
            if await self.catalog.delete_stream(ref, when=when):
                self.request_pass()

    async def _sweep_streams(self) -> None:
        """Apply retention and delete-on-empty to the streams that are due, as far as time allows."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.interval * _VISITING
        for start in self._ranges.due(self.now()):
            if loop.time() >= end:
                return
            await self._sweep_range(start, lambda: loop.time() >= end)

    async def _sweep_range(self, start: bytes, out_of_time: Callable[[], bool]) -> None:
        end, oldest = self._ranges.begin(start)
        visits: list[Visit] = []
        rest: bytes | None = start
        try:
            async with aclosing(readable_pages(self.mount.engine, start, end, first=128)) as pages:
                async for page in pages:
                    for key, value in page:
                        rest = key
                        row = rows.decode(value, StreamRow)
                        visits.append(await self._visit(key, row, oldest.get(row.id, 0)))
                    if out_of_time():
                        rest = page[-1][0] + b"\x00"
                        return
            rest = None
        finally:
            self._ranges.finish(start, visits, rest)

    async def _visit(self, key: bytes, row: StreamRow, oldest: int) -> Visit:
        """Process what is due for the stream, and determine when it is due next."""
        if row.deleted_at is not None:
            return Visit(key, row.id, NEVER, 0)
        ref, due = stored_ref(*keys.stream_names(key)), self.now()
        with skipping(ref):
            due, oldest = await self._sweep(ref, row, oldest)
        return Visit(key, row.id, due, oldest)

    async def _sweep_due(self) -> None:
        """Apply retention and delete-on-empty to the streams that are due."""
        for ref in self._due.take():
            with skipping(ref):
                row = await self.mount.stream(ref)
                if row is not None and row.deleted_at is None:
                    due, _ = await self._sweep(ref, row, 0)
                    self._ranges.add(ref, due)

    async def _sweep(self, ref: StreamRef, row: StreamRow, oldest: int) -> tuple[int, int]:
        """Apply retention and deletion rules.

        Returns when the stream is due next, and its oldest arrival if known.
        """
        config, traits = row.config, row.traits
        due = NEVER
        if traits is not None and (traits.ttl is not None or traits.expires_at is not None):
            due = min(due, await self._delete_if_over(ref))
        if (limit := age_limit(config)) is not None:
            # No record that a stream wrote itself arrived before the stream was created.
            since = max(oldest, 0 if row.lineage else row.created_at)
            if since < self.now() - limit:
                since = oldest = await self._expire(ref)
            due = min(due, since + limit + 1)
        if config.delete_on_empty_secs:
            due = min(due, await self._delete_if_empty(ref))
        return due, oldest

    async def _expire(self, ref: StreamRef) -> int:
        """Trim expired records. Returns when the oldest remaining record arrived."""
        async with exclusive(self.mount, self.catalog, ref) as log:
            if log.deleting:
                return self.now()
            await apply_retention(self.mount, log)
            if log.readable_from > log.trims.effective:
                log.trim(log.readable_from)
                await self.mount.committer.write_with(log)
            return log.oldest_arrival

    async def _delete_if_empty(self, ref: StreamRef) -> int:
        """Delete the stream if it has been empty for long enough. Returns when to check again."""
        with await self.mount.lease(ref) as log:
            empty, due = self._has_been_empty(log), self._empty_at(log)
        if empty:
            await self._delete_stream(ref, self._has_been_empty)
            return self.now()
        self._schedule_check(ref, due)
        return due

    def _has_been_empty(self, log: StreamLog) -> bool:
        """Return whether the stream is empty and its last record arrived long enough ago."""
        min_age = log.row.config.delete_on_empty_secs * 1000
        return bool(min_age) and log.empty and log.arrived_at + min_age <= self.now()

    def _empty_at(self, log: StreamLog) -> int:
        """Return when the stream may be deleted as empty, or NEVER if that is not known yet."""
        min_age = log.row.config.delete_on_empty_secs * 1000
        limit, due_at = log.age_limit, log.trims.due_at
        if not min_age or not (log.empty or limit or due_at):
            return NEVER
        at = log.arrived_at + min_age
        if not log.empty:
            emptied = [due_at] if due_at else []
            emptied += [log.arrived_at + limit + 1] if limit else []
            at = max(at, min(emptied))
        return at

    async def _delete_if_over(self, ref: StreamRef) -> int:
        """Delete the stream if its lifetime is over. Returns when to check again."""
        with await self.mount.lease(ref) as log:
            over, deadline = log.over, log.lifetime.deadline
        if over:
            await self._delete_stream(ref, lambda log: log.over)
            return self.now()
        return NEVER if deadline is None else deadline


@contextmanager
def _continuing() -> Iterator[None]:
    """Log a storage failure. The next pass retries, and appends need not stop for it."""
    try:
        yield
    except DeviceFailedError:
        raise
    except (StorageError, StorageFullError, *FILES_FAILED) as error:
        logger.error("upkeep failed and will be retried at the next pass: %s", error)


def _first_due(row: StreamRow) -> int:
    """Return the time (ms since the Unix epoch) before which the stream needs no work."""
    limit, traits, due = age_limit(row.config), row.traits, NEVER
    if limit is not None:
        due = 0 if row.lineage else row.created_at + limit + 1
    if min_age := row.config.delete_on_empty_secs:
        due = min(due, row.created_at + min_age * 1000)
    if traits is not None and traits.ttl is not None:
        due = min(due, row.created_at + traits.ttl * 1000)
    if traits is not None and traits.expires_at is not None:
        due = min(due, traits.expires_at)
    return due
