"""The Delta Lake log of a published table: after each base, and never in the way of a commit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from streamfold.archive import Retention
from streamfold.snapshotter.status import State
from tests.spark.server import Server
from tests.spark.snapshotter.feeding import envelope, feed
from tests.spark.snapshotter.live import Running, running
from tests.spark.snapshotter.tables import manifest_of, state_of, table_job
from tests.spark.snapshotter.waiting import wait_for


def change(key: int) -> bytes:
    return envelope("c", after={"id": key, "name": f"n{key}"})


def write_base(live: Running, table: str) -> None:
    status, _ = live.ask("POST", f"/snapshot?table={table}&wait=60s")
    assert status == 200


def test_bases_are_versions_and_a_broken_log_delays_only_itself(
    spark: SparkSession, server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    stream, folder = fresh(), tmp_path / "items"
    job = table_job(
        server, stream, folder, delta=True, buckets=2, retention=Retention(keep_epochs=3)
    )
    feed(server, stream, [change(n) for n in range(4)])
    with running(spark, tmp_path / "scratch", job) as live:
        live.wait_for_head(job.table, 3)
        wait_for(lambda: DeltaTable.is_deltatable(str(folder)), bool)
        feed(server, stream, [change(4)])
        write_base(live, job.table)
        wait_for(lambda: DeltaTable(folder).history()[0]["streamfold.position"], "4".__eq__)
        # The files that the log names are those of the base, and Spark reads them.
        files = DeltaTable(folder).file_uris()
        assert {row.id for row in spark.read.parquet(*files).collect()} == {0, 1, 2, 3, 4}
        assert set(pl.read_delta(str(folder))["id"]) == {0, 1, 2, 3, 4}

        newest = max((folder / "_delta_log").glob("*.json"))
        entry = newest.read_bytes()
        newest.write_bytes(b"{")
        feed(server, stream, [change(5)])
        write_base(live, job.table)
        failed = wait_for(
            lambda: live.status(job.table), lambda found: found.counts.delta_errors > 0
        )
        assert (failed.state, failed.manifest_head) == (State.RUNNING, "5")
        assert set(state_of(folder)) == {0, 1, 2, 3, 4, 5}
        assert "snapshotter_delta_errors_total" in live.ask("GET", "/metrics")[1]

        newest.write_bytes(entry)
        feed(server, stream, [change(6)])
        write_base(live, job.table)
        wait_for(lambda: DeltaTable(folder).history()[0]["streamfold.position"], "6".__eq__)
    assert set(DeltaTable(folder).to_pyarrow_table()["id"].to_pylist()) == set(range(7))
    epochs = [int(entry["streamfold.epoch"]) for entry in DeltaTable(folder).history()]
    assert epochs[0] == manifest_of(folder).epoch
    assert epochs == sorted(epochs, reverse=True)
