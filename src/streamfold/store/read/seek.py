"""Finds the first record whose timestamp, or time of arrival, reaches a value.

Neither ever decreases within a stream, so a binary search over seq_nums finds the chunk: about
log2(records) seeks, and no second index to write.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from streamfold.records import payload as payloads
from streamfold.store.engine.engine import first_row
from streamfold.store.log import chunks
from streamfold.store.log.chunks import Chunk
from streamfold.store.log.retention import Expiry
from streamfold.store.log.sealing import SealingKey
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.mount import Mount
from streamfold.store.read import lineage


async def chunk_from(
    mount: Mount, log: StreamLog, seq_num: int, key: SealingKey | None
) -> Chunk | None:
    """This stream's part of the chunk that holds `seq_num`."""
    chunk = await _stored_chunk(mount, log, seq_num)
    segment = lineage.segment_of(log.row, seq_num)
    if chunk is None or segment is None or chunk.last_seq_num < segment.end:
        return chunk
    return lineage.own(chunk, log.row, key)


async def seek_timestamp(
    mount: Mount, log: StreamLog, timestamp: int, key: SealingKey | None
) -> int:
    """seq_num of the first record at or after `timestamp`; the tail if there is none."""
    first = log.readable_from
    found = await _first_chunk(
        log,
        first,
        lambda seq_num: chunk_from(mount, log, seq_num, key),
        lambda chunk: chunk.last_timestamp >= timestamp,
    )
    if found is None:
        return int(log.durable.seq_num)
    clear = lineage.own(found, log.row, key)
    within = payloads.measure(clear.payload).index_of_timestamp(timestamp)
    return max(found.first_seq_num + within, first)


async def apply_retention(mount: Mount, log: StreamLog) -> None:
    """Move `log.readable_from` past every record that is too old now."""
    limit = log.age_limit
    if limit is None or not log.retention_due:
        return
    now = mount.now()
    horizon = now - limit
    if log.arrived_at < horizon:
        log.expire(Expiry(limit, int(log.durable.seq_num), now))
        return
    first = log.trims.effective
    found = await _first_chunk(
        log,
        first,
        lambda seq_num: _stored_chunk(mount, log, seq_num),
        lambda chunk: chunk.arrived_at >= horizon,
    )
    if found is None:
        log.expire(Expiry(limit, int(log.durable.seq_num), now))
    else:
        log.expire(Expiry(limit, max(first, found.first_seq_num), found.arrived_at))


async def _stored_chunk(mount: Mount, log: StreamLog, seq_num: int) -> Chunk | None:
    """The whole chunk that holds `seq_num`, from the stream that wrote it."""
    row = await first_row(mount.engine, *lineage.span_from(log.row, seq_num))
    return chunks.decode(row[1]) if row else None


async def _first_chunk(
    log: StreamLog,
    first: int,
    chunk_at: Callable[[int], Awaitable[Chunk | None]],
    reached: Callable[[Chunk], bool],
) -> Chunk | None:
    """The first chunk from record `first` on for which `reached` is true, as for every later one."""
    tail = int(log.durable.seq_num)
    low, high, found = first, tail, None
    middle = low  # most often it is the very first chunk
    while low < high:
        chunk = await chunk_at(middle)
        if chunk is None or chunk.first_seq_num >= tail:
            high = middle
        elif reached(chunk):
            found, high = chunk, min(middle, chunk.first_seq_num)
        else:
            low = lineage.next_segment(chunk, log.row, middle)
        middle = (low + high) // 2
    return found
