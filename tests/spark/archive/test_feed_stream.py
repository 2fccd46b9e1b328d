"""`spark.readStream` on an archive: every published change once, over restarts and pruned epochs."""

from __future__ import annotations

import asyncio
import pickle
import shutil
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from streamfold.archive import (
    GAP,
    ChainGapError,
    Collector,
    PositionPrunedError,
    Retention,
    TableSchema,
)
from streamfold.errors import ConflictError
from streamfold.spark import OptionError, error_behind
from streamfold.spark.archive import StreamfoldArchiveSource
from streamfold.spark.archive.source import FeedOffset, FeedStreamReader

from .tables import SCHEMA, History, Row, folder_at, write_history

SINCE_9 = {"readChangeFeed": "true", "startingPosition": "9"}


class PlainQuery:
    """What Spark does with the source in streaming, in this process.

    `end` is where the last batch ended, as a checkpoint has it.
    """

    def __init__(self, folder: Path, end: FeedOffset | None = None, **options: str) -> None:
        source = StreamfoldArchiveSource({"path": str(folder), **SINCE_9, **options})
        schema = source.schema()
        self._reader: FeedStreamReader = pickle.loads(pickle.dumps(source)).streamReader(schema)
        self.end = end or self._reader.initialOffset()

    def latest(self) -> FeedOffset:
        return self._reader.latestOffset(self.end, self._reader.getDefaultReadLimit())

    def batch(self) -> list[Row]:
        """Return the changes of one micro-batch, with everything that is published now."""
        start, self.end = self.end, self.latest()
        in_tasks = pickle.loads(pickle.dumps(self._reader))
        return [
            change
            for part in pickle.loads(pickle.dumps(self._reader.partitions(start, self.end)))
            for rows in in_tasks.read(part)
            for change in rows.to_pylist()
        ]

    def take_only_what_is_there(self) -> None:
        self._reader.prepareForTriggerAvailableNow()


def ends(changes: list[Row]) -> set[str]:
    return {change["_to_position"] for change in changes}


def add_diff(history: History, position: str) -> None:
    """Publish a diff that removes one row."""
    state = dict(history.state)
    state.popitem()
    history.diff(state, position)


def prune(history: History, folder: Path) -> None:
    """Keep the last epoch alone."""
    history.clock.advance(days=3)
    collector = Collector(
        [folder_at(folder)], now=history.clock.now, new_id=iter(map(str, range(99))).__next__
    )
    kept = Retention(keep_epochs=1, grace=timedelta(days=1))
    assert asyncio.run(collector.collect(kept)).epochs == (1,)


def add_column(history: History, position: str) -> None:
    """Publish a diff with one row more, which has a new column."""
    history.writer.evolve(TableSchema.of([*SCHEMA.arrow, pa.field("added", pa.int32())], ["id"]))
    after = {"id": 10_000, "added": 7}
    change = {"action": "INSERT", "key": {"id": 10_000}, "before": None, "after": after}
    batch = pa.RecordBatch.from_pylist([change], schema=history.writer.schema.changes)
    head = str(history.writer.head)
    asyncio.run(history.writer.write_diff([batch], head, position))


def test_every_diff_is_in_one_batch(tmp_path: Path) -> None:
    history = write_history(folder_at(tmp_path), buckets=2, size=20)
    query = PlainQuery(tmp_path)
    assert ends(query.batch()) == {"14", "20", "31", "40"}
    assert query.latest() == query.end == {"archive": query.end["archive"], "position": "40"}
    add_diff(history, "50")
    [deleted] = query.batch()
    assert (deleted["_action"], deleted["_from_position"], deleted["_to_position"]) == (
        "DELETE", "40", "50",
    )  # fmt: skip
    query.take_only_what_is_there()
    add_diff(history, "60")
    assert query.latest() == query.end
    assert ends(PlainQuery(tmp_path, query.end).batch()) == {"60"}


def test_a_query_that_resumes_does_not_need_its_start_any_more(tmp_path: Path) -> None:
    history = write_history(folder_at(tmp_path), size=20)
    query = PlainQuery(tmp_path)
    query.batch()
    add_diff(history, "50")
    prune(history, tmp_path)
    assert ends(PlainQuery(tmp_path, query.end).batch()) == {"50"}
    with pytest.raises(PositionPrunedError, match="goes back to '20'; begin there or later"):
        PlainQuery(tmp_path)
    with pytest.raises(ChainGapError, match="begin and end where artifacts do"):
        PlainQuery(tmp_path, startingPosition="33")
    left_behind = PlainQuery(tmp_path, {**query.end, "position": "14"})
    with pytest.raises(PositionPrunedError):
        left_behind.batch()


def test_changes_that_were_lost_end_the_query(tmp_path: Path) -> None:
    history = write_history(folder_at(tmp_path), size=20)
    query = PlainQuery(tmp_path)
    query.batch()
    history.base(history.state, "50", GAP)
    with pytest.raises(ChainGapError, match="load the table at '50'"):
        query.batch()


def test_another_archive_in_the_folder_ends_the_query(tmp_path: Path) -> None:
    write_history(folder_at(tmp_path / "a"), size=20)
    write_history(folder_at(tmp_path / "b"), size=20, ids="other")
    query = PlainQuery(tmp_path / "a", startingPosition="31")
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "b").rename(tmp_path / "a")
    with pytest.raises(ConflictError, match="holds another archive"):
        query.batch()
    with pytest.raises(ConflictError, match="holds another archive"):
        PlainQuery(tmp_path / "a", query.end).batch()


def test_a_copy_that_lags_behind_is_waited_for(tmp_path: Path) -> None:
    history = write_history(folder_at(tmp_path / "a"), size=20)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    add_diff(history, "50")
    query = PlainQuery(tmp_path / "a")
    query.batch()
    assert PlainQuery(tmp_path / "copy", query.end).latest() == query.end


def test_new_columns_end_the_query_and_the_next_run_has_them(tmp_path: Path) -> None:
    history = write_history(folder_at(tmp_path), size=20)
    query = PlainQuery(tmp_path)
    query.batch()
    before = query.end
    add_column(history, "50")
    with pytest.raises(ConflictError, match=r"'public.things'.* '50': start the query again"):
        query.batch()
    [added] = PlainQuery(tmp_path, before).batch()
    assert added["after"]["added"] == 7
    # Earlier diffs do not have the column.
    assert len(PlainQuery(tmp_path).batch()) > 1


def test_spark_continues_where_it_was(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "things"
    history = write_history(folder_at(folder), buckets=2, size=20)
    batches: list[list[tuple[str, str]]] = []

    def take(frame: DataFrame, batch: int) -> None:
        rows = frame.select("_to_position", "_action").collect()
        batches.append(sorted((row["_to_position"], row["_action"]) for row in rows))

    def run() -> None:
        """Take what is published now."""
        changes = spark.readStream.format("streamfold-archive").options(**SINCE_9).load(str(folder))
        writer = changes.writeStream.foreachBatch(take).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        assert query.awaitTermination(400)

    run()
    [first] = batches
    assert {position for position, _ in first} == {"14", "20", "31", "40"}
    add_diff(history, "50")
    prune(history, folder)
    run()
    assert batches[1:] == [[("50", "DELETE")]]
    add_column(history, "60")
    run()
    assert batches[2:] == [[("60", "INSERT")]]

    rows = spark.readStream.format("streamfold-archive").load(str(folder)).writeStream
    with pytest.raises(StreamingQueryException, match="must be true in streaming") as raised:
        rows.format("noop").option(
            "checkpointLocation", str(tmp_path / "c")
        ).start().awaitTermination()
    assert isinstance(error_behind(raised.value), OptionError)
