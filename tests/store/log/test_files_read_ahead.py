"""Files of chunks are read ahead for readers that have read much."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from streamfold.model.records import Record, trim_record
from streamfold.store import ReadRequest, from_seq_num
from streamfold.store.log.chunk_files import ChunkFiles
from streamfold.store.log.chunks import Chunk
from streamfold.store.read import cursor
from tests.store.conftest import BASIN, STREAM, Bench, incompressible
from tests.store.log.large_records import SETTINGS, prepare


class CountedReads:
    """Reads of files, and how many of them were under way at most."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._read = ChunkFiles.read

    async def read(self, files: ChunkFiles, run: Sequence[Chunk]) -> list[Chunk]:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0)  # others that were begun with it begin now
            return await self._read(files, run)
        finally:
            self.now -= 1


@pytest.mark.parametrize("trimmed", [0, 30, 75])
async def test_files_read_ahead_come_in_order_past_rows_and_trims(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, trimmed: int
) -> None:
    """A reader that has read much loads the next files while it is served the one before."""
    monkeypatch.setattr(cursor, "_EAGER_FROM", 1)
    monkeypatch.setattr(cursor, "_LOAD_BYTES", 1)
    counted = CountedReads()
    monkeypatch.setattr(ChunkFiles, "read", lambda *given: counted.read(*given))
    expected = [incompressible(40_000 if number % 7 else 10, number) for number in range(100)]
    async with bench.store(SETTINGS) as store:
        await prepare(store)
        for body in expected:
            await store.append(BASIN, STREAM, [Record(body)])
    async with bench.store(SETTINGS) as store:
        found: list[tuple[int, bytes]] = []
        request = ReadRequest(from_seq_num(0), count=100)
        async with store.follow(BASIN, STREAM, request) as reader:
            async for batch in reader:
                if not found and trimmed:
                    await store.append(BASIN, STREAM, [trim_record(trimmed)])
                    await store.upkeep()
                records = [one for one in batch.records() if one.seq_num < len(expected)]
                found += [(one.seq_num, one.body) for one in records]
                if found[-1][0] >= 90:
                    break
        assert counted.most == 3  # one that is waited for, and two ahead
        await asyncio.sleep(0)
        assert counted.now == 0  # the reader left in the middle
    numbers = [number for number, _ in found]
    assert numbers == sorted(set(numbers))
    assert {*range(max(1, trimmed), 91)} <= {*numbers}
    assert all(body == expected[number] for number, body in found)
