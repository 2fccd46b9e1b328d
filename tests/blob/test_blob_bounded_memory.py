"""Large blobs are transferred in pieces: memory does not grow with the blob."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

from streamfold.blob import BlobStore, LocalBlobStore, open_blob_store
from streamfold.blob.obstore.writes import PART_SIZE, PARTS_IN_FLIGHT
from tests.blob.bad_network import run_lossy_proxy
from tests.s3 import S3Server

MIB = 1024 * 1024
PIECE = bytes(range(256)) * 1024  # 256 KiB


async def read_in_pieces(store: BlobStore, size: int) -> int:
    """Read the blob, check every byte, and return the size of the largest piece."""
    offset, largest = 0, 0
    async for piece in store.stream("blob", 4 * MIB):
        assert piece == PIECE * (len(piece) // len(PIECE))
        offset += len(piece)
        largest = max(largest, len(piece))
    assert offset == size
    return largest


async def test_40_mib_stream_through_local_disk_in_a_few_mib(tmp_path: Path) -> None:
    store = LocalBlobStore(tmp_path)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(40 * MIB // len(PIECE)):
            yield PIECE

    tracemalloc.start()
    try:
        await store.put("blob", pieces())
        _, written = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        await read_in_pieces(store, 40 * MIB)
        _, read = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert written < 6 * MIB
    assert read < 20 * MIB  # a piece, the one before it and the comparison's own copy


async def test_80_mib_stream_to_and_from_s3_in_bounded_pieces(
    s3_server: S3Server, s3_url: str
) -> None:
    # obstore's memory is out of tracemalloc's sight, so count what has been taken from the
    # iterator and has not reached the network: that much is held somewhere.
    size, taken, held = 80 * MIB, 0, 0
    async with run_lossy_proxy(s3_server.endpoint) as proxy:
        options = s3_server.options() | {"endpoint": proxy.endpoint}
        store = open_blob_store(s3_url, **options)

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal taken, held
            while taken < size:
                held = max(held, taken - proxy.bytes_in)
                taken += len(PIECE)
                yield PIECE
                if taken == 3 * PART_SIZE:  # the upload has begun
                    proxy.open.clear()

        async def open_once_nothing_more_is_taken() -> None:
            before = -1
            while proxy.open.is_set() or taken > before:
                before = taken
                await asyncio.sleep(0.3)
            proxy.open.set()

        await asyncio.gather(store.put("blob", pieces()), open_once_nothing_more_is_taken())
        assert await read_in_pieces(store, size) == 4 * MIB
    assert held <= (PARTS_IN_FLIGHT + 2) * PART_SIZE
