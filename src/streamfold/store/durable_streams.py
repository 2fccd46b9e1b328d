"""Streams with traits: created with content, closed for good, forked, expired, and appended to by
producers that may repeat themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import msgspec

from streamfold.errors import (
    BasinNotFoundError,
    ConditionFailedError,
    PositionTrimmedError,
    StreamDeletingError,
    StreamForkedError,
    StreamNotFoundError,
    TermsError,
    TooLargeError,
)
from streamfold.model import names
from streamfold.model.configs import BasinConfig
from streamfold.model.names import BasinName, StreamName
from streamfold.model.traits import Claim, StreamTraits
from streamfold.store.catalog.creation import Content, Creator, ForkSpec, StreamSpec, prepared
from streamfold.store.catalog.snapshots import Publication, Snapshot
from streamfold.store.log.admission import Admission
from streamfold.store.log.sealing import SealingKey
from streamfold.store.log.shares import AppendAck
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.read.cursor import Cursor
from streamfold.store.read.requests import Allowance, ReadBatch
from streamfold.store.read.seek import apply_retention
from streamfold.store.rows import ProducerRow
from streamfold.store.supervisor import MountedStore, Supervisor

#: Metered bytes of one append; less than `inflight_bytes`.
APPEND_BYTES_MAX = 32 << 20

__all__ = [
    "Appended", "Content", "DurableStreams", "ForkSpec", "Reading", "StreamStatus", "StreamSpec",
    "prepared",
]  # fmt: skip


class StreamStatus(msgspec.Struct, frozen=True):
    """The durable state of a stream."""

    id: int
    traits: StreamTraits
    #: The first record kept, and the seq_num of the next one.
    first: int
    tail: int
    closed: bool


class Appended(msgspec.Struct, frozen=True):
    """A durable append."""

    #: Whether it repeats an earlier append, so that nothing was written.
    repeated: bool
    tail: int
    closed: bool
    #: How far the producer has come.
    producer: ProducerRow | None


@dataclass(frozen=True, slots=True)
class DurableStreams:
    """Operations on streams with traits; a stream without has the default ones."""

    supervisor: Supervisor
    now: Callable[[], int]

    @property
    def _admission(self) -> Admission:
        return self.supervisor.admission

    async def ensure_basin(self, basin: str) -> None:
        """Create the basin unless it exists; an existing one keeps its configuration."""
        name = names.parse_bucket_name(basin)
        mounted = await self.supervisor.mounted()
        if await mounted.mount.basin(name) is None:
            await mounted.catalog.open_basin(name, BasinConfig())

    async def has_basin(self, basin: str) -> bool:
        mounted = await self.supervisor.mounted()
        return await mounted.mount.basin(names.parse_bucket_name(basin)) is not None

    async def create(self, basin: str, stream: str, spec: StreamSpec) -> tuple[StreamStatus, bool]:
        """The stream, and whether this created it; AlreadyExistsError if a different one exists."""
        ref = _parse_names(basin, stream)
        self.supervisor.space.check()
        mounted = await self.supervisor.mounted()
        log, created = await _creator(mounted).create(*ref, spec)
        begins = log.row.lineage[-1].end if log.row.lineage else 0
        if created and log.durable.seq_num > begins:
            self.supervisor.notify_listeners(basin, stream, begins, int(log.durable.seq_num))
        return _status(log), created

    async def status(self, basin: str, stream: str) -> StreamStatus:
        """The stream's state; this does not count as use."""
        async with self._using(basin, stream) as (mounted, log):
            await apply_retention(mounted.mount, log)
            return _status(log)

    async def delete(self, basin: str, stream: str) -> None:
        """Delete the stream; records that forks need stay until the forks are deleted."""
        async with self._using(basin, stream) as (mounted, log):
            await mounted.catalog.delete_stream(BasinName(log.basin), StreamName(log.name))
            mounted.upkeep.request_pass()

    async def append(
        self,
        basin: str,
        stream: str,
        claim: Claim,
        content: Content,
        key: SealingKey | None = None,
    ) -> Appended:
        """Append what `content` makes for the stream's content type, all of it or nothing.

        It is durable when this returns. Terms are checked before `content` is called.
        """
        async with self._using(basin, stream) as (mounted, log):
            try:
                repeated, ack = await self._accept(log, claim, content, key)
            except (ConditionFailedError, TermsError):
                await mounted.mount.settle(log)
                raise
            except StreamDeletingError:
                await mounted.catalog.deletion(log.basin, log.name)
                raise
            # Read now: what others append meanwhile may not be durable when this is.
            producer = log.terms.producer(claim.producer.id) if claim.producer else None
            log.renew(self.now())
            mounted.mount.committer.touch(log)
            if ack is not None:
                return Appended(False, int((await ack).end.seq_num), claim.close, producer)
            # Only the terms changed, or nothing did: the state behind that may not be durable yet.
            await mounted.mount.committer.write([])
            return Appended(repeated, *_tail(log), producer)

    async def _accept(
        self, log: StreamLog, claim: Claim, content: Content, key: SealingKey | None
    ) -> tuple[bool, asyncio.Future[AppendAck] | None]:
        """Whether this repeats an append; if not, the future of its ack if it has records."""
        if log.repeats(claim, key, self.now()):
            return True, None
        batches = await content(log.terms.content_type)
        if not all(batch.only_trims for batch in batches):
            self.supervisor.space.check()
        metered = sum(batch.metered for batch in batches)
        if metered > APPEND_BYTES_MAX:
            raise TooLargeError(
                f"an append of {metered} bytes is too large: send at most {APPEND_BYTES_MAX}"
            )
        await self._admission.acquire(metered)
        try:
            # Check again: others may have come first while this was parsed and waited for room.
            if log.repeats(claim, key, self.now()):
                self._admission.release(metered)
                return True, None
            return False, log.accept_claimed(batches, claim, key, self.now())
        except BaseException:
            self._admission.release(metered)
            raise

    # Snapshots

    async def publish(self, basin: str, stream: str, new: Publication) -> Snapshot:
        """Store a snapshot; repeating it changes nothing."""
        self.supervisor.space.check_upload(new.size or 0)
        async with self._using(basin, stream) as (mounted, log):
            return await mounted.snapshots.publish(log, new)

    async def snapshots(self, basin: str, stream: str) -> list[Snapshot]:
        """Every snapshot from which the stream can be followed, oldest first."""
        async with self._using(basin, stream) as (mounted, log):
            return await mounted.snapshots.all(log)

    async def snapshot(self, basin: str, stream: str, seq_num: int | None) -> Snapshot | None:
        """The snapshot at a position, which must exist; without a position the newest, if any."""
        async with self._using(basin, stream) as (mounted, log):
            if seq_num is None:
                return await mounted.snapshots.newest(log)
            return await mounted.snapshots.at(log, seq_num)

    async def snapshot_pieces(self, snapshot: Snapshot) -> AsyncGenerator[bytes]:
        """The bytes of a snapshot, in pieces; it is not deleted meanwhile."""
        mounted = await self.supervisor.mounted()
        async with aclosing(mounted.snapshots.blobs.read(snapshot)) as pieces:
            async for piece in pieces:
                yield piece

    async def retain(
        self,
        basin: str,
        stream: str,
        seq_num: int,
        *,
        whole_appends: bool,
        key: SealingKey | None = None,
    ) -> None:
        """Trim the records before `seq_num`, which a snapshot must cover."""
        async with self._using(basin, stream) as (mounted, log):
            await mounted.snapshots.retain(log, seq_num, whole_appends=whole_appends, key=key)

    @asynccontextmanager
    async def reading(
        self, basin: str, stream: str, seq_num: int | None, key: SealingKey | None = None
    ) -> AsyncIterator[Reading]:
        """A reader that starts at record `seq_num`, or at the tail."""
        async with self._using(basin, stream) as (mounted, log):
            log.check_key(key)
            if log.renew(self.now()):
                mounted.mount.committer.touch(log)
                await mounted.mount.committer.write([])  # otherwise a crash now could end it early
            start = int(log.durable.seq_num) if seq_num is None else seq_num
            await apply_retention(mounted.mount, log)
            if start < log.readable_from:
                raise PositionTrimmedError(start, log.retained_from)
            cursor = Cursor(mounted.mount, log, start, Allowance(None, None, None), key)
            delivered = partial(self.supervisor.usage.record_delivery, basin)
            try:
                yield Reading(log, cursor, delivered)
            finally:
                await cursor.close()

    @asynccontextmanager
    async def _using(
        self, basin: str, stream: str
    ) -> AsyncIterator[tuple[MountedStore, StreamLog]]:
        """The log of a stream that is neither deleted nor expired."""
        mounted = self.supervisor.current or await self.supervisor.mounted()
        log = mounted.mount.cached_log(basin, stream)
        if log is None:
            log = await _load(mounted, *_parse_names(basin, stream))
        with log.in_use():
            if log.failure is None and log.over:
                await self._refuse(mounted, log)
            yield mounted, log

    async def _refuse(self, mounted: MountedStore, log: StreamLog) -> None:
        await mounted.catalog.deletion(log.basin, log.name)
        if await _creator(mounted).forked(log.id):
            raise StreamForkedError(log.basin, log.name)
        raise StreamNotFoundError(log.basin, log.name)


class Reading:
    """Reads forward from a position in a stream; not from two tasks at once."""

    def __init__(self, log: StreamLog, cursor: Cursor, delivered: Callable[[int], None]) -> None:
        self._log = log
        self._cursor = cursor
        self._delivered = delivered
        #: Awaited before a batch is read for this reader alone.
        self.before_own_batch: Callable[[], Awaitable[None]] | None = None

    @property
    def status(self) -> StreamStatus:
        return _status(self._log)

    @property
    def seq_num(self) -> int:
        """The seq_num of the next record."""
        return max(self._cursor.seq_num, 0)

    @property
    def at_tail(self) -> bool:
        return self._cursor.at_tail

    @property
    def closed(self) -> bool:
        """Whether everything was read, and the stream is closed."""
        return self._log.durable_closed and self.at_tail

    @property
    def resting(self) -> bool:
        """Whether everything was read, and nothing is held for this reader."""
        return self._cursor.resting

    async def next(self) -> ReadBatch | None:
        """The next batch, about 1 MiB at most; None at the tail.

        PositionTrimmedError if the next record was trimmed meanwhile: the read would have a gap.
        """
        seq_num = self._cursor.seq_num
        batch = self._cursor.live()
        if batch is None:
            if self.before_own_batch is not None and not self._cursor.resting:
                await self.before_own_batch()
            batch = await self._cursor.next(fill=False)
        reached = self._cursor.seq_num if batch is None else batch.first_seq_num
        if reached > seq_num:
            raise PositionTrimmedError(seq_num, self._log.retained_from)
        if batch is not None:
            self._delivered(batch.metered)
        return batch

    async def wait(self, seconds: float) -> bool:
        """Wait for more to read, or for the stream's close; False when neither came in time."""
        return await self._cursor.advanced(seconds)


async def _load(mounted: MountedStore, basin: BasinName, stream: StreamName) -> StreamLog:
    try:
        return await mounted.mount.open_log(basin, stream)
    except StreamNotFoundError:
        if await mounted.mount.basin(basin) is None:
            raise BasinNotFoundError(basin) from None
        raise


def _creator(mounted: MountedStore) -> Creator:
    return Creator(mounted.mount, mounted.catalog)


def _status(log: StreamLog) -> StreamStatus:
    first, (tail, closed) = log.retained_from, _tail(log)
    return StreamStatus(log.id, log.row.traits or StreamTraits(), first, tail, closed)


def _tail(log: StreamLog) -> tuple[int, bool]:
    return int(log.durable.seq_num), log.durable_closed


def _parse_names(basin: str, stream: str) -> tuple[BasinName, StreamName]:
    return names.parse_bucket_name(basin), names.parse_stream_name(stream)
