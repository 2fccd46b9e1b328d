"""An archive's rows as planned on the driver and read in tasks, without starting Spark."""

from __future__ import annotations

import asyncio
import random
import shutil
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from streamfold.archive import ArtifactCorruptError, Collector, PositionPrunedError, Retention
from streamfold.archive.formats import FORMATS
from streamfold.errors import ConflictError, InvalidError
from streamfold.spark.archive import StreamfoldArchiveSource, planning
from streamfold.spark.archive.relation import spark_schema
from streamfold.spark.errors import FilesGoneError
from tests.archive.golden_table import FOLDER, STATES
from tests.archive.read.test_reader_published import (
    BASE,
    FIRST_DIFF,
    MIDDLE,
    ROWS,
    artifact,
    lines,
    publish,
)
from tests.archive.tables import START
from tests.s3 import run_s3_server, s3_client

from .conftest import Written
from .reading import PlainRead, as_spark, expected, rebuilt, values
from .tables import BUCKETS, SCHEMA, bucket_of, folder_at, row, write_history


@pytest.mark.parametrize(
    ("form", "buckets", "parts"),
    [
        ("parquet", 4, 4),
        ("parquet", None, 1),
        ("jsonl", 2, 2),
        ("protobuf", None, 1),
        ("protobuf-typed", 1, 1),
    ],
)
def test_every_state_is_what_the_archive_s_own_reader_has(
    written: Written, form: str, buckets: int | None, parts: int
) -> None:
    folder, history = written(buckets=buckets, form=form)
    assert values(PlainRead(folder).table()) == values(as_spark(rebuilt(folder)))
    for position in history.states if form == "parquet" else ("14", "20"):
        read = PlainRead(folder, positionAsOf=position)
        assert values(read.table()) == expected(history.states[position])
        assert len(read.partitions) == parts


def test_types_that_spark_lacks_are_mapped_without_loss() -> None:
    kinds = {field.name: field.dataType.simpleString() for field in spark_schema(SCHEMA.arrow)}
    assert kinds == {
        "id": "bigint", "flag": "boolean", "i8": "tinyint", "i16": "smallint", "i32": "int",
        "u8": "smallint", "u16": "int", "u32": "bigint", "u64": "decimal(20,0)",
        "f32": "float", "f64": "double", "price": "decimal(12,2)", "huge": "string",
        "small": "decimal(10,1)", "name": "string", "raw": "binary", "day": "date", "time": "bigint",
        "seen": "timestamp", "local": "timestamp_ntz", "exact": "bigint",
        "tags": "array<string>", "points": "array<struct<x:int,at:bigint>>",
        "unseen": "string", "blank": "array<string>",
        "counts": "map<string,decimal(20,0)>", "nested": "struct<deep:map<string,array<tinyint>>>",
    }  # fmt: skip
    assert not spark_schema(SCHEMA.arrow)["id"].nullable
    given = pa.table(
        {
            "u64": pa.array([2**64 - 1], pa.uint64()),
            "huge": pa.array([Decimal("1" + "0" * 55 + ".001")], pa.decimal256(60, 3)),
            "exact": pa.array([-(2**62) - 1], pa.timestamp("ns", "UTC")),
            "time": pa.array([86_399_999_999_999], pa.time64("ns")),
        }
    )
    assert as_spark(given).to_pylist() == [
        {
            "u64": Decimal(2**64 - 1),
            "huge": "1" + "0" * 55 + ".001",
            "exact": -(2**62) - 1,
            "time": 86_399_999_999_999,
        }
    ]


@pytest.mark.parametrize("format_id", FORMATS.ids())
def test_older_archives_are_read_at_every_position_whatever_changed_since(format_id: str) -> None:
    for position in ("14", "20", "31"):
        state = STATES[position]
        found = PlainRead(FOLDER, positionAsOf=position, formats=format_id).table().to_pylist()
        assert sorted((r["region"], r["id"]) for r in found) == sorted(
            (r["region"], r["id"]) for r in state
        )


def test_a_time_shows_what_was_published_then(written: Written) -> None:
    folder, history = written(buckets=None, form="parquet")
    second = START + timedelta(minutes=2, seconds=30)
    for time in (second.isoformat(), int(second.timestamp() * 1000)):
        assert PlainRead(folder, timestampAsOf=time).ids() == sorted(history.states["14"])
    with pytest.raises(PositionPrunedError, match="begins at"):
        PlainRead(folder, timestampAsOf="2020-01-01T00:00:00Z")


def test_columns_are_read_alone_and_keys_need_not_be_among_them(written: Written) -> None:
    folder, history = written(buckets=BUCKETS, form="parquet")
    found = PlainRead(folder, columns="name,flag").table()
    assert found.column_names == ["name", "flag"]
    wanted = [(r["name"], r["flag"]) for r in history.state.values()]
    assert sorted(zip(*found.to_pydict().values(), strict=True), key=str) == sorted(wanted, key=str)


def test_a_large_file_on_a_disk_is_shared_by_tasks(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, history = written(buckets=None, form="parquet")
    monkeypatch.setattr(planning, "SHARE_BYTES", 5000)
    read = PlainRead(folder, positionAsOf="9")
    assert 1 < len(read.partitions) <= planning.SHARES_MAX
    assert read.ids() == sorted(history.states["9"])
    assert len(PlainRead(folder, positionAsOf="14").partitions) == 1


@pytest.mark.parametrize("marked", [True, False])
def test_a_truncate_in_one_bucket_empties_all_of_them(tmp_path: Path, marked: bool) -> None:
    history = write_history(folder_at(tmp_path), buckets=BUCKETS, marked=marked, size=40)
    kept = {key: row(key, random.Random(5)) for key in range(3, 9)}
    history.diff(kept, "50", truncate=True)
    assert values(PlainRead(tmp_path).table()) == expected(kept)
    history.diff({**kept, 100: row(100, random.Random(6))}, "60")
    assert PlainRead(tmp_path).ids() == [*range(3, 9), 100]
    history.diff({}, "70", truncate=True)
    assert PlainRead(tmp_path).ids() == []


def test_a_key_is_looked_for_in_its_bucket_alone(tmp_path: Path) -> None:
    history = write_history(folder_at(tmp_path), buckets=BUCKETS)
    key = min(history.state)
    for path in tmp_path.rglob("*.parquet"):
        if f"-b{bucket_of(key):05d}" not in path.name:
            path.unlink()
    read = PlainRead(tmp_path, filters=f'[["id", "=", {key}]]')
    assert len(read.partitions) == 1
    assert values(read.table()) == expected({key: history.state[key]})
    gone = next(
        k for k in history.states["9"] if k not in history.state and bucket_of(k) == bucket_of(key)
    )
    assert PlainRead(tmp_path, filters=f'[["id", "in", [{gone}, {key}]]]').ids() == [key]
    with pytest.raises(FilesGoneError, match=r"is not in .*load the table again.*pin the epoch"):
        PlainRead(tmp_path).table()


def test_buckets_of_another_hash_are_all_read(tmp_path: Path) -> None:
    history = write_history(folder_at(tmp_path), buckets=BUCKETS, marked=False, size=40)
    key = min(history.state)
    read = PlainRead(tmp_path, filters=f'[["id", "=", {key}]]')
    assert len(read.partitions) == BUCKETS
    assert read.ids() == [key]


def test_a_table_stays_at_the_position_where_it_was_loaded(tmp_path: Path) -> None:
    history = write_history(folder_at(tmp_path), size=40)
    before = sorted(history.state)
    source = StreamfoldArchiveSource({"path": str(tmp_path)})
    schema = source.schema()
    history.diff({}, "50")
    history.base({}, "50", "forced")

    def ids() -> list[int]:
        reader = source.reader(schema)
        batches = [b for part in reader.partitions() for b in reader.read(part)]
        return sorted(n for batch in batches for n in batch["id"].to_pylist())

    assert ids() == before
    assert PlainRead(tmp_path).ids() == []
    collector = Collector([folder_at(tmp_path)], now=history.clock.now, new_id=lambda: "c")
    asyncio.run(collector.collect(Retention(keep_epochs=1)))
    with pytest.raises(PositionPrunedError, match="goes back to '50'"):
        ids()
    shutil.rmtree(tmp_path)
    write_history(folder_at(tmp_path), size=40, ids="other")
    with pytest.raises(ConflictError, match="load the table again"):
        ids()


def test_a_damaged_file_is_reported_by_name(copied: Written) -> None:
    folder, _ = copied(buckets=None, form="parquet")
    newest = max(folder.rglob("snapshot-*.parquet"))
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(ArtifactCorruptError, match=newest.name):
        PlainRead(folder).table()


def test_archives_of_other_writers_are_read_once_their_columns_are_declared(
    tmp_path: Path,
) -> None:
    base = artifact(tmp_path, lines(ROWS), None, BASE, 3)
    publish(tmp_path, [base, artifact(tmp_path, lines(FIRST_DIFF), BASE, MIDDLE, 2)])
    source = StreamfoldArchiveSource({"path": str(tmp_path)})
    with pytest.raises(InvalidError, match=r"has no schema: declare the columns with schema\("):
        source.schema()
    declared = StructType([StructField("id", LongType()), StructField("name", StringType())])
    reader = source.reader(declared)
    batches = [b for part in reader.partitions() for b in reader.read(part)]
    found = sorted((r["id"], r["name"]) for batch in batches for r in batch.to_pylist())
    assert found == [(1, "A"), (2, "b")]


def test_a_bucket_of_s3_is_read_with_credentials_of_the_environment(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, history = written(buckets=BUCKETS, form="parquet")
    with run_s3_server() as server:
        client = s3_client(server)
        for path in folder.rglob("*.*"):
            if path.is_file():
                client.upload_file(str(path), server.bucket, f"t/{path.relative_to(folder)}")
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        profile = {"type": "ambient", "region": server.region, "endpoint_url": server.endpoint}
        options = {f"credentials.{name}": value for name, value in profile.items()}
        assert PlainRead(f"s3://{server.bucket}/t", **options).ids() == sorted(history.state)
        with pytest.raises(InvalidError, match="assume_role"):
            PlainRead(
                f"s3://{server.bucket}/t", **{"credentials.role_arn": "arn:aws:iam::1:role/r"}
            )
