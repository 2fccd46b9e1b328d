"""Folding one bucket without Spark, on real files, against a replay in plain Python."""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamfold.archive import Mirrors, TableSchema
from streamfold.archive.buckets import BUCKETING, SPLITMIX64, TRUNCATES, bucket_numbers
from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.format import format_of
from streamfold.archive.manifest.model import Part
from streamfold.archive.manifest.positions import SEQ_NUM
from streamfold.archive.read.bucket_rows import FILES_AT_ONCE, BucketRows, base_runs
from streamfold.archive.read.layers import Layer, OpenFiles, Stack
from streamfold.archive.read.part_files import PartFiles
from streamfold.archive.write.artifacts import PartPlan, WrittenPart, write_part
from streamfold.snapshotter.spark.destinations import DestinationSpec, open_mirrors
from streamfold.snapshotter.spark.tasks.fold import FoldStep, fold
from streamfold.snapshotter.spark.tasks.results import TaskResult, raise_task_errors, written_parts
from tests.archive.tables import SCHEMA, changes, open_writer, rows

BUCKETS = 2
COLUMNS = [("shop", pa.string()), ("number", pa.int32()), ("price", pa.float64())]
OLD = TableSchema.of(pa.schema(COLUMNS), ["shop", "number"])
#: The number of a key has become wider, and there is a column that older files lack.
NEW = TableSchema.of(
    pa.schema([COLUMNS[0], ("number", pa.int64()), COLUMNS[2], ("note", pa.string())]),
    ["shop", "number"],
)
Key = tuple[str, int]
Row = dict[str, Any]


class Table:
    """A table as files, made layer by layer, and what it must hold."""

    def __init__(self, folder: Path) -> None:
        self.destination = DestinationSpec(folder.as_uri())
        self.mirrors: Mirrors = open_mirrors([self.destination])
        self.expected: dict[Key, Row] = {}
        self.stack = Stack(None, (), BUCKETS)

    def write_base(self, rows: dict[Key, Row], schema: TableSchema, form: str) -> None:
        plan = _plan(schema, form, None, "0")
        written = [
            self._write(plan, _batches(_of_bucket(rows, bucket).values(), schema.arrow), bucket)
            for bucket in range(BUCKETS)
        ]
        self.expected = dict(rows)
        self.stack = Stack(Layer.pending(plan, written), (), BUCKETS)

    def write_diff(
        self,
        changes: dict[Key, Row | None],
        schema: TableSchema,
        form: str,
        *,
        truncates: bool = False,
        bucketed: bool = True,
    ) -> None:
        at = len(self.stack.diffs)
        plan = _plan(schema, form, str(at), str(at + 1))
        self.expected = {} if truncates else self.expected
        for key, row in changes.items():
            self.expected.pop(key, None)
            if row is not None:
                self.expected[key] = row
        head = [{"action": "TRUNCATE"}] if truncates else []
        parts: list[tuple[int | None, dict[Key, Row | None]]] = [(None, changes)]
        if bucketed:
            parts = [(bucket, _of_bucket(changes, bucket)) for bucket in range(BUCKETS)]
        written = []
        for bucket, own in parts:
            reported = [*(head if not bucket else []), *map(_told, own.items())]
            if reported:
                written.append(self._write(plan, _batches(reported, schema.changes), bucket))
        if truncates and bucketed:
            written = [_marked(part) for part in written]
        self.stack = self.stack.with_diff(Layer.pending(plan, written))

    def _write(
        self, plan: PartPlan, batches: list[pa.RecordBatch], bucket: int | None
    ) -> WrittenPart:
        return asyncio.run(write_part(plan, batches, self.mirrors, bucket=bucket))

    def rows(self, schema: TableSchema) -> list[Row]:
        return [row for bucket in range(BUCKETS) for row in self.rows_of(bucket, schema)]

    def rows_of(self, bucket: int, schema: TableSchema) -> list[Row]:
        async def read() -> list[pa.RecordBatch]:
            async with OpenFiles(PartFiles(self.mirrors.primary)) as files:
                rows = BucketRows(self.stack, bucket, schema, files)
                return await asyncio.to_thread(list, rows)

        found: list[Row] = pa.Table.from_batches(asyncio.run(read()), schema.arrow).to_pylist()
        return found

    def step(self, schema: TableSchema, attempt: str) -> FoldStep:
        plan = _plan(schema, "parquet", None, str(len(self.stack.diffs)), attempt)
        return FoldStep(self.stack, plan, (self.destination,), tuple(range(BUCKETS)), BUCKETS)


def _plan(
    schema: TableSchema, form: str, start: str | None, end: str, attempt: str = "attempt0"
) -> PartPlan:
    return PartPlan(1, start, end, attempt, schema, (format_of(form),), SEQ_NUM)


def _batches(rows: Iterable[Row], schema: pa.Schema) -> list[pa.RecordBatch]:
    return [pa.RecordBatch.from_pylist(list(rows), schema=schema)]


def _of_bucket(rows: dict[Key, Any], bucket: int) -> dict[Key, Any]:
    if not rows:
        return {}
    shops, numbers = pa.array([key[0] for key in rows]), pa.array([key[1] for key in rows])
    found = bucket_numbers([shops, numbers], BUCKETS)
    return {key: row for (key, row), own in zip(rows.items(), found, strict=True) if own == bucket}


def _told(change: tuple[Key, Row | None]) -> Row:
    (shop, number), row = change
    action = "DELETE" if row is None else "UPDATE"
    return {"action": action, "key": {"shop": shop, "number": number}, "after": row}


def _marked(written: WrittenPart) -> WrittenPart:
    extra = {TRUNCATES: True}
    files = {n: msgspec.structs.replace(part, extra=extra) for n, part in written.files.items()}
    return WrittenPart(files)


class Making:
    """Random rows of few keys, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def rows(self, count: int, schema: TableSchema, deletes: float = 0.0) -> dict[Key, Any]:
        found: dict[Key, Any] = {}
        for _ in range(count):
            shop, number = self.chance.choice("abc"), self.chance.randrange(40)
            row = {"shop": shop, "number": number, "price": self.chance.random()}
            if schema is NEW:
                row |= {"note": f"note {self.chance.randrange(9)}"}
            found[shop, number] = None if self.chance.random() < deletes else row
        return found


@pytest.mark.parametrize("seed", range(5))
def test_a_bucket_is_what_a_replay_of_its_files_gives(seed: int, tmp_path: Path) -> None:
    """Diffs of all shapes: few and many changes, old and new columns, truncates, other formats."""
    making, table = Making(seed), Table(tmp_path)
    chance, forms = making.chance, ("parquet", "parquet", "jsonl")
    table.write_base(making.rows(80, OLD), OLD, chance.choice(forms))
    count = 2 * FILES_AT_ONCE + 3
    for number in range(count):
        schema = NEW if number > count // 3 else OLD
        changes = making.rows(chance.choice((0, 3, 60)), schema, deletes=0.3)
        truncates = number == seed * 4
        alive = {key: row for key, row in changes.items() if row is not None}
        table.write_diff(
            alive if truncates else changes,
            schema,
            chance.choice(forms),
            truncates=truncates,
            bucketed=chance.random() < 0.7,
        )
    rows = table.rows(NEW)
    found = {(row["shop"], row["number"]): row for row in rows}
    assert len(found) == len(rows)
    assert found == {key: {"note": None, **row} for key, row in table.expected.items()}


def test_the_same_files_fold_into_the_same_bytes(tmp_path: Path) -> None:
    making, table = Making(1), Table(tmp_path)
    table.write_base(making.rows(80, NEW), NEW, "parquet")
    for _ in range(3):
        table.write_diff(making.rows(40, NEW, deletes=0.3), NEW, "parquet")
    hashes = [
        [part.sha256 for part in _fold(table.step(NEW, at))] for at in ("first000", "second00")
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == BUCKETS


def test_a_file_that_was_written_wrong_is_named(tmp_path: Path) -> None:
    table = Table(tmp_path)
    table.write_base({("a", 1): {"shop": "a", "number": 1, "price": 1.0}}, OLD, "parquet")
    table.write_diff({("a", 1): None}, OLD, "parquet", bucketed=False)
    [part] = table.stack.diffs[0].of_bucket(0)
    content = b"PAR1" + b"\0" * (part.size_bytes - 8) + b"PAR1"
    (tmp_path / part.path).write_bytes(content)
    with pytest.raises(ArtifactCorruptError, match="another SHA-256") as changed:
        table.rows(OLD)
    # Also when the manifest says that it is what was written.
    part = msgspec.structs.replace(part, sha256=hashlib.sha256(content).hexdigest())
    diff = Layer(format_of("parquet"), OLD, {None: (part,)})
    table.stack = Stack(table.stack.base, (diff,), BUCKETS)
    with pytest.raises(ArtifactCorruptError, match="cannot be read") as wrong:
        table.rows(OLD)
    assert part.path in changed.value.message
    assert part.path in wrong.value.message
    with pytest.raises(ArtifactCorruptError):
        _fold(table.step(OLD, "attempt1"))


def test_a_key_may_have_the_name_of_a_path_into_a_struct() -> None:
    shape = pa.struct([("x", pa.int64()), ("y", pa.int64())])
    schema = TableSchema.of(pa.schema([("s", shape), ("s.x", pa.string())]), ["s.x"])
    row = {"s": {"x": 1, "y": 2}, "s.x": "k"}
    form, file = format_of("parquet"), io.BytesIO()
    form.write_rows(file, schema, _batches([row], schema.arrow))
    part = Part(path="p", uri="p", size_bytes=file.tell(), sha256="0" * 64, rows=1)
    [run] = base_runs(form, schema, part, file, schema)
    assert run.keys.to_pylist() == [{"s.x": "k"}]
    assert [batch.to_pylist() for batch in run.read(np.ones(1, np.bool_))] == [[row]]


def test_rows_of_changes_that_were_overtaken_are_not_decoded(tmp_path: Path) -> None:
    rows = {("a", n): {"shop": "a", "number": n, "price": 1.0} for n in range(50)}
    table = Table(tmp_path)
    table.write_base(rows, OLD, "parquet")
    table.write_diff({**rows}, OLD, "parquet", bucketed=False)
    table.write_diff({key: {**row, "price": 2.0} for key, row in rows.items()}, OLD, "parquet")
    [part] = table.stack.diffs[0].of_bucket(0)
    spoiled = _with_spoiled_column(tmp_path / part.path, "after.price")
    part = msgspec.structs.replace(part, sha256=spoiled)
    overtaken = Layer(format_of("parquet"), OLD, {None: (part,)})
    table.stack = Stack(table.stack.base, (overtaken, table.stack.diffs[1]), BUCKETS)
    assert [row["price"] for row in table.rows(OLD)] == [2.0] * 50
    # It is spoiled indeed: alone, it cannot be read.
    table.stack = Stack(None, (overtaken,), BUCKETS)
    with pytest.raises(ArtifactCorruptError, match="cannot be read"):
        table.rows(OLD)


def _with_spoiled_column(path: Path, name: str) -> str:
    """Overwrite the values of one column; the hash of the file as it is then."""
    group = pq.ParquetFile(path).metadata.row_group(0)
    chunks = [group.column(number) for number in range(group.num_columns)]
    [chunk] = [chunk for chunk in chunks if chunk.path_in_schema == name]
    content = bytearray(path.read_bytes())
    start, size = chunk.data_page_offset, chunk.total_compressed_size
    content[start : start + size] = b"\xff" * size
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def test_files_are_closed_when_a_fold_is_given_up(tmp_path: Path) -> None:
    making, table = Making(2), Table(tmp_path)
    table.write_base(making.rows(80, OLD), OLD, "parquet")
    table.write_diff(making.rows(40, OLD), OLD, "parquet")

    async def begin() -> set[str]:
        async with OpenFiles(PartFiles(table.mirrors.primary)) as files:
            rows = iter(BucketRows(table.stack, 0, OLD, files))
            await asyncio.to_thread(next, rows)
            return open_below(tmp_path)

    [diff] = table.stack.diffs[0].of_bucket(0)
    assert asyncio.run(begin()) == {diff.path}
    assert open_below(tmp_path) == set()


def open_below(folder: Path) -> set[str]:
    """Files of the folder that this process has open."""
    found = (Path(file.path) for file in psutil.Process().open_files())
    return {str(path.relative_to(folder)) for path in found if path.is_relative_to(folder)}


def _fold(step: FoldStep) -> list[Any]:
    """What the tasks of a re-base do, in this process."""
    ids = pa.RecordBatch.from_pydict({"id": list(range(len(step.buckets)))})
    rows = [TaskResult(**batch.to_pylist()[0]) for batch in fold([ids], step=step)]
    raise_task_errors(rows)
    return [part.files["parquet"] for part in written_parts(rows)]


async def test_an_archive_in_buckets_of_another_hash_is_folded_as_a_whole(tmp_path: Path) -> None:
    """Only the field `bucketing` says how the writer chose the buckets."""
    spec = DestinationSpec(tmp_path.as_uri())
    writer = await open_writer(open_mirrors([spec]).primary)
    # Keys of any kind in either bucket: by our hash some of them would be looked for in the other.
    base = {0: rows(dict.fromkeys(range(20), "old")), 1: rows(dict.fromkeys(range(20, 40), "old"))}
    await writer.write_base(base, "0", reason="first")
    found = [("UPDATE", key, "new") for key in range(0, 40, 2)]
    manifest = await writer.write_diff(changes(*found, ("DELETE", 1, None)), "0", "1")
    stack = Stack.of(manifest)
    assert (stack.is_bucketed, stack.buckets) == (False, 1)
    async with OpenFiles(PartFiles(open_mirrors([spec]).primary)) as files:
        batches = await asyncio.to_thread(list, BucketRows(stack, 0, SCHEMA, files))
    folded = {row["id"]: row["name"] for batch in batches for row in batch.to_pylist()}
    assert folded == {key: "old" if key % 2 else "new" for key in range(40) if key != 1}


@pytest.mark.parametrize("marked", [(), (1,)], ids=["none", "one"])
async def test_changes_in_buckets_of_our_hash_after_a_base_of_another_are_all_folded(
    tmp_path: Path, marked: Sequence[int]
) -> None:
    """No part of such a base, or not every part of it, says that its bucket is of our hash."""
    mirrors = open_mirrors([DestinationSpec(tmp_path.as_uri())])
    writer = await open_writer(mirrors.primary)
    by_bucket = _ids_by_bucket(range(40))
    plan = writer.plan_base("0")
    parts = []
    for bucket, ids in by_bucket.items():
        part = await write_part(plan, rows(dict.fromkeys(ids, "old")), mirrors, bucket=bucket)
        parts.append(_of_our_hash(part) if bucket in marked else part)
    await writer.commit_base(plan, parts, reason="first")
    plan, parts = writer.plan_diff("0", "1"), []
    for bucket, ids in by_bucket.items():
        found = [("UPDATE", key, "new") for key in ids]
        part = await write_part(plan, changes(*found), mirrors, bucket=bucket)
        parts.append(_of_our_hash(part))
    stack = Stack.of(await writer.commit_diff(plan, parts))
    async with OpenFiles(PartFiles(mirrors.primary)) as files:
        read = [BucketRows(stack, bucket, SCHEMA, files) for bucket in range(stack.buckets)]
        batches = await asyncio.to_thread(lambda: [batch for each in read for batch in each])
    folded = {row["id"]: row["name"] for batch in batches for row in batch.to_pylist()}
    assert folded == dict.fromkeys(range(40), "new")


def _ids_by_bucket(ids: Iterable[int]) -> dict[int, list[int]]:
    keys = list(ids)
    numbers = bucket_numbers([pa.array(keys, pa.int64())], BUCKETS)
    return {b: [k for k, n in zip(keys, numbers, strict=True) if n == b] for b in range(BUCKETS)}


def _of_our_hash(part: WrittenPart) -> WrittenPart:
    marked = {BUCKETING: SPLITMIX64}
    return WrittenPart(
        {name: msgspec.structs.replace(p, extra=marked) for name, p in part.files.items()}
    )
