"""`spark.readStream.format("streamfold")`: every record once, over restarts and new streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from streamfold.spark import DataLossError, error_behind

from .server import Server


class Seen:
    """Batches as they come, as pairs of stream and number."""

    def __init__(self, where: str = "true") -> None:
        self._where = where
        self.batches: list[list[tuple[str, int]]] = []

    def take(self, frame: DataFrame, batch: int) -> None:
        rows = (
            frame.where(self._where)
            .select("stream", "seq_num", "body")
            .orderBy("stream", "seq_num")
            .collect()
        )
        self.batches.append([(row.stream, int(bytes(row.body))) for row in rows])

    @property
    def rows(self) -> list[tuple[str, int]]:
        return sorted(row for batch in self.batches for row in batch)


def start(
    spark: SparkSession,
    server: Server,
    seen: Seen,
    folder: Path,
    trigger: dict[str, Any],
    **options: Any,
) -> StreamingQuery:
    given = {**server.options, **{name: str(value) for name, value in options.items()}}
    stream = spark.readStream.format("streamfold").options(**given).load()
    writer = stream.writeStream.foreachBatch(seen.take).option("checkpointLocation", str(folder))
    return writer.trigger(**trigger).start()


def run(spark: SparkSession, server: Server, folder: Path, **options: Any) -> Seen:
    """What a query finds that takes all there is now and ends."""
    seen = Seen()
    query = start(spark, server, seen, folder, {"availableNow": True}, **options)
    assert query.awaitTermination(400)
    return seen


def test_each_run_continues_where_the_last_one_ended_and_finds_new_streams(
    spark: SparkSession, server: Server, tmp_path: Path
) -> None:
    server.create("orders/a", "orders/b", "other")
    server.append_numbers("orders/a", range(900))
    server.append_numbers("orders/b", range(100))
    server.append_numbers("other", range(5))
    options = {
        "subscribePattern": "orders/.*",
        "startingTimestamp": 0,
        "maxOffsetsPerTrigger": 400,
        "minOffsetsPerTrigger": 300,
        "maxRecordsPerPartition": 150,
    }
    first = run(spark, server, tmp_path, **options)
    assert first.rows == [
        *(("orders/a", n) for n in range(900)),
        *(("orders/b", n) for n in range(100)),
    ]
    assert [len(batch) for batch in first.batches] == [400, 400, 200]
    offsets = sorted(tmp_path.glob("offsets/[0-9]*"), key=lambda file: int(file.name))
    assert json.loads(offsets[-1].read_text().splitlines()[-1]) == {
        "orders/a": 900,
        "orders/b": 100,
    }

    server.append_numbers("orders/a", range(900, 910))
    server.create("orders/late")
    server.append_numbers("orders/late", range(7))
    second = run(spark, server, tmp_path, **options)
    assert second.rows == [
        *(("orders/a", n) for n in range(900, 910)),
        *(("orders/late", n) for n in range(7)),
    ]
    assert run(spark, server, tmp_path, **options).rows == []

    about = run(
        spark, server, tmp_path / "bytes", stream="orders/a", startingOffsets="earliest",
        maxBytesPerTrigger=6_000,
    )  # fmt: skip
    assert [number for _, number in about.rows] == list(range(910))
    assert 2 <= len(about.batches) <= 6


def test_a_query_outlives_its_server_and_ends_with_an_error_when_records_are_gone(
    spark: SparkSession, own_server: Server, tmp_path: Path
) -> None:
    own_server.create("live")
    own_server.append_numbers("live", range(10))
    seen, folder = Seen(), tmp_path / "checkpoint"
    query = start(
        spark, own_server, seen, folder, {"processingTime": "0 seconds"},
        stream="live", startingOffsets="earliest",
    )  # fmt: skip
    try:
        query.processAllAvailable()
        own_server.kill()
        own_server.start()
        own_server.append_numbers("live", range(10, 20))
        query.processAllAvailable()
    finally:
        query.stop()
    assert [number for _, number in seen.rows] == list(range(20))

    own_server.append_numbers("live", range(20, 30))
    own_server.trim("live", 25)
    with pytest.raises(
        StreamingQueryException, match=r"records 20 to 24 .*is 25.*failOnDataLoss"
    ) as lost:
        run(spark, own_server, folder, stream="live", columns="stream,seq_num,body")
    error = error_behind(lost.value)
    assert isinstance(error, DataLossError)
    assert error.first == 25
    tolerant = Seen("size(headers) = 0")  # the trim itself is a record, too
    query = start(
        spark,
        own_server,
        tolerant,
        folder,
        {"availableNow": True},
        stream="live",
        failOnDataLoss="false",
    )
    assert query.awaitTermination(400)
    assert [number for _, number in tolerant.rows] == list(range(25, 30))
