"""Creates streams and forks with traits and initial content, in one commit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from streamfold.errors import (
    AlreadyExistsError,
    BasinDeletingError,
    BasinNotFoundError,
    ContentTypeMismatchError,
    InvalidError,
    PositionTrimmedError,
    StreamForkedError,
    StreamNotFoundError,
)
from streamfold.model.configs import INFINITE, StreamConfigLayer, resolve
from streamfold.model.names import BasinName, StreamName, StreamRef
from streamfold.model.positions import SeqNum, StreamPosition, Timestamp
from streamfold.model.records import CONTINUED, Record, SequencedRecord, is_command
from streamfold.model.resources import OCTETS, Claim, Origin, StreamStatus, StreamTraits, media_type
from streamfold.records import payload as payloads
from streamfold.records.batch import RecordBatch
from streamfold.store import keys, rows
from streamfold.store.catalog.catalog import Catalog
from streamfold.store.engine.engine import Op, first_row
from streamfold.store.log.admission import AppendRequest
from streamfold.store.log.retention import Lifetime
from streamfold.store.log.sealing import SealingKey
from streamfold.store.log.shares import Share
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.mount import Mount
from streamfold.store.read.cursor import Cursor
from streamfold.store.read.requests import Allowance
from streamfold.store.read.seek import apply_retention, chunk_from, ends_at, fork_at, own_part
from streamfold.store.rows import BasinRow, CleanupRow, ForkRow, StateRow, StreamRow


class ForkPoint(NamedTuple):
    """The point at which a fork leaves its source, and the part of a record that it starts with."""

    #: The position after the last inherited record.
    end: StreamPosition
    #: The position from which `end` was counted.
    anchor: int
    #: The leading bytes of the record at `end`, if the fork starts in the middle of it.
    part: bytes | None


async def find_fork_point(
    mount: Mount,
    source: StreamLog,
    anchor: int,
    sub_offset: int,
    key: SealingKey | None,
    *,
    in_records: bool,
) -> ForkPoint:
    """Return the point `sub_offset` records or bytes into the append at `anchor`."""
    end, left, part = anchor, sub_offset, None
    begin = anchor if sub_offset else None
    async for record in _append_at(mount, source, begin, key, in_records=in_records):
        size = 1 if in_records else len(record.body)
        if size > left:
            part = record.body[:left] if left else None
            left = 0
            break
        left -= size
        end = record.seq_num + 1
        if not left:
            break
    if left:
        what = "messages" if in_records else "bytes"
        raise InvalidError(
            f"fork sub-offset {sub_offset} is {left} {what} more than the append at its offset has"
        )
    return ForkPoint(await _position(mount, source, end, key), anchor, part)


async def _append_at(
    mount: Mount,
    source: StreamLog,
    seq_num: int | None,
    key: SealingKey | None,
    *,
    in_records: bool,
) -> AsyncIterator[SequencedRecord]:
    """Yield the records of the append that starts at `seq_num`, or a fork's part of it."""
    if seq_num is None:
        return
    cursor = Cursor(mount, source, seq_num, Allowance(None, None, None), key)
    try:
        while batch := await cursor.next(fill=False):
            for record in batch.records():
                if not is_command(record):
                    yield record
                    end = record.seq_num + 1
                    cut = in_records and ends_at(source.row, end)
                    if cut or CONTINUED not in record.headers:
                        return
    finally:
        await cursor.close()


async def _position(
    mount: Mount, source: StreamLog, end: int, key: SealingKey | None
) -> StreamPosition:
    """Return the position `end` with the timestamp of the record before it."""
    if end == source.durable.seq_num:
        return source.durable
    if end <= source.retained_from:
        return StreamPosition(SeqNum(end), Timestamp(0))
    chunk = await chunk_from(mount, source, end - 1, key)
    if chunk is None:
        return StreamPosition(SeqNum(end), Timestamp(0))
    index = payloads.measure(own_part(chunk, source.row, key).payload)
    stamp = index.timestamps[end - 1 - chunk.first_seq_num]
    return StreamPosition(SeqNum(end), Timestamp(stamp))


#: Builds the first batches of a stream from its content type.
FirstContent = Callable[[str], Awaitable[Sequence[RecordBatch]]]


def prepared(batches: Sequence[RecordBatch]) -> FirstContent:
    """Wrap existing batches as content for any content type."""

    async def content(content_type: str) -> Sequence[RecordBatch]:
        return batches

    return content


@dataclass(frozen=True, slots=True)
class ForkSpec:
    """Where a new stream continues another."""

    source: StreamName
    #: None = the tail of the source.
    seq_num: int | None
    #: Records or bytes into the append that follows.
    sub_offset: int
    in_records: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class NewStream:
    """The specification of a stream to be created."""

    #: None = the source's content type, or octets.
    content_type: str | None
    ttl: int | None
    expires_at: int | None
    #: None = the store's default.
    trim_on_snapshot: bool | None
    closed: bool
    fork: ForkSpec | None
    content: FirstContent
    key: SealingKey | None


class Creation(NamedTuple):
    """The outcome of a creation."""

    status: StreamStatus
    #: The seq_num of the first record that the stream does not inherit.
    begins_at: int
    #: Whether this call created the stream.
    created: bool


@dataclass(frozen=True, slots=True)
class Creator:
    """Creates streams in one mount."""

    mount: Mount
    catalog: Catalog

    async def create(self, ref: StreamRef, spec: NewStream) -> Creation:
        """Create the stream unless it exists. Raises if a different one exists."""
        return await self.catalog.finish(self._create(ref, spec))

    async def forked(self, stream_id: int) -> bool:
        """Return whether forks need records of the stream."""
        return await first_row(self.mount.engine, *keys.forks_span(stream_id)) is not None

    async def _create(self, ref: StreamRef, spec: NewStream) -> Creation:
        async with self._locks(ref, spec.fork.source if spec.fork else ref.stream):
            created = await self._insert_or_match(ref, spec)
            with await self.mount.lease(ref) as log:
                # A slow commit may have used up part of the ttl. The stream must not end early.
                if created and log.renew(self.mount.now()):
                    await self.mount.committer.write_with(log)
                return Creation(
                    log.status, log.row.lineage[-1].end if log.row.lineage else 0, created
                )

    async def _insert_or_match(self, ref: StreamRef, spec: NewStream) -> bool:
        """Insert the stream, or check that it matches. Returns whether this created it."""
        if await self.mount.stream(ref) is None:
            await self._insert(ref, spec, None)
            return True
        with await self.mount.lease(ref) as log:
            if not log.over:
                await self._match(log, spec)
                return False
            if await self.forked(log.id):
                raise StreamForkedError(*ref)
            log.deleting = True  # rejects appends from here on, even if the clock goes back
            await log.settled()
            await self._insert(ref, spec, log.row)
            return True

    @asynccontextmanager
    async def _locks(self, ref: StreamRef, source: StreamName) -> AsyncIterator[None]:
        """Hold the locks of the stream and its source, always acquired in the same order."""
        first, last = min(ref.stream, source), max(ref.stream, source)
        async with self.catalog.locks.hold(ref.basin, first):
            if first == last:
                yield
                return
            async with self.catalog.locks.hold(ref.basin, last):
                yield

    async def _match(self, log: StreamLog, spec: NewStream) -> None:
        """Raise unless the stream matches `spec`. A stream without traits gets those of `spec`."""
        if log.row.traits is None and log.unused and spec.fork is None:
            traits = _traits(spec, None, log.row.created_at)
            if traits.ttl is None and traits.expires_at is None and not spec.closed:
                row = msgspec.structs.replace(log.row, traits=traits)
                log.replace_row(row)  # from here on the log checks the content of appends
                log.terms.content_type = media_type(traits.content_type)
                await self.catalog.replace_stream(log.ref, row)
                return
        agrees = _agrees(log.row.traits or StreamTraits(), log.terms.closed, spec)
        if not agrees or log.terms.closed:
            await self.mount.settle(log)  # a record or a close may be in flight
        if not agrees:
            raise AlreadyExistsError("stream", log.name)

    async def _insert(self, ref: StreamRef, spec: NewStream, former: StreamRow | None) -> None:
        await self._active_basin(ref.basin)
        if spec.fork is None:
            await self._insert_from(ref, spec, former, None)
            return
        with await self.mount.lease(StreamRef(ref.basin, spec.fork.source)) as source:
            await self._check_source(source, spec.content_type)
            with self.mount.forking(source):
                await self._insert_from(ref, spec, former, source)

    async def _active_basin(self, basin: BasinName) -> BasinRow:
        row = await self.mount.basin(basin)
        if row is None:
            raise BasinNotFoundError(basin)
        if row.deleted_at is not None:
            raise BasinDeletingError(basin)
        return row

    async def _insert_from(
        self,
        ref: StreamRef,
        spec: NewStream,
        former: StreamRow | None,
        source: StreamLog | None,
    ) -> None:
        now = self.mount.now()
        traits = _traits(spec, source, now)
        point = ForkPoint(StreamPosition(SeqNum(0), Timestamp(0)), 0, None)
        if source is not None and spec.fork is not None:
            point = await self._fork_point(source, spec.fork, traits.content_type, spec.key)
            origin = Origin(spec.fork.source, SeqNum(point.anchor), spec.fork.sub_offset)
            traits = msgspec.structs.replace(traits, origin=origin)
        content = list(await spec.content(traits.content_type))
        parent = await self._active_basin(ref.basin)  # again: it may have been deleted meanwhile
        if source is not None and point.anchor < source.retained_from:  # trimmed meanwhile
            raise PositionTrimmedError(point.anchor, source.retained_from)
        row = StreamRow(
            id=self.mount.new_stream_id(),
            created_at=now,
            config=resolve(
                StreamConfigLayer(retention=INFINITE, trim_on_snapshot=spec.trim_on_snapshot),
                parent.config.default_stream_config,
            ),
            cipher=parent.config.stream_cipher,
            traits=traits,
            lineage=fork_at(source.row, point.end.seq_num) if source else (),
            forked_from=source.id if source else None,
        )
        first = self._seed(ref, row, source, point, content, spec)
        fork = rows.encode(ForkRow(*ref))
        ops: list[Op] = [(keys.fork(ancestor, row.id), fork) for ancestor in row.ancestors]
        if former is not None:
            purge = CleanupRow(*ref, purge=True, ancestors=former.ancestors)
            ops.append((keys.cleanup(former.id), rows.encode(purge)))
        await self.catalog.insert(ref, row, *ops, content=first)

    async def _check_source(self, source: StreamLog, content_type: str | None) -> None:
        """Raise unless a stream of that type may be forked from `source`."""
        if source.over:
            if await self.forked(source.id):
                raise StreamForkedError(*source.ref)
            raise StreamNotFoundError(*source.ref)
        if content_type is not None and media_type(content_type) != source.terms.content_type:
            raise ContentTypeMismatchError(content_type, source.terms.content_type)

    async def _fork_point(
        self, source: StreamLog, fork: ForkSpec, content_type: str, key: SealingKey | None
    ) -> ForkPoint:
        tail = int(source.durable.seq_num)
        anchor = tail if fork.seq_num is None else fork.seq_num
        if anchor > tail:
            raise InvalidError(
                f"the fork starts at {anchor}, but stream {fork.source!r} ends at {tail}"
            )
        await apply_retention(self.mount, source)
        if anchor < source.retained_from:
            raise PositionTrimmedError(anchor, source.retained_from)
        in_records = fork.in_records(content_type)
        return await find_fork_point(
            self.mount, source, anchor, fork.sub_offset, key, in_records=in_records
        )

    def _seed(
        self,
        ref: StreamRef,
        row: StreamRow,
        source: StreamLog | None,
        point: ForkPoint,
        content: list[RecordBatch],
        spec: NewStream,
    ) -> Share:
        """Return the stream's initial state and content."""
        now = row.created_at
        state = StateRow(
            trim_point=source.retained_from if source else 0,
            lease_until=Lifetime.begin(row.traits or StreamTraits(), now).lease_until,
        )
        if point.part is not None:
            content.insert(0, RecordBatch.of([Record(point.part)]))
        draft = StreamLog(ref, row, state, point.end, now, self.mount.now)
        draft.check_key(spec.key)
        claim = Claim(close=spec.closed)
        draft.accept(AppendRequest(content, claim=claim, key=spec.key), now)
        draft.write_state()
        return draft.take()


def _traits(spec: NewStream, source: StreamLog | None, now: int) -> StreamTraits:
    """Return the new stream's traits. A fork inherits those that `spec` omits."""
    inherited = (source.row.traits if source else None) or StreamTraits()
    ttl, expires_at = spec.ttl, spec.expires_at
    if ttl is None and expires_at is None:
        ttl, expires_at = inherited.ttl, inherited.expires_at
    return StreamTraits(
        content_type=spec.content_type or (inherited.content_type if source else OCTETS),
        ttl=ttl,
        expires_at=expires_at,
        trim_on_snapshot=bool(spec.trim_on_snapshot),
    )


def _agrees(traits: StreamTraits, closed: bool, spec: NewStream) -> bool:
    """Return whether a stream matches `spec`."""
    fork = spec.fork
    if fork is None:
        return (
            traits.origin is None
            and media_type(traits.content_type) == media_type(spec.content_type or OCTETS)
            and (traits.ttl, traits.expires_at) == (spec.ttl, spec.expires_at)
            and traits.trim_on_snapshot == bool(spec.trim_on_snapshot)
            and closed == spec.closed
        )
    requested = spec.content_type
    lifetime = (spec.ttl, spec.expires_at)
    return (
        traits.origin is not None
        and traits.origin.stream == fork.source
        and fork.seq_num in (None, traits.origin.seq_num)
        and traits.origin.sub_offset == fork.sub_offset
        and (requested is None or media_type(requested) == media_type(traits.content_type))
        and lifetime in ((None, None), (traits.ttl, traits.expires_at))
        and closed == spec.closed
    )
