"""Archives of made-up tables, in buckets, as a snapshotter leaves them."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive import ArchiveWriter, Destination, Manifest, Mirrors, TableSchema
from streamfold.archive.buckets import BUCKETING, SPLITMIX64, bucket_numbers
from streamfold.archive.formats import format_of
from streamfold.archive.manifest.positions import SEQ_NUM
from streamfold.archive.write.artifacts import PartPlan, WrittenPart, write_part

#: Rows in a batch as they are made.
ARRIVING = 50_000
TABLE = "bench"
SCHEMA = TableSchema.of(
    pa.schema([("key", pa.string()), ("seq", pa.int64()), ("payload", pa.string())]), ["key"]
)
_WORDS = pa.array([f'{{"name":"{"abcdefgh"[n % 8] * 20}","city":"{n:060d}"}}' for n in range(997)])


def rows(keys: Any, seq: int) -> pa.RecordBatch:
    """Rows of about 200 bytes, by key."""
    numbers = pc.utf8_lpad(pa.array(keys).cast(pa.string()), 10, "0")
    payload = pc.binary_join_element_wise(
        _WORDS.take(pa.array((keys + seq) % len(_WORDS))), pc.utf8_lpad(numbers, 90, "0"), ""
    )
    return pa.RecordBatch.from_arrays(
        [
            pc.binary_join_element_wise("user-", numbers, ""),
            pa.array(np.full(len(keys), seq, np.int64)),
            payload,
        ],
        schema=SCHEMA.arrow,
    )


def changes(keys: Any, seq: int) -> pa.RecordBatch:
    """Nine updates to one delete."""
    found = rows(keys, seq)
    deleted = keys % 10 == seq % 10
    after = pa.StructArray.from_arrays(
        found.columns, fields=list(SCHEMA.arrow), mask=pa.array(deleted)
    )
    return pa.RecordBatch.from_arrays(
        [
            pa.array(np.where(deleted, "DELETE", "UPDATE")),
            pa.StructArray.from_arrays(
                [found["key"]], fields=list(SCHEMA.changes.field("key").type)
            ),
            pa.nulls(len(keys), SCHEMA.changes.field("before").type),
            after,
        ],
        schema=SCHEMA.changes,
    )


async def write_archive(
    folder: Path, keys: int, diffs: Iterable[Any], *, buckets: int, form: str = "parquet"
) -> None:
    """A base of all keys, and one diff for each group of keys."""
    destination, chosen = Destination.open(folder.as_uri()), format_of(form)
    writer = await ArchiveWriter.open(
        TABLE, SCHEMA, [destination], formats=[chosen], diff_formats=[chosen], writer_id="bench"
    )
    every = np.arange(keys)
    numbers = np.concatenate(
        [bucket_numbers([batch["key"]], buckets) for batch in _in_batches(rows, every, 0)]
    )
    mirrors = Mirrors([destination], SEQ_NUM)

    async def bucketed(plan: PartPlan, batches: Iterable[pa.RecordBatch], b: int) -> WrittenPart:
        marks = {BUCKETING: SPLITMIX64}
        return await write_part(plan, batches, mirrors, bucket=b, marks=marks)

    plan = writer.plan_base("0")
    base = [
        await bucketed(plan, _in_batches(rows, every[numbers == b], 0), b) for b in range(buckets)
    ]
    await writer.commit_base(plan, base, reason="first")
    for seq, changed in enumerate(diffs, 1):
        plan = writer.plan_diff(str(seq - 1), str(seq))
        parts = [
            await bucketed(plan, _in_batches(changes, own, seq), b)
            for b in range(buckets)
            if len(own := changed[numbers[changed] == b])
        ]
        await writer.commit_diff(plan, parts)


def _in_batches(
    make: Callable[[Any, int], pa.RecordBatch], keys: Any, seq: int
) -> Iterable[pa.RecordBatch]:
    return (make(keys[n : n + ARRIVING], seq) for n in range(0, max(1, len(keys)), ARRIVING))


def manifest_of(folder: Path) -> Manifest:
    """What is committed in the folder."""
    stored = asyncio.run(Destination.open(folder.as_uri()).read(SEQ_NUM))
    if stored is None:
        raise FileNotFoundError(f"there is no archive in {folder}")
    return stored.manifest


def copied(folder: Path, target: Path) -> Path:
    """The same archive in a folder of its own; files are never changed, so they are linked."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target, copy_function=os.link)
    return target
