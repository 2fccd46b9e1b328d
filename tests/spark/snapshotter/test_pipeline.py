"""Batches into an archive, one by one, as the driver of a table leads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from streamfold.archive import Thresholds
from streamfold.errors import ConflictError, StreamfoldError
from streamfold.snapshotter.decoding import DebeziumDecoder
from streamfold.snapshotter.spark.destinations import DestinationSpec
from streamfold.snapshotter.spark.driver_loop import DriverLoop
from streamfold.snapshotter.spark.table_job import TableJob
from streamfold.snapshotter.spark.tasks.arrivals import TASK_BYTES
from streamfold.snapshotter.spark.tasks.batch import TableWork
from streamfold.snapshotter.spark.tasks.intake import FIRST_BUCKETS, Intake
from streamfold.spark import DataLossError
from tests.spark.server import Server
from tests.spark.snapshotter.feeding import Feed, envelope, feed
from tests.spark.snapshotter.stepping import BacklogsOnSpark, Table, TasksInThisProcess
from tests.spark.snapshotter.tables import check_every_boundary, manifest_of, state_of, table_job

OpenTable = Callable[..., Table]


@pytest.fixture(params=["one task", "many tasks"])
def open_table(
    request: pytest.FixtureRequest, spark: SparkSession, loop: DriverLoop, tmp_path: Path
) -> OpenTable:
    """Opens tables whose ranges one task takes in, or many; records come in steps of the job's size."""
    jobs = (
        TasksInThisProcess()
        if request.param == "one task"
        else BacklogsOnSpark(spark, tmp_path / "scratch")
    )

    def open_(job: TableJob, **given: Any) -> Table:
        table = Table(job, loop, jobs, **given)
        table.open()
        return table

    return open_


def test_the_first_records_may_need_more_buckets_than_they_were_sorted_into(
    server: Server, fresh: Callable[[], str], tmp_path: Path, open_table: OpenTable
) -> None:
    stream, bodies = fresh(), list(Feed(7).changes(600))
    feed(server, stream, bodies)
    table = open_table(table_job(server, stream, tmp_path, bucket_bytes=256, max_records=200))
    table.advance()
    assert check_every_boundary(tmp_path, bodies) == 3
    table.rebase("asked")
    assert len(manifest_of(tmp_path).base.formats["parquet"].parts) > FIRST_BUCKETS
    check_every_boundary(tmp_path, bodies)


def test_every_artifact_equals_a_replay_and_a_repeated_batch_changes_nothing(
    server: Server, fresh: Callable[[], str], tmp_path: Path, open_table: OpenTable
) -> None:
    stream, bodies = fresh(), list(Feed(7).changes(1200))
    feed(server, stream, bodies)
    table = open_table(table_job(server, stream, tmp_path, max_records=200))
    work = table.work(0, 200)
    table.advance()
    before = (tmp_path / "manifest.json").read_bytes()
    repeated = table.take(replace(work, state=table.work(1000, 1200).state))
    assert (repeated.batch, repeated.written) == (None, None)
    assert (tmp_path / "manifest.json").read_bytes() == before
    kinds = [artifact.kind for artifact in manifest_of(tmp_path).artifacts]
    assert kinds == ["snapshot", "diff", "diff", "diff", "diff", "snapshot", "diff"]
    assert check_every_boundary(tmp_path, bodies) == 6


def test_what_records_may_say_is_in_every_artifact(
    server: Server, fresh: Callable[[], str], tmp_path: Path, open_table: OpenTable
) -> None:
    """Truncates, changed keys, columns that were not sent, new columns, what cannot be decoded."""
    stream, folder = fresh(), tmp_path / "archive"
    rows = [{"id": n, "name": f"n{n}", "photo": "x" * n} for n in range(40)]
    groups = [
        [b"not json"] + [envelope("c", after=row) for row in rows],
        # Not sent: kept from the base, from a diff, and for a row that is not there.
        [
            envelope("u", {"id": n}, {"id": n, "name": "kept"}, unchanged=["photo"])
            for n in (1, 2, 39)
        ]
        + [envelope("u", {"id": 5}, {"id": 5, "name": "seen", "photo": "new"})],
        [envelope("u", {"id": 5}, {"id": 5, "name": "again"}, unchanged=["photo"])],
        # A key changes, and another row takes the old one.
        [envelope("u", {"id": 7}, {"id": 107, "name": "moved"}), b'{"op": "x"}', b""],
        [envelope("c", after={"id": 7, "name": "second", "size": 12})],
        [envelope("d", {"id": 8}), envelope("t"), envelope("c", after={"id": 3, "name": "left"})],
        [envelope("u", {"id": 3}, {"id": 3, "size": 1 << 40}), envelope("d", {"id": 999})],
        [envelope("t")],
        [envelope("c", after={"id": 4, "name": "last"})],
    ]
    bodies = groups[0]
    feed(server, stream, bodies)
    table = open_table(table_job(server, stream, folder, schema=None, buckets=4))
    table.advance()
    for group in groups[1:]:
        feed(server, stream, group)
        bodies = bodies + group
        table.advance()
    assert check_every_boundary(folder, bodies) == len(groups)
    found = manifest_of(folder)
    assert {a.rebase_reason for a in found.artifacts if a.is_base} == {"first", "max_chain_diffs"}
    assert "size" in [column["Name"] for column in found.columns or []]
    assert len(found.base.formats["parquet"].parts) == 4
    letters = [
        json.loads(line)
        for file in sorted((folder / "dead-letters").iterdir())
        for line in file.read_text().splitlines()
    ]
    dead = [
        number for number, body in enumerate(bodies) if body in (b"not json", b'{"op": "x"}', b"")
    ]
    assert [letter["seq_num"] for letter in letters] == dead
    assert all(letter["reason"] and letter["stream"] == stream for letter in letters)


class InSmallBatches(TableWork):
    """Reads its records in batches of ten."""

    def read(self, most_bytes: int = TASK_BYTES) -> list[pa.RecordBatch]:
        batches = super().read(most_bytes)
        return [batch.slice(n, 10) for batch in batches for n in range(0, len(batch), 10)]


class SmallBatches(TasksInThisProcess):
    """A task that gets its records in batches of ten."""

    async def take_in(self, work: TableWork, tail: int) -> Intake:
        return await asyncio.to_thread(InSmallBatches(work.state, work.start, work.end).run)


@pytest.mark.parametrize("held", [False, True], ids=["whole", "held"])
def test_declared_columns_have_their_types_in_every_part_of_a_batch(
    server: Server, fresh: Callable[[], str], tmp_path: Path, loop: DriverLoop, held: bool
) -> None:
    """The declaration is in one part of a batch, or waits with an open transaction."""
    stream, known = fresh(), [{"name": "id", "type": "BIGINT"}]
    added = [*known, {"name": "at", "type": "TIMESTAMP"}, {"name": "price", "type": "DECIMAL(8,2)"}]
    txn = {"id": "7"} if held else None

    def row(number: int, **more: Any) -> bytes:
        values = {"id": number, "at": "2026-01-31T11:00:00Z", "price": "1.50"}
        return envelope("c", after=values, txn=txn, **more)

    last = envelope("c", after={"id": 200}, txn={"id": "7", "last": True} if held else None)
    groups = [
        [envelope("s", columns=known), *(envelope("r", after={"id": n}) for n in range(40))],
        [
            envelope("c", after={"id": 99}, txn=txn),
            envelope("s", columns=added),
            *map(row, range(100, 140)),
        ],
        [*map(row, range(140, 180)), last],
    ]
    feed(server, stream, groups[0])
    table = Table(table_job(server, stream, tmp_path, schema=None), loop, SmallBatches())
    table.take_in()
    for group in groups[1:]:
        feed(server, stream, group)
        table.advance()
    types = {c["Name"]: c["Type"] for c in manifest_of(tmp_path).columns or []}
    assert types == {"id": "int64", "at": "timestamp[us, tz=UTC]", "price": "decimal128(8, 2)"}
    assert set(state_of(tmp_path)) == {*range(40), 99, *range(100, 180), 200}


def test_a_transaction_over_several_batches_is_published_whole(
    server: Server, fresh: Callable[[], str], tmp_path: Path, open_table: OpenTable
) -> None:
    """As Debezium marks it, with a truncate and a record that cannot be decoded inside."""
    stream, folder = fresh(), tmp_path / "archive"
    groups = [
        [debezium("c", 1), marker("BEGIN", "5"), debezium("c", 2, "5")],  # 0 to 2
        [debezium("t", txn="5"), b"junk", debezium("c", 3, "5"), b""],  # 3 to 6
        [debezium("c", 4, "5"), marker("END", "5"), marker("BEGIN", "6"), debezium("c", 5, "6")],
        [debezium("c", 6, "6")],  # 11
    ]
    job = table_job(server, stream, folder, decoder=DebeziumDecoder(("id",)), buckets=4)
    feed(server, stream, groups[0])
    table, seen = open_table(job), []
    for number in range(len(groups)):
        before = table.status().counts.records
        status = table.advance()
        seen.append((status.manifest_head, status.waiting_from, status.counts.records - before))
        if number + 1 < len(groups):
            feed(server, stream, groups[number + 1])
    assert seen == [("0", 1, 1), ("0", 1, 0), ("8", 9, 8), ("8", 9, 0)]
    assert [set(state_of(folder, position)) for position in ("0", "8")] == [{1}, {3, 4}]
    assert len(list((folder / "dead-letters").iterdir())) == 1  # though it was read twice
    # A new process finds the open transaction again, and can be made to stop waiting.
    again = open_table(job)
    status = again.advance()
    assert (status.waiting_from, status.manifest_head) == (9, "8")
    released = again.release()
    assert (released.counts.transactions_cut, released.waiting_from) == (1, None)
    assert released.manifest_head == "11"
    assert set(state_of(folder)) == {3, 4, 5, 6}


def test_columns_that_were_not_sent_are_not_filled_from_another_state_of_the_archive(
    server: Server, fresh: Callable[[], str], tmp_path: Path, loop: DriverLoop
) -> None:
    stream = fresh()
    feed(server, stream, [envelope("c", after={"id": 1, "name": "one", "price": 1.0})])
    table = Table(table_job(server, stream, tmp_path), loop)
    table.take_in()
    feed(server, stream, [envelope("u", {"id": 1}, {"id": 1, "name": "two"}, unchanged=["price"])])
    late = table.work(1, 2)
    table.advance()
    assert state_of(tmp_path)[1]["price"] == 1.0
    with pytest.raises(ConflictError, match="no longer ends at 0 of epoch 1"):
        table.take(late)


def debezium(op: str, key: int | None = None, txn: str | None = None) -> bytes:
    row = None if key is None else {"id": key, "name": f"n{key}"}
    transaction = None if txn is None else {"id": txn, "total_order": 1}
    reported = {"op": op, "before": None, "after": row, "transaction": transaction}
    return json.dumps(reported).encode()


def marker(status: str, txn: str) -> bytes:
    return json.dumps({"status": status, "id": txn, "event_count": None}).encode()


def test_a_new_base_uses_buckets_without_changes_again_and_grows_with_the_table(
    server: Server, fresh: Callable[[], str], tmp_path: Path, open_table: OpenTable
) -> None:
    stream, folder = fresh(), tmp_path / "archive"
    rows = [{"id": n, "name": f"a name of number {n}", "price": 1.0} for n in range(2000)]
    bodies = [envelope("c", after=row) for row in rows]
    bodies += [envelope("u", {"id": 5}, {"id": 5, "name": "changed"}) for _ in range(50)]
    feed(server, stream, bodies[:2000])
    job = table_job(server, stream, folder, buckets=8, thresholds=Thresholds(max_chain_diffs=1))
    table = open_table(job)
    table.advance()
    before = bucket_files(folder)
    feed(server, stream, bodies[2000:])
    table.advance()
    after = bucket_files(folder)
    changed = [bucket for bucket in before if before[bucket] != after[bucket]]
    assert (len(before), len(changed)) == (8, 1)
    written = sum(size for bucket, (_, size) in after.items() if bucket in changed)
    assert written < sum(size for _, size in after.values()) / 4
    # The same table, as large as several buckets may be: each of the old ones is split.
    open_table(replace(job, bucket_bytes=1024)).rebase("grown")
    assert len(bucket_files(folder)) == 16
    assert check_every_boundary(folder, bodies) == 2


def test_a_stream_that_ends_before_the_archive_does_is_reported_as_data_loss(
    server: Server, fresh: Callable[[], str], tmp_path: Path, loop: DriverLoop
) -> None:
    stream, folder = fresh(), tmp_path / "archive"
    feed(server, stream, Feed(3).changes(20))
    job = table_job(server, stream, folder)
    assert Table(job, loop).take_in().manifest_head == "19"
    other = fresh()  # as if the stream had been deleted and created again
    feed(server, other, Feed(3).changes(5))
    replaced = Table(replace(job, stream=other), loop)
    with pytest.raises(DataLossError, match=r"ends before record 5, .* records up to 19"):
        replaced.open()
    # The new stream is not trimmed to the head of the old one.
    assert replaced.status().manifest_head is None


@pytest.mark.parametrize(("outage", "files"), [(timedelta(hours=1), 1), (timedelta(hours=13), 2)])
def test_files_of_a_long_outage_are_written_again_because_collection_may_delete_them(
    server: Server, fresh: Callable[[], str], loop: DriverLoop, tmp_path: Path,
    outage: timedelta, files: int,
) -> None:  # fmt: skip
    stream, first, second = fresh(), tmp_path / "first", tmp_path / "second"
    specs = tuple(DestinationSpec(folder.as_uri()) for folder in (first, second))
    job = table_job(server, stream, first, destination_specs=specs)
    times = [datetime.now(UTC)]
    table = Table(job, loop, now=lambda: times[-1])
    table.open()
    feed(server, stream, Feed(3).changes(20))
    copies = second / "epoch=1"
    copies.rename(tmp_path / "aside")
    copies.write_text("in the way")
    with pytest.raises(StreamfoldError):
        table.advance()
    assert len(list(first.glob("epoch=1/diff-*"))) == 1  # written, and not committed
    times.append(times[-1] + outage)
    copies.unlink()
    (tmp_path / "aside").rename(copies)
    table.take_in()
    assert manifest_of(first).head_position == manifest_of(second).head_position == "19"
    assert len(list(first.glob("epoch=1/diff-*"))) == files
    assert state_of(first) == state_of(second)


def bucket_files(folder: Path) -> dict[int, tuple[str, int]]:
    """The files of the newest base: path and size by bucket."""
    parts = manifest_of(folder).base.formats["parquet"].parts
    return {part.bucket or 0: (part.path, part.size_bytes) for part in parts}
