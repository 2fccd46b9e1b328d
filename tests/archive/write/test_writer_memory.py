"""A large base is written in batches: memory does not grow with the table."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from streamfold.archive.formats import Format, JsonlFormat, ParquetFormat
from streamfold.blob import LocalBlobStore
from tests.archive.tables import SCHEMA, at, open_writer

MIB = 1024 * 1024
BATCHES, ROWS, NAME = 100, 1000, 2000


def batches() -> Iterator[pa.RecordBatch]:
    """Yield about 190 MiB that do not compress."""
    rng = random.Random(1)
    for number in range(BATCHES):
        ids = pa.array(range(number * ROWS, (number + 1) * ROWS), pa.int64())
        names = pa.array([rng.randbytes(NAME // 2).hex() for _ in range(ROWS)])
        yield pa.RecordBatch.from_arrays([ids, names], schema=SCHEMA.arrow)


@pytest.mark.parametrize("formats", [(ParquetFormat(),), (JsonlFormat(), ParquetFormat())])
async def test_memory_does_not_grow_with_the_table(
    tmp_path: Path, formats: tuple[Format, ...]
) -> None:
    writer = await open_writer(at(LocalBlobStore(tmp_path)), formats=formats)
    gc.collect()
    arrow, before = 0, pa.total_allocated_bytes()  # other tests may have left something

    def watched() -> Iterator[pa.RecordBatch]:
        nonlocal arrow
        for batch in batches():
            yield batch
            arrow = max(arrow, pa.total_allocated_bytes() - before)

    tracemalloc.start()
    try:
        manifest = await writer.write_base(watched(), "0", reason="first")
        _, python = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert manifest.base.row_count == BATCHES * ROWS
    assert max(files.size_bytes for files in manifest.base.formats.values()) > 90 * MIB
    assert arrow < 128 * MIB  # a few row groups of the format
    assert python < 32 * MIB  # what is spooled in memory, and text
