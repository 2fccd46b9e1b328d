"""What a fork inherits: it reads the chunks of the streams it came from, and copies nothing."""

from __future__ import annotations

from streamfold.errors import InvalidError
from streamfold.store import keys
from streamfold.store.log import chunks
from streamfold.store.log.chunks import Chunk
from streamfold.store.log.sealing import SealingKey
from streamfold.store.rows import Segment, StreamRow

#: Streams whose records a fork may have, beside its own: rows, memory and reads grow with them.
FORK_DEPTH_MAX = 64


def segment_of(row: StreamRow, seq_num: int) -> Segment | None:
    """The inherited segment with this record; None if the stream wrote it itself."""
    for segment in row.lineage:
        if seq_num < segment.end:
            return segment
    return None


def ends_at(row: StreamRow, seq_num: int) -> bool:
    """Whether an inherited segment ends at `seq_num`."""
    return any(segment.end == seq_num for segment in row.lineage)


def fork_at(row: StreamRow, end: int) -> tuple[Segment, ...]:
    """The lineage of a fork that inherits everything of `row`'s stream below `end`.

    Raises InvalidError if that would be too deep a chain of forks.
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
    """The range of keys from the chunk that holds `seq_num` on, in the stream that wrote it."""
    segment = segment_of(row, seq_num)
    holder = row.id if segment is None else segment.stream_id
    return keys.chunk(holder, seq_num), keys.chunks_end(holder)


def next_segment(chunk: Chunk, row: StreamRow, seq_num: int) -> int:
    """The first record after the stream's part of `chunk`, which holds its record `seq_num`."""
    segment = segment_of(row, seq_num)
    end = chunk.last_seq_num + 1
    return end if segment is None else min(end, segment.end)


def own(chunk: Chunk, row: StreamRow, key: SealingKey | None) -> Chunk:
    """The stream's part of `chunk`, in the clear."""
    segment = segment_of(row, chunk.first_seq_num)
    if segment is None:
        return chunks.clear(chunk, row.id, key)
    return chunks.cut_before(chunks.clear(chunk, segment.stream_id, key), segment.end)
