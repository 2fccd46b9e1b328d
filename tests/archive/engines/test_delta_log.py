"""A Delta Lake log over the Parquet files of an archive, as Delta readers see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from streamfold.archive import ArchiveWriter, Collector, Destination, Retention, TableSchema
from streamfold.archive.engines.delta_log import (
    CHECKPOINT_INTERVAL,
    HINT,
    LOG,
    has_delta_log,
    publish_delta_log,
)
from streamfold.archive.formats import JsonlFormat, ParquetFormat
from streamfold.blob import BlobStore
from streamfold.errors import InvalidError, StorageError
from streamfold.testing.blob_faults import FaultyBlobStore
from streamfold.testing.faults import ScriptedFaults
from tests.archive.reading import bucket_at, folder_at, names_by_id
from tests.archive.tables import State, net_changes, new_ids, open_writer, rows
from tests.s3 import S3Server

KEEP_TWO = Retention(keep_epochs=2, grace=timedelta(0))


class Table:
    """A table of two buckets, of which each new base rewrites one."""

    def __init__(self, writer: ArchiveWriter) -> None:
        self._writer = writer
        self.states: list[dict[int, str]] = []

    @classmethod
    async def open(cls, destination: Destination) -> Table:
        table = cls(await open_writer(destination, formats=[ParquetFormat()]))
        first = {1: "a", 2: "b"}
        buckets = {0: rows({1: "a"}), 1: rows({2: "b"})}
        await table._writer.write_base(buckets, "1", reason="first")
        table.states.append(first)
        return table

    async def rebase(self, name: str) -> None:
        """Open an epoch in which row 1 has another name; the file of row 2 is reused."""
        before = self.states[-1]
        after = {**before, 1: name}
        position = str(len(self.states) + 1)
        await self._writer.rebase(
            {0: rows({1: name})}, net_changes(before, after), position, reason="forced", reuse=[1]
        )
        self.states.append(after)


async def collect(destination: Destination, retention: Retention = KEEP_TWO) -> int:
    """Collect with the clock of this machine, and return how many files were deleted."""
    now = datetime.now(UTC) + timedelta(seconds=2)  # storage stamps files with whole seconds
    collector = Collector([destination], now=lambda: now, new_id=new_ids("gc"))
    return len((await collector.collect(retention)).files)


def data_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.parquet"))


def log_entries(folder: Path) -> list[Path]:
    return sorted((folder / LOG).glob("*.json"))


def read(table: DeltaTable) -> State:
    return names_by_id(table.to_pyarrow_table())


async def test_each_base_is_a_version_of_the_delta_table_without_a_copy(tmp_path: Path) -> None:
    destination = folder_at(tmp_path)
    table = await Table.open(destination)
    files = data_files(tmp_path)
    assert (await publish_delta_log(destination)).epochs == (1,)
    assert data_files(tmp_path) == files
    for name in ("x", "y"):
        await table.rebase(name)
        await publish_delta_log(destination)
    assert (await publish_delta_log(destination)).epochs == ()
    for version, state in enumerate(table.states):
        assert read(DeltaTable(tmp_path, version=version)) == state
    newest = DeltaTable(tmp_path)
    assert newest.metadata().name == "public.users"
    assert newest.history()[0]["streamfold.position"] == "3"


async def test_deltalake_polars_and_duckdb_read_the_delta_table(tmp_path: Path) -> None:
    table = await Table.open(folder_at(tmp_path))
    await table.rebase("x")
    await publish_delta_log(folder_at(tmp_path))
    found = DeltaTable(tmp_path)
    assert read(found) == table.states[-1]
    frame = pl.read_delta(str(tmp_path))
    assert dict(frame.select("id", "name").iter_rows()) == table.states[-1]
    assert dict(pl.read_delta(str(tmp_path), version=0).iter_rows()) == table.states[0]
    with duckdb.connect() as connection:
        connection.register("users", found.to_pyarrow_dataset())
        assert dict(connection.sql("from users").fetchall()) == table.states[-1]


async def test_no_entry_adds_and_removes_the_same_file(tmp_path: Path) -> None:
    table = await Table.open(folder_at(tmp_path))
    await table.rebase("x")
    await publish_delta_log(folder_at(tmp_path))
    second = (tmp_path / LOG / f"{1:020d}.json").read_text().splitlines()
    actions = [json.loads(line) for line in second]
    added = {a["add"]["path"] for a in actions if "add" in a}
    removed = {a["remove"]["path"] for a in actions if "remove" in a}
    assert [len(added), len(removed), len(added & removed)] == [1, 1, 0]


async def test_bases_that_were_missed_are_written_with_the_next_one(tmp_path: Path) -> None:
    destination = folder_at(tmp_path)
    table = await Table.open(destination)
    await publish_delta_log(destination)
    for name in ("x", "y", "z"):
        await table.rebase(name)
    assert (await publish_delta_log(destination)).epochs == (2, 3, 4)
    assert read(DeltaTable(tmp_path, version=2)) == table.states[2]


async def test_collection_removes_versions_before_their_files_and_keeps_the_newest(
    tmp_path: Path,
) -> None:
    destination = folder_at(tmp_path)
    table = await Table.open(destination)
    for number in range(25):  # more than two checkpoints
        await table.rebase(f"name {number}")
        await publish_delta_log(destination)
        if number in (3, 20):
            assert await collect(destination) > 0
            newest = DeltaTable(tmp_path)
            assert read(newest) == table.states[-1]
            assert read(DeltaTable(tmp_path, version=newest.version() - 1)) == table.states[-2]
            gone = newest.version() - 2
            assert not (tmp_path / LOG / f"{gone:020d}.json").exists()
            with pytest.raises(Exception, match=r"(?i)version|log"):
                DeltaTable(tmp_path, version=gone)
    assert read(DeltaTable(tmp_path)) == table.states[-1]
    assert dict(pl.read_delta(str(tmp_path)).iter_rows()) == table.states[-1]


async def test_collection_brings_a_log_that_is_behind_forward_before_it_deletes(
    tmp_path: Path,
) -> None:
    destination = folder_at(tmp_path)
    table = await Table.open(destination)
    await publish_delta_log(destination)
    for name in ("x", "y", "z"):
        await table.rebase(name)  # and the log is not written
    assert await collect(destination) > 0
    assert read(DeltaTable(tmp_path)) == table.states[-1]


async def test_nothing_is_deleted_while_the_log_cannot_be_written(tmp_path: Path) -> None:
    destination = folder_at(tmp_path)
    table = await Table.open(destination)
    await publish_delta_log(destination)
    (tmp_path / LOG / f"{0:020d}.json").write_text("{")
    for name in ("x", "y", "z"):
        await table.rebase(name)
    files = data_files(tmp_path)
    with pytest.raises(StorageError, match="the Delta log of file:///"):
        await collect(destination)
    assert data_files(tmp_path) == files


async def test_nothing_is_deleted_while_the_log_has_no_version_that_stays(tmp_path: Path) -> None:
    destination = folder_at(tmp_path)
    table = await Table.open(destination)
    await publish_delta_log(destination)
    writer = await open_writer(destination, ids="more", formats=[JsonlFormat()])
    for position in ("2", "3"):
        await writer.write_base(rows({5: "e"}), position, reason="gap")
    with pytest.raises(InvalidError, match=r"delete _delta_log/"):
        await collect(destination)
    assert read(DeltaTable(tmp_path)) == table.states[-1]
    for path in (tmp_path / LOG).iterdir():
        path.unlink()
    assert await collect(destination) == 2
    assert data_files(tmp_path) == []


async def test_a_pinned_epoch_keeps_its_version(tmp_path: Path) -> None:
    destination = folder_at(tmp_path)
    table = await Table.open(destination)
    await publish_delta_log(destination)
    collector = Collector([destination], now=lambda: datetime.now(UTC), new_id=new_ids("pin"))
    await collector.pin("report", 1, timedelta(days=1))
    for name in ("x", "y", "z"):
        await table.rebase(name)
    await collect(destination)
    assert read(DeltaTable(tmp_path, version=0)) == table.states[0]


async def test_new_columns_appear_in_the_version_of_their_base(tmp_path: Path) -> None:
    destination = folder_at(tmp_path)
    table = await Table.open(destination)
    await publish_delta_log(destination)
    wider = TableSchema.of(
        pa.schema([("id", pa.int64()), ("name", pa.string()), ("local", pa.timestamp("us"))]),
        ["id"],
    )
    writer = await open_writer(destination, ids="more", formats=[ParquetFormat()], schema=wider)
    row = {"id": 7, "name": "g", "local": datetime(2024, 2, 29, 1, 2, 3, 4)}
    batch = pa.RecordBatch.from_pylist([row], schema=writer.schema.arrow)
    await writer.write_base([batch], "1", reason="forced")
    await publish_delta_log(destination)
    assert DeltaTable(tmp_path).to_pyarrow_table().to_pylist() == [row]
    assert pl.read_delta(str(tmp_path)).to_dicts() == [row]
    assert read(DeltaTable(tmp_path, version=0)) == table.states[0]
    await collect(destination, Retention(keep_epochs=1, grace=timedelta(0)))
    assert [path.name for path in log_entries(tmp_path)] == [f"{2:020d}.json"]
    assert DeltaTable(tmp_path).to_pyarrow_table().to_pylist() == [row]


@pytest.mark.parametrize("refused", [pa.uint8(), pa.time64("us"), pa.timestamp("ns")])
async def test_a_column_that_delta_reads_otherwise_is_refused_by_name(
    tmp_path: Path, refused: pa.DataType
) -> None:
    schema = TableSchema.of(pa.schema([("id", pa.int64()), ("odd", refused)]), ["id"])
    writer = await open_writer(folder_at(tmp_path), schema=schema, formats=[ParquetFormat()])
    await writer.write_base([], "1", reason="first")
    with pytest.raises(InvalidError, match="column 'odd' has type"):
        await publish_delta_log(folder_at(tmp_path))
    assert not await has_delta_log(folder_at(tmp_path))


async def test_columns_without_a_value_and_bases_without_parquet_are_left_out(
    tmp_path: Path,
) -> None:
    destination = folder_at(tmp_path)
    unset = TableSchema.of(pa.schema([("id", pa.int64()), ("unset", pa.null())]), ["id"])
    writer = await open_writer(destination, schema=unset, formats=[JsonlFormat()])
    await writer.write_base([], "1", reason="first")
    assert (await publish_delta_log(destination)).epochs == ()
    writer = await open_writer(destination, ids="more", schema=unset, formats=[ParquetFormat()])
    batch = pa.RecordBatch.from_pylist([{"id": 1}], schema=unset.arrow)
    await writer.write_base([batch], "1", reason="forced")
    assert (await publish_delta_log(destination)).epochs == (2,)
    assert DeltaTable(tmp_path).to_pyarrow_table().to_pylist() == [{"id": 1}]


class SlowHints(FaultyBlobStore):
    """Names the newest checkpoint only once `proceed` is set."""

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner, ScriptedFaults())
        self.naming, self.proceed = asyncio.Event(), asyncio.Event()

    async def _pause(self, key: str) -> None:
        if key == HINT:
            self.naming.set()
            await self.proceed.wait()

    async def put(self, key: str, data: bytes | AsyncIterator[bytes]) -> None:
        await self._pause(key)
        await super().put(key, data)

    async def put_if_absent(self, key: str, data: bytes) -> str:
        await self._pause(key)
        return await super().put_if_absent(key, data)

    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        await self._pause(key)
        return await super().put_if_match(key, data, etag)


async def test_a_slow_writer_never_names_an_older_checkpoint_than_the_newest(
    tmp_path: Path,
) -> None:
    """The checkpoint that it wants to name may be gone, and readers look for it by its name."""
    destination = folder_at(tmp_path)
    table = await Table.open(destination)
    for number in range(CHECKPOINT_INTERVAL + 1):
        await table.rebase(f"name {number}")
    slow = SlowHints(destination.blobs)
    publishing = asyncio.create_task(publish_delta_log(replace(destination, blobs=slow)))
    await slow.naming.wait()
    for number in range(CHECKPOINT_INTERVAL):
        await table.rebase(f"later name {number}")
    await publish_delta_log(destination)
    await collect(destination)
    slow.proceed.set()
    await asyncio.gather(publishing, return_exceptions=True)
    named = json.loads((tmp_path / HINT).read_bytes())["version"]
    assert named == max(int(path.name[:20]) for path in (tmp_path / LOG).glob("*.parquet"))
    assert read(DeltaTable(tmp_path)) == table.states[-1]


async def test_two_processes_that_publish_at_once_leave_one_whole_log(tmp_path: Path) -> None:
    destination = folder_at(tmp_path)
    table = await Table.open(destination)
    for name in ("x", "y"):
        await table.rebase(name)
    outcomes = await asyncio.gather(
        *(publish_delta_log(folder_at(tmp_path)) for _ in range(3)), return_exceptions=True
    )
    assert any(not isinstance(outcome, BaseException) for outcome in outcomes)
    await publish_delta_log(destination)
    for version, state in enumerate(table.states):
        assert read(DeltaTable(tmp_path, version=version)) == state


async def test_a_bucket_of_s3_has_a_delta_table_that_survives_collection(
    s3_server: S3Server,
) -> None:
    url = f"s3://{s3_server.bucket}/delta/users"
    destination = bucket_at(url, s3_server)
    table = await Table.open(destination)
    for name in ("x", "y", "z"):
        await table.rebase(name)
        await publish_delta_log(destination)
    options: Mapping[str, Any] = {
        **{f"aws_{name}": value for name, value in s3_server.options().items()},
        "aws_allow_http": "true",
    }
    found = await asyncio.to_thread(DeltaTable, url, storage_options=dict(options))
    assert (found.version(), read(found)) == (3, table.states[-1])
    frame = await asyncio.to_thread(pl.read_delta, url, storage_options=dict(options))
    assert dict(frame.iter_rows()) == table.states[-1]
    await collect(destination, Retention(keep_epochs=1, grace=timedelta(0)))
    found = await asyncio.to_thread(DeltaTable, url, storage_options=dict(options))
    assert (found.version(), read(found)) == (3, table.states[-1])
