"""A rebuild's memory holds row groups and changes, regardless of the table's size."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from streamfold.archive import TableSchema
from streamfold.archive.formats import Format, JsonlFormat, ParquetFormat
from tests.archive.reading import folder_at
from tests.archive.tables import open_writer

MIB = 1 << 20
SCHEMA = TableSchema.of(pa.schema([("id", pa.int64()), ("name", pa.string())]), ["id"])
ROWS, NAME = 4096, 1024
#: Batches. How much a read holds at most is reached well before the smaller one ends.
SMALL, LARGE = 16, 64


def batches(count: int) -> Iterator[pa.RecordBatch]:
    """Yield about 4 MiB of names each, of which next to nothing repeats."""
    rng = random.Random(3)
    for number in range(count):
        ids = pa.array(range(number * ROWS, (number + 1) * ROWS), pa.int64())
        text = rng.randbytes(ROWS * NAME // 2).hex()
        names = pa.array([text[start : start + NAME] for start in range(0, len(text), NAME)])
        yield pa.RecordBatch.from_arrays([ids, names], schema=SCHEMA.arrow)


def updates(count: int) -> pa.RecordBatch:
    """Return changes of some rows of every batch, the same number for every size of table."""
    ids = [number * ROWS // 8 for number in range(count * 8)][:: count // SMALL]
    rows = [{"id": number, "name": "new"} for number in ids]
    plain = [{"action": "UPDATE", "key": {"id": row["id"]}, "after": row} for row in rows]
    return pa.RecordBatch.from_pylist(plain, schema=SCHEMA.changes)


async def write(folder: Path, count: int) -> None:
    formats: list[Format] = [ParquetFormat(), JsonlFormat()]
    writer = await open_writer(folder_at(folder), formats=formats, schema=SCHEMA)
    await writer.write_base(batches(count), "0", reason="first")
    await writer.write_diff([updates(count)], "0", "1")


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    for count in (SMALL, LARGE):
        asyncio.run(write(tmp_path / str(count), count))
    for form in ("parquet", "jsonl"):
        small, large = (read(tmp_path / str(count), form) for count in (SMALL, LARGE))
        assert (small["rows"], large["rows"]) == (SMALL * ROWS, LARGE * ROWS)
        # The larger table has 192 MiB more. How much of what it has freed a process keeps depends on
        # chance: tens of MiB.
        assert large["peak"] - small["peak"] < 112 * MIB, (form, small, large)


def read(folder: Path, form: str) -> dict[str, int]:
    """Read in a process of its own: what one read leaves behind must not count for the next."""
    command = [sys.executable, "-m", "tests.archive.reading_process", str(folder), form]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=240)
    found: dict[str, int] = json.loads(done.stdout)
    return found
