"""`write` and `writeStream` of `format("streamfold")`: order, routing, and each batch once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import s2_sdk
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from streamfold.spark import error_behind
from streamfold.spark.stream.exactly_once import MARKER

from .server import Server


def data(records: list[s2_sdk.SequencedRecord]) -> list[tuple[bytes, list[tuple[bytes, bytes]]]]:
    """Bodies and headers, without the sink's own."""
    return [(r.body, [tuple(h) for h in r.headers if h[0] != MARKER]) for r in records]


def copy(
    spark: SparkSession, server: Server, source: str, target: str, folder: Path, change: Any = None
) -> None:
    """Run a query that copies what is new from one stream to another."""
    options = {**server.options, "stream": source, "startingOffsets": "earliest"}
    options |= {"maxRecordsPerTrigger": "800", "maxRecordsPerPartition": "300"}
    frame = spark.readStream.format("streamfold").options(**options).load()
    frame = frame.select("body", "headers", "timestamp")
    frame = frame if change is None else change(frame)
    writer = frame.writeStream.format("streamfold").options(**server.options, stream=target)
    query = writer.option("checkpointLocation", str(folder)).trigger(availableNow=True).start()
    assert query.awaitTermination(400)


def test_a_copied_stream_is_equal_although_tasks_fail_and_batches_come_again(
    spark: SparkSession, server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    source, target, folder = fresh(), fresh(), tmp_path / "checkpoint"
    server.append(
        source,
        [s2_sdk.Record(b"%d" % n, [(b"n", b"%d" % n)] * (n % 3), n + 1) for n in range(1500)],
    )
    failed = str(tmp_path / "failed")

    def fail_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if not Path(failed).exists():
                Path(failed).touch()
                raise RuntimeError("this task fails once")
            yield batch

    def failing(frame: DataFrame) -> DataFrame:
        return frame.mapInArrow(fail_once, frame.schema)

    copy(spark, server, source, target, folder, failing)
    assert Path(failed).exists()
    expected = data(server.records(source))
    assert data(server.records(target)) == expected
    stamps = [[r.timestamp for r in server.records(name)] for name in (source, target)]
    assert stamps[0] == stamps[1]

    # As if the driver had died after the batch was appended and before Spark took note of it.
    commits = [file for file in folder.rglob("commits/*1*") if file.name in ("1", ".1.crc")]
    assert commits
    for file in commits:
        file.unlink()
    server.append_numbers(source, range(1500, 1600))
    copy(spark, server, source, target, folder)
    assert data(server.records(target)) == data(server.records(source))


def test_batch_writes_route_order_and_repeat_as_configured(
    spark: SparkSession, server: Server, fresh: Callable[[], str]
) -> None:
    one, two = fresh(), fresh()
    routed = f"IF(id % 2 = 0, '{one}', '{two}') AS stream"
    rows = spark.range(0, 3000, 1, 4).selectExpr(
        routed, "CAST(id AS STRING) AS body", "-id AS rank"
    )

    def write(frame: DataFrame, **options: str) -> None:
        writer = frame.write.format("streamfold").mode("append")
        writer.options(**server.options, **options).save()

    for _ in range(2):
        write(rows, orderBy="rank", txnId="load", txnVersion="1")
    assert server.bodies(one) == [b"%d" % n for n in range(2998, -1, -2)]
    assert server.bodies(two) == [b"%d" % n for n in range(2999, 0, -2)]
    write(rows.drop("rank").limit(5), txnId="load", txnVersion="2")
    assert len(server.records(one)) + len(server.records(two)) == 3005

    three = fresh()
    write(rows.select("body"), stream=three)
    assert sorted(map(int, server.bodies(three))) == list(range(3000))
    for frame, options, words in (
        (rows, {}, "'rank' is not part of a record"),
        (rows.select("stream"), {}, "no column 'body'"),
        (rows.select("body"), {}, "option 'stream' is missing"),
        (rows, {"orderBy": "rank", "txnId": "x", "maxBatchBytes": "10"}, "maxBatchBytes"),
        (rows.select("body"), {"stream": "no such stream"}, "stream_not_found"),
    ):
        with pytest.raises(PySparkException, match=words) as raised:
            write(frame, **options)
        assert error_behind(raised.value) is not None
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        rows.write.format("streamfold").mode("overwrite").options(**server.options).save()
