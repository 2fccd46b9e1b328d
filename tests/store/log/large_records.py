"""Records large enough for a chunk file, and shared code of chunk file tests."""

from __future__ import annotations

from streamfold.store.engine.location import FileLimits
from streamfold.store.read.requests import ReadRequest, from_seq_num
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore
from tests.store.conftest import BASIN, PATIENCE, STREAM, Bench

#: Bytes from which records of one commit are a file in these tests.
FILE_FROM = 1000
#: Readers find nothing in memory: they read what is stored.
SETTINGS = StoreSettings(
    trim_grace=0,
    leftover_grace=0,
    chunk_file_bytes=FILE_FROM,
    recent_bytes=0,
    recovery_timeout=PATIENCE,
)
LARGE = bytes(range(256)) * 4
LIMITS = FileLimits(FILE_FROM, reads_max=1, deletes_max=1)


async def names(bench: Bench) -> list[str]:
    assert bench.location.chunks is not None
    return [meta.key async for meta in bench.location.chunks.list()]


async def bodies(store: StreamStore, stream: str = STREAM, start: int = 0) -> list[bytes]:
    request = ReadRequest(from_seq_num(start), count=1_000_000)
    found: list[bytes] = []
    async with store.follow(BASIN, stream, request) as reader:
        while batch := await reader.read():
            found += [record.body for record in batch.records()]
    return found


async def prepare(store: StreamStore) -> None:
    await store.create_basin(BASIN)
    await store.create_stream(BASIN, STREAM)
