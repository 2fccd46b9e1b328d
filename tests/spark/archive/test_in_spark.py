"""`format("streamfold-archive")` in a real session: rows, filters, feeds, secrets, errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from streamfold.archive import Destination
from streamfold.spark import FilesGoneError, error_behind
from tests.s3 import run_s3_server
from tests.spark.snapshotter.waiting import wait_for

from .conftest import Written
from .reading import as_spark, expected, load, rebuilt, values
from .tables import BUCKETS, folder_at, write_history


def test_tables_are_what_the_archive_s_own_reader_has(
    spark: SparkSession, written: Written
) -> None:
    for buckets, partitions in ((BUCKETS, BUCKETS), (None, 1)):
        folder, history = written(buckets=buckets, form="parquet")
        frame = load(spark, folder)
        found = frame.toArrow()
        assert values(found) == values(as_spark(rebuilt(folder))) == expected(history.state)
        assert frame.rdd.getNumPartitions() == partitions
    earlier = load(spark, folder.as_uri(), positionAsOf="14", columns="name,id")
    assert earlier.columns == ["name", "id"]
    assert {(r.id, r.name) for r in earlier.collect()} == {
        (key, row["name"]) for key, row in history.states["14"].items()
    }


def test_filters_give_the_rows_that_spark_itself_keeps(
    spark: SparkSession, written: Written
) -> None:
    folder, history = written(buckets=BUCKETS, form="parquet")
    frame = load(spark, folder)
    gone = next(key for key in history.states["20"] if key not in history.state)
    changed = next(k for k, r in history.state.items() if history.states["20"].get(k, r) is not r)
    for filters, condition in (
        (f'[["id", "in", [{gone}, {changed}]]]', f"id IN ({gone}, {changed})"),
        (
            '[["seen", ">", "2035-01-01T00:00:00Z"], ["local", "<", "2050-01-01T00:00:00"]]',
            "seen > timestamp'2035-01-01 00:00:00Z' AND local < timestamp_ntz'2050-01-01 00:00:00'",
        ),
        (
            '[["day", ">=", "1999-01-01"], ["price", "<", 0.5], ["name", "!=", "apple"]]',
            "day >= date'1999-01-01' AND price < 0.5 AND name <> 'apple'",
        ),
    ):
        found = load(spark, folder, filters=filters, columns="id")
        wanted = sorted(row.id for row in frame.where(condition).select("id").collect())
        assert sorted(row.id for row in found.collect()) == wanted
    assert load(spark, folder, filters=f'[["id", "=", {gone}]]').rdd.getNumPartitions() == 1


# Upstream defect 25.
def test_queries_of_one_table_do_not_get_each_other_s_conditions(
    spark: SparkSession, written: Written
) -> None:
    folder, history = written(buckets=BUCKETS, form="parquet")
    first, second = list(history.state)[:2]
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = load(spark, folder, columns="id")
        one, other = frame.where(f"id = {first}"), frame.where(f"id = {second}")
        assert sorted(row.id for row in one.union(other).collect()) == sorted([first, second])
        assert frame.count() == len(history.state)
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_the_change_feed_is_a_table_of_changes(spark: SparkSession, written: Written) -> None:
    folder, history = written(buckets=BUCKETS, form="parquet")
    frame = load(spark, folder, readChangeFeed="true", startingPosition="31", columns="id,name")
    assert frame.schema.simpleString() == (
        "struct<_action:string,_from_position:string,_to_position:string,_epoch:bigint,id:bigint,"
        "before:struct<id:bigint,name:string>,after:struct<id:bigint,name:string>>"
    )
    counts = {row["_action"]: row["count"] for row in frame.groupBy("_action").count().collect()}
    before, after = history.states["31"], history.states["40"]
    assert counts == {
        "INSERT": len(after.keys() - before.keys()),
        "DELETE": len(before.keys() - after.keys()),
        "UPDATE": sum(before.get(key, row) is not row for key, row in after.items()),
    }
    with pytest.raises(PySparkException, match=r"PositionPrunedError.*goes back to '9'"):
        load(spark, folder, readChangeFeed="true", startingPosition="3").count()


def test_s3_is_read_by_tasks_and_secrets_are_in_no_plan_no_event_and_no_error(
    spark: SparkSession, event_log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with run_s3_server() as server:
        uri = f"s3://{server.bucket}/things"
        given = server.options()
        destination = Destination.open(uri, credential_provider=None, **given)
        history = write_history(destination, buckets=2, size=30)
        options = {f"storage.{name}": value for name, value in given.items()}
        frame = load(spark, uri, **options)
        frame.explain(True)
        assert sorted(row.id for row in frame.select("id").collect()) == sorted(history.state)
        # Spark logs events a moment after they happened.
        events = wait_for(
            lambda: "".join(f.read_text() for f in event_log.rglob("*") if f.is_file()),
            lambda text: "streamfold-archive" in text,
        )
        texts = [capfd.readouterr().out, events]
        assert all("streamfold-archive" in text for text in texts), "nothing was looked at"
        for more in ({"typo": "1"}, {"positionAsOf": "1"}, {"storage.nonsense": "1"}):
            with pytest.raises(PySparkException) as raised:
                load(spark, uri, **options, **more)
            texts.append(str(raised.value))
    with pytest.raises(PySparkException) as raised:
        frame.count()
    texts.append(str(raised.value))
    assert not [text for text in texts if server.secret_access_key in text]


def test_what_goes_wrong_in_a_task_names_the_file_and_the_way_out(
    spark: SparkSession, tmp_path: Path
) -> None:
    write_history(folder_at(tmp_path), size=10)
    frame = load(spark, tmp_path)
    for path in tmp_path.rglob("diff-*.parquet"):
        path.unlink()
    with pytest.raises(
        PySparkException, match=r"FilesGoneError.*diff-.*load the table again"
    ) as raised:
        frame.toArrow()
    assert isinstance(error_behind(raised.value), FilesGoneError)
