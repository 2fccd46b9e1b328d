"""Finds the chunk that holds a record, by seq_num, timestamp or time of arrival.

A fork reads the chunks of the streams it came from and copies nothing. Timestamps and arrival times
never decrease within a stream, so a binary search over seq_nums finds the chunk: about
log2(records) seeks, and no second index to write.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

from streamfold.errors import BlobNotFoundError, DataCorruptError, InvalidError
from streamfold.records import payload as payloads
from streamfold.store import keys
from streamfold.store.damage import StreamDamagedError, stream_damaged
from streamfold.store.engine.engine import TableDamagedError, first_row
from streamfold.store.log import chunks
from streamfold.store.log.chunk_files import missing
from streamfold.store.log.chunks import Chunk
from streamfold.store.log.retention import Expiry
from streamfold.store.log.sealing import SealingKey
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.mount import Mount
from streamfold.store.rows import Segment, StreamRow

#: Maximum streams that a fork may inherit records from: rows, memory and reads grow with them.
FORK_DEPTH_MAX = 64
#: Chunks whose arrival times are looked up together, because they will expire one after the other.
#: In a busy stream that is every few milliseconds, and a search for each would take all the time.
_CHUNKS_AHEAD = 256
#: Maximum newest chunks to find behind a damaged block: each takes its own read.
BEHIND_DAMAGE_MAX = 10_000


def segment_of(row: StreamRow, seq_num: int) -> Segment | None:
    """Return the inherited segment that holds this record; None if the stream wrote it itself."""
    for segment in row.lineage:
        if seq_num < segment.end:
            return segment
    return None


def ends_at(row: StreamRow, seq_num: int) -> bool:
    """Return whether an inherited segment ends at `seq_num`."""
    return any(segment.end == seq_num for segment in row.lineage)


def fork_at(row: StreamRow, end: int) -> tuple[Segment, ...]:
    """Return the lineage of a fork that inherits everything in `row`'s stream below `end`.

    Raises InvalidError if the chain of forks would be too deep.
    """
    lineage = [segment for segment in row.lineage if segment.end < end]
    following = next((s for s in row.lineage if s.end >= end), None)
    holder = row.id if following is None else following.stream_id
    if len(lineage) >= FORK_DEPTH_MAX:
        raise InvalidError(
            f"the fork would have records of {len(lineage) + 1} streams, one forked from another: "
            f"{FORK_DEPTH_MAX} is the most; copy the records to a new stream instead"
        )
    return (*lineage, Segment(holder, end)) if end else ()


def span_from(row: StreamRow, seq_num: int) -> tuple[bytes, bytes]:
    """Return the keys from the chunk that holds `seq_num` on, in the stream that wrote it."""
    segment = segment_of(row, seq_num)
    holder = row.id if segment is None else segment.stream_id
    return keys.chunk(holder, seq_num), keys.chunks_end(holder)


def next_segment(chunk: Chunk, row: StreamRow, seq_num: int) -> int:
    """Return the end of the stream's part of `chunk`, which holds its record `seq_num`."""
    segment = segment_of(row, seq_num)
    end = chunk.last_seq_num + 1
    return end if segment is None else min(end, segment.end)


def own_part(chunk: Chunk, row: StreamRow, key: SealingKey | None) -> Chunk:
    """Return the stream's part of `chunk`, in the clear."""
    segment = segment_of(row, chunk.first_seq_num)
    if segment is None:
        return chunks.clear(chunk, row.id, key)
    return chunks.cut_before(chunks.clear(chunk, segment.stream_id, key), segment.end)


async def chunk_from(
    mount: Mount, log: StreamLog, seq_num: int, key: SealingKey | None
) -> Chunk | None:
    """Return this stream's part of the chunk that holds `seq_num`."""
    chunk = await _bounds_from(mount, log, seq_num, key)
    return None if chunk is None else await _loaded(mount, log, chunk)


async def _bounds_from(
    mount: Mount, log: StreamLog, seq_num: int, key: SealingKey | None
) -> Chunk | None:
    """Return this stream's part of the chunk that holds `seq_num`, maybe without its payload.

    The payload may still be in its file.
    """
    chunk = await _stored_chunk(mount, log, seq_num)
    segment = segment_of(log.row, seq_num)
    if chunk is None or segment is None or chunk.last_seq_num < segment.end:
        return chunk
    return own_part(await _loaded(mount, log, chunk), log.row, key)


async def seek_timestamp(
    mount: Mount, log: StreamLog, timestamp: int, key: SealingKey | None
) -> int:
    """Return the first seq_num at or after `timestamp`, or the tail if there is none."""
    while True:
        first = log.readable_from
        try:
            return await _seek_timestamp(mount, log, first, timestamp, key)
        except DataCorruptError:
            if log.readable_from == first:
                raise
            # Records were trimmed meanwhile, and a file was deleted with them.


async def _seek_timestamp(
    mount: Mount, log: StreamLog, first: int, timestamp: int, key: SealingKey | None
) -> int:
    tail = int(log.durable.seq_num)
    gaps: dict[int, StreamDamagedError] = {}
    chunk = await _first_chunk(
        log,
        range(first, tail),
        lambda seq_num: _around(mount, log, seq_num, _bounds_from(mount, log, seq_num, key), gaps),
        lambda chunk: chunk.last_timestamp >= timestamp,
    )
    if chunk is None:
        return tail  # not the current tail: nobody has checked the records appended meanwhile
    if damaged := gaps.get(chunk.first_seq_num):
        raise damaged  # it may contain the wanted record
    clear = own_part(await _loaded(mount, log, chunk), log.row, key)
    within = payloads.measure(clear.payload).index_of_timestamp(timestamp)
    return max(chunk.first_seq_num + within, first)


async def apply_retention(mount: Mount, log: StreamLog) -> None:
    """Move `log.readable_from` past every expired record."""
    if log.hide_expired():
        return
    limit, now = log.age_limit, mount.now()
    if limit is None:
        return
    horizon = now - limit
    if log.arrived_at < horizon:
        log.expire(Expiry(limit, int(log.durable.seq_num), now))
        return
    first, tail = log.readable_from, int(log.durable.seq_num)
    chunk = await _first_chunk(
        log,
        range(first, tail),
        lambda seq_num: _around(mount, log, seq_num, _stored_chunk(mount, log, seq_num), {}),
        lambda chunk: chunk.arrived_at >= horizon,
    )
    if chunk is None:
        # Not beyond `tail`: records appended meanwhile are new.
        log.expire(Expiry(limit, tail, now))
        return
    if log.hide_expired():
        return  # another reader has looked ahead meanwhile
    starts, arrivals = await _chunks_ahead(mount, log, chunk.first_seq_num, tail)
    log.expire(Expiry(limit, max(first, chunk.first_seq_num), chunk.arrived_at, starts, arrivals))


async def _chunks_ahead(
    mount: Mount, log: StreamLog, seq_num: int, tail: int
) -> tuple[array[int], array[int]]:
    """Return first seq_nums and arrival times of the chunks from `seq_num` on, at most one page."""
    starts, arrivals = array("q"), array("q")
    segment = segment_of(log.row, seq_num)
    end = tail if segment is None else min(tail, segment.end)
    scan = mount.engine.scan(*span_from(log.row, seq_num), first=_CHUNKS_AHEAD)
    async with aclosing(scan) as pages:
        try:
            async for page in pages:
                for _, value in page:
                    chunk = chunks.decode(value)
                    if chunk.last_seq_num >= end:
                        break
                    starts.append(chunk.first_seq_num)
                    arrivals.append(chunk.arrived_at)
                break
        except TableDamagedError:
            pass  # the next search meets the damage and handles it
    return starts, arrivals


async def _stored_chunk(mount: Mount, log: StreamLog, seq_num: int) -> Chunk | None:
    """Return the whole chunk that holds `seq_num`, from the stream that wrote it."""
    row = await first_row(mount.engine, *span_from(log.row, seq_num))
    return chunks.decode(row[1]) if row else None


async def _loaded(mount: Mount, log: StreamLog, chunk: Chunk) -> Chunk:
    """Return `chunk` of `log`'s stream with its payload loaded."""
    if not chunk.in_file:
        return chunk
    try:
        return (await mount.files.read([chunk]))[0]
    except BlobNotFoundError:
        log.check_alive()  # a deleted stream's files are deleted too
        raise missing(chunk) from None


async def damaged_records(
    mount: Mount, log: StreamLog, seq_num: int, error: TableDamagedError
) -> StreamDamagedError:
    """Return the error for a read of record `seq_num`, covering all records up to a readable one."""
    segment = segment_of(log.row, seq_num)
    limit = int(log.durable.seq_num) if segment is None else segment.end
    chunk = await _chunk_after(mount, log.row, seq_num, error)
    following = limit if chunk is None else min(limit, chunk.first_seq_num)
    if chunk is None and segment is None:
        following = min(limit, (await chunks_behind_damage(mount, log, seq_num)).first_seq_num)
    return stream_damaged(log.ref, range(seq_num, max(following, seq_num + 1)), error)


class ChunksBehindDamage(NamedTuple):
    """The newest chunks of a stream, as far back as they can be read one by one."""

    #: Their last seq_nums, newest first.
    last_seq_nums: Sequence[int]
    #: The first seq_num of the oldest one; the tail if there are none.
    first_seq_num: int


async def chunks_behind_damage(mount: Mount, log: StreamLog, seq_num: int) -> ChunksBehindDamage:
    """Return the newest chunks that the stream wrote itself, back to the one that holds `seq_num`.

    No scan can pass a damaged block that may hold more rows of the stream. But a newer table has
    the rows that were appended after the block, and a point read finds them there. A chunk's key is
    its last seq_num and its value contains its first, so the seq_num before that is the key of
    another chunk.
    """
    first = int(log.durable.seq_num)
    last_seq_nums: list[int] = []
    while first > seq_num and len(last_seq_nums) < BEHIND_DAMAGE_MAX:
        try:
            value = await mount.engine.get(keys.chunk(log.id, first - 1))
        except TableDamagedError:
            break
        if value is None:
            break
        last_seq_nums.append(first - 1)
        first = chunks.decode(value).first_seq_num
    return ChunksBehindDamage(last_seq_nums, first)


async def _chunk_after(
    mount: Mount, row: StreamRow, seq_num: int, error: TableDamagedError
) -> Chunk | None:
    """Return the first chunk after the damage that a read of record `seq_num` met, if any."""
    _, end = span_from(row, seq_num)
    start = error.span.end
    while start < end:
        try:
            first = await first_row(mount.engine, start, end)
        except TableDamagedError as further:
            start = further.span.end
        else:
            return None if first is None else chunks.decode(first[1])
    return None


async def _around(
    mount: Mount,
    log: StreamLog,
    seq_num: int,
    reading: Awaitable[Chunk | None],
    gaps: dict[int, StreamDamagedError],
) -> Chunk | None:
    """Return the result of `reading`.

    For a damaged chunk, return a stand-in as late as the next chunk.

    So a search treats damaged records as later than they are, and retention never removes records
    because they are unreadable. Adds the damaged records to `gaps`.
    """
    try:
        return await reading
    except TableDamagedError as error:
        damaged = await damaged_records(mount, log, seq_num, error)
        mount.damage.note(damaged.damage)
        gaps[seq_num] = damaged
        after = await _chunk_after(mount, log.row, seq_num, error)
        arrived_at, timestamp = log.arrived_at, int(log.durable.timestamp)
        if after is not None:
            arrived_at, timestamp = after.arrived_at, after.last_timestamp
        records = len(damaged.seq_nums) if damaged.seq_nums is not None else 1
        return Chunk(seq_num, records, 0, timestamp, timestamp, arrived_at, b"")


async def _first_chunk(
    log: StreamLog,
    records: range,
    chunk_at: Callable[[int], Awaitable[Chunk | None]],
    reached: Callable[[Chunk], bool],
) -> Chunk | None:
    """Return the first chunk with one of `records` for which the monotonic `reached` is true.

    None says nothing about records after these, which may be appended during the search.
    """
    low, high, first = records.start, records.stop, None
    middle = low  # most often it is the very first chunk
    while low < high:
        chunk = await chunk_at(middle)
        if chunk is None or chunk.first_seq_num >= records.stop:
            high = middle
        elif reached(chunk):
            first, high = chunk, min(middle, chunk.first_seq_num)
        else:
            low = next_segment(chunk, log.row, middle)
        middle = (low + high) // 2
    return first
