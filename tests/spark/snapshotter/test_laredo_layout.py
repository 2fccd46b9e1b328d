"""Tables that the snapshotter publishes in layout `laredo`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import streamfold.archive
from streamfold.archive import LAREDO, Manifest, Thresholds
from streamfold.archive.errors import CommitConflictError
from streamfold.archive.formats.format import format_of
from streamfold.snapshotter.decoding import EnvelopeDecoder, parse_ddl
from streamfold.snapshotter.spark.driver_loop import DriverLoop
from streamfold.snapshotter.spark.table.archive import TableArchive
from tests.interop.laredo_reader import LaredoReader
from tests.spark.server import Server
from tests.spark.snapshotter.feeding import Feed, envelope, feed, replayed
from tests.spark.snapshotter.live import running
from tests.spark.snapshotter.stepping import BacklogsOnSpark, Table
from tests.spark.snapshotter.tables import manifest_of, table_job, table_schema
from tests.spark.snapshotter.waiting import wait_for

PUBLISHED: dict[str, Any] = {
    "layout": LAREDO,
    "formats": (format_of("jsonl"), format_of("protobuf")),
    "diff_formats": (format_of("protobuf"), format_of("jsonl")),
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> LaredoReader:
    return LaredoReader.build(tmp_path_factory.mktemp("laredo"))


def positions(manifest: Manifest) -> list[tuple[str, str]]:
    return [(artifact.kind, artifact.to_position) for artifact in manifest.artifacts]


def wait_for_head(folder: Path, position: str) -> None:
    wait_for(lambda: manifest_of(folder).head_position, lambda head: head == position)


def test_a_table_is_published_as_it_changes_and_laredos_rules_rebuild_it(
    spark: SparkSession,
    server: Server,
    fresh: Callable[[], str],
    tmp_path: Path,
    reader: LaredoReader,
) -> None:
    stream, folder = fresh(), tmp_path / "archive"
    bodies = [*Feed(5).changes(60), envelope("t"), *Feed(6).changes(40)]
    bodies += [
        envelope("c", after={"id": n, "name": "large", "price": 0.5})
        for n in range(10**6, 10**6 + 9)
    ]
    bodies += [envelope("d", {"id": n}) for n in range(10**6, 10**6 + 4)]
    job = table_job(server, stream, folder, **PUBLISHED)
    with running(spark, tmp_path / "scratch", job) as live:
        wait_for(lambda: live.ask("GET", "/health/ready")[0], lambda status: status == 200)
        assert positions(manifest_of(folder)) == [("snapshot", "0/0")]
        for start, end in ((0, 50), (50, 105)):
            feed(server, stream, bodies[start:end])
            wait_for_head(folder, f"0/{end:X}")
        assert live.ask("POST", f"/snapshot?table={job.table}")[0] == 202
        wait_for(lambda: manifest_of(folder).epoch, lambda epoch: epoch == 2)
        status = live.ask("GET", "/status")[1]["tables"][job.table]
        assert (status["position"], status["manifest_head"], status["buffer_depth"]) == (
            104, "0/69", 0,
        )  # fmt: skip
        metrics = live.ask("GET", "/metrics")[1]
        assert f'snapshotter_manifest_head_position{{table="{job.table}"}} 104.0' in metrics
    with running(spark, tmp_path / "scratch2", job):  # continues where the archive ends
        feed(server, stream, bodies[105:])
        wait_for_head(folder, f"0/{len(bodies):X}")
    manifest = manifest_of(folder)
    assert manifest.source is not None
    assert manifest.source.offsets == {stream: str(len(bodies))}
    for _, position in positions(manifest):
        expected = sorted(replayed(bodies[: LAREDO.seq_num(position) + 1]).values(), key=by_id)
        for form in ("jsonl", "protobuf"):
            found = reader.read(folder, form, ["id"], position)
            assert found["position"] == position
            assert sorted(found["rows"], key=by_id) == expected, (form, position)
    frame = spark.read.format("streamfold-archive").load(str(folder))
    assert sorted((row.asDict() for row in frame.collect()), key=by_id) == expected


def by_id(row: dict[str, Any]) -> int:
    return int(row["id"])


def test_each_artifact_is_one_file_however_large_the_table_is(
    spark: SparkSession,
    server: Server,
    fresh: Callable[[], str],
    tmp_path: Path,
    loop: DriverLoop,
    reader: LaredoReader,
) -> None:
    """By tasks of Spark, with two key columns, and bases without a change before them."""
    stream = fresh()
    job = table_job(
        server,
        stream,
        tmp_path,
        **PUBLISHED,
        schema=parse_ddl(
            "id BIGINT NOT NULL, region STRING NOT NULL, name STRING", ["id", "region"]
        ),
        decoder=EnvelopeDecoder(("id", "region")),
        bucket_bytes=1,
        thresholds=Thresholds(max_chain_diffs=2),
    )
    rows = [{"id": n % 7, "region": f"r {n}", "name": str(n)} for n in range(30)]
    bodies = [envelope("c", after=row) for row in rows]
    gone = [{"id": row["id"], "region": row["region"]} for row in rows[:10]]
    bodies += [envelope("d", key) for key in gone]
    feed(server, stream, bodies)
    table = Table(replace(job, max_records=10), loop, BacklogsOnSpark(spark, tmp_path))
    table.take_in()
    table.rebase("requested")
    manifest = manifest_of(tmp_path)
    assert [artifact.kind for artifact in manifest.artifacts].count("snapshot") == 3
    for artifact in manifest.artifacts:
        for files in artifact.formats.values():
            [part] = files.parts
            assert part.path.startswith(f"epoch={artifact.epoch}/")
    found = reader.read(tmp_path, "jsonl", ["id", "region"], manifest.head_position)
    assert sorted(found["rows"], key=lambda row: int(row["name"])) == rows[10:]


def test_another_layout_is_refused_before_anything_is_written(
    server: Server, fresh: Callable[[], str], tmp_path: Path, loop: DriverLoop
) -> None:
    stream = fresh()
    Table(table_job(server, stream, tmp_path), loop).open()
    other = TableArchive(table_job(server, stream, tmp_path, **PUBLISHED))
    for act in (other.check, other.open):
        with pytest.raises(CommitConflictError, match="has layout streamfold, and laredo is"):
            loop.call(act())
    assert manifest_of(tmp_path).fencing_token == 1
    assert asyncio.run(streamfold.archive.open(tmp_path)).head == "-1"


@pytest.mark.parametrize("declared", [True, False])
def test_an_archive_that_laredo_wrote_is_not_taken_for_one_of_the_stream(
    server: Server,
    fresh: Callable[[], str],
    tmp_path: Path,
    loop: DriverLoop,
    reader: LaredoReader,
    declared: bool,
) -> None:
    """Its positions are LSNs of a database: records before such a number would be left out."""
    reader.write(tmp_path)
    before = (tmp_path / "manifest.json").read_bytes()
    schema = table_schema() if declared else None
    job = table_job(server, fresh(), tmp_path, **PUBLISHED, table="public.orders", schema=schema)
    archive = TableArchive(job)
    for act in (archive.check, archive.open):
        with pytest.raises(CommitConflictError, match="was not written by a snapshotter"):
            loop.call(act())
    assert (tmp_path / "manifest.json").read_bytes() == before
