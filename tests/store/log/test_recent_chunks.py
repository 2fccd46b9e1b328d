"""Recent records in memory stay within their bound."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from streamfold.store.log.chunks import Chunk
from streamfold.store.log.recent_chunks import RecentChunks

CAPACITY = 4 << 20
STREAM = 7


def chunk(seq_num: int, size: int) -> Chunk:
    return Chunk(seq_num, 1, size, seq_num, seq_num, seq_num, bytes(size))


def test_forgotten_chunks_are_freed_at_once() -> None:
    recent = RecentChunks(CAPACITY)
    tracemalloc.start()
    try:
        for seq_num in range(60):
            recent.add(STREAM, chunk(seq_num, 1 << 20))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < CAPACITY + (1 << 20)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, CAPACITY // 8)), max_size=300))
def test_a_stream_is_read_from_memory_up_to_its_newest_chunk(adds: list[tuple[int, int]]) -> None:
    """Whatever was forgotten, the rest of each stream is its newest chunks without a gap."""
    recent = RecentChunks(CAPACITY)
    ends = [0, 0, 0]
    payload = bytes(CAPACITY // 8)
    for stream, size in adds:
        at = ends[stream]
        recent.add(stream, Chunk(at, 1, size, at, at, at, memoryview(payload)[:size]))
        ends[stream] += 1
    for stream, end in enumerate(ends):
        found = [seq_num for seq_num in range(end) if recent.since(stream, seq_num)]
        assert found == list(range(end - len(found), end))
        for seq_num in found:
            kept = recent.since(stream, seq_num)
            assert [one.first_seq_num for one in kept] == list(range(seq_num, seq_num + len(kept)))
            assert all(one.records for one in kept)
