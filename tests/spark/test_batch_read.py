"""`spark.read.format("streamfold")` returns the appended records as rows."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import s2_sdk
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from streamfold.spark import DataLossError, error_behind
from streamfold.spark.stream.options import COLUMNS
from streamfold.spark.stream.rows import arrow_schema, spark_schema

from .server import KEY, TOKEN, SecuredServer, Server


def read(spark: SparkSession, server: Server, **options: object) -> DataFrame:
    given = {**server.options, **{name: str(value) for name, value in options.items()}}
    return spark.read.format("streamfold").options(**given).load()


def numbers(frame: DataFrame) -> list[int]:
    return sorted(int(bytes(row.body)) for row in frame.select("body").collect())


def test_rows_are_the_records_whatever_their_shape(
    spark: SparkSession, server: Server, fresh: Callable[[], str]
) -> None:
    stream = fresh()
    server.append(
        stream,
        [
            s2_sdk.Record(b""),
            s2_sdk.Record(b"plain"),
            s2_sdk.Record(b"\x00\xff" * 70_000, timestamp=1_700_000_000_123),
            s2_sdk.Record(b"one", [(b"name", b"value")]),
            s2_sdk.Record(b"", [(b"a", b""), (b"\xff", b"\x00"), (b"a", b"again" * 100)]),
        ]
        + [s2_sdk.Record(b"%d" % n, [(b"n", b"%d" % n)] * (n % 3)) for n in range(2500)],
    )
    expected = [
        (stream, r.seq_num, r.timestamp, [tuple(header) for header in r.headers], r.body)
        for r in server.records(stream)
    ]
    frame = read(spark, server, stream=stream, maxRecordsPerPartition=600)
    assert frame.columns == list(COLUMNS)
    assert frame.rdd.getNumPartitions() == 5
    rows = frame.selectExpr("*", "unix_millis(timestamp) AS ms").orderBy("seq_num").collect()
    assert [
        (r.stream, r.seq_num, r.ms, [tuple(map(bytes, h)) for h in r.headers], bytes(r.body))
        for r in rows
    ] == expected

    pruned = read(spark, server, stream=stream, columns="body,seq_num", minPartitions=3)
    assert pruned.columns == ["body", "seq_num"]
    assert {row.seq_num for row in pruned.collect()} == set(range(2505))
    bare = read(spark, server, stream=stream, includeHeaders="false")
    assert bare.columns == ["stream", "seq_num", "timestamp", "body"]


@pytest.mark.parametrize("columns", [COLUMNS, ("body",), ("timestamp", "headers")])
def test_arrow_and_spark_agree_on_the_schema(columns: tuple[str, ...]) -> None:
    expected = to_arrow_schema(spark_schema(columns), timezone="UTC")
    assert arrow_schema(columns).equals(expected)


def test_a_read_starts_and_ends_where_the_request_says(
    spark: SparkSession, server: Server, fresh: Callable[[], str]
) -> None:
    stream, other, empty = fresh(), fresh(), fresh()
    for number in range(20):
        record = s2_sdk.Record(b"%d" % number, timestamp=1_700_000_000_000 + number * 1000)
        server.append(stream, [record])
    server.append_numbers(other, range(100, 110))
    both = f"{stream},{other},{empty}"
    assert numbers(read(spark, server, streams=both)) == [*range(20), *range(100, 110)]
    start, end = {stream: 5, other: -2, empty: 0}, {stream: 8, other: -1, empty: 0}
    some = read(
        spark,
        server,
        streams=both,
        startingOffsets=json.dumps(start),
        endingOffsets=json.dumps(end),
    )
    assert numbers(some) == [5, 6, 7, *range(100, 110)]
    since = read(spark, server, stream=stream, startingTimestamp="2023-11-14T22:13:35.500Z")
    assert numbers(since) == list(range(16, 20))
    server.append_numbers(stream, range(20, 21))
    assert numbers(since) == list(range(16, 20)), "the first query has fixed the end"
    timed = read(
        spark,
        server,
        subscribe=f"{stream},{other}",
        startingOffsetsByTimestamp=json.dumps({stream: 1_700_000_007_000, other: 0}),
        endingTimestamp="2023-11-14T22:13:30Z",
    )
    assert numbers(timed) == [7, 8, 9]
    matching = read(
        spark, server, streamsPattern=f"{stream}|no such stream", startingOffsets="latest"
    )
    assert numbers(matching) == []
    with pytest.raises(PySparkException, match=r"endingOffsets.*tail is 21"):
        read(spark, server, stream=stream, endingOffsets=json.dumps({stream: 22})).count()


def test_records_that_are_gone_are_an_error_unless_that_is_tolerated(
    spark: SparkSession, server: Server, fresh: Callable[[], str]
) -> None:
    stream = fresh()
    server.append_numbers(stream, range(3000))
    server.trim(stream, 2500)
    columns = {"columns": "body,seq_num", "endingOffsets": json.dumps({stream: 3000})}
    lost = {**columns, "startingOffsets": json.dumps({stream: 1200})}
    message = rf"records 1200 to 2499 of stream '{stream}' are gone, .*2500.*failOnDataLoss"
    with pytest.raises(PySparkException, match=message) as raised:
        read(spark, server, stream=stream, **lost).count()
    lost_records = error_behind(raised.value)
    assert isinstance(lost_records, DataLossError)
    assert lost_records.first == 2500
    parted = {"failOnDataLoss": "false", "maxRecordsPerPartition": 700}
    tolerant = read(spark, server, stream=stream, **lost, **parted)
    assert numbers(tolerant) == list(range(2500, 3000))
    assert numbers(read(spark, server, stream=stream, **columns)) == list(range(2500, 3000))


def test_an_endpoint_that_is_down_is_waited_for_and_then_named(
    spark: SparkSession, own_server: Server
) -> None:
    own_server.create("late")
    own_server.append_numbers("late", range(10))
    own_server.kill()
    with pytest.raises(
        PySparkException, match=f"{own_server.url} failed every attempt .* retryTimeout"
    ):
        read(spark, own_server, stream="late", retryTimeout="0.1").count()
    starting = threading.Timer(2, own_server.start)
    starting.start()
    try:
        assert numbers(read(spark, own_server, stream="late")) == list(range(10))
    finally:
        starting.join()


def test_a_query_lives_through_a_restart_and_ends_when_records_to_come_are_trimmed(
    spark: SparkSession, own_server: Server
) -> None:
    own_server.create("long")
    own_server.append_numbers("long", range(3000))
    parted = {"stream": "long", "maxRecordsPerPartition": 1000, "columns": "body"}
    rows = read(spark, own_server, **parted).toLocalIterator()  # a partition at a time
    found = [int(bytes(next(rows).body))]
    own_server.kill()
    own_server.start()
    found += [int(bytes(row.body)) for row in rows]
    assert found == list(range(3000))

    rows = read(spark, own_server, **parted).toLocalIterator()
    next(rows)
    own_server.trim("long", 2500)
    with pytest.raises(Py4JJavaError, match=r"records 1000 to 1999 .* first available is 2500"):
        list(rows)


def test_secrets_are_in_no_plan_no_event_and_no_error(
    spark: SparkSession,
    secured: SecuredServer,
    event_log: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    secured.append_sealed("sealed", range(5))
    secrets = {"encryptionKey": KEY, "caFile": secured.certificate, "stream": "sealed"}
    frame = read(spark, secured, **secrets)
    frame.explain(True)
    assert numbers(frame) == list(range(5))
    texts = [
        capfd.readouterr().out,
        "".join(f.read_text() for f in event_log.rglob("*") if f.is_file()),
    ]
    assert all("streamfold" in text for text in texts), "neither plan nor events were looked at"
    for options in ({"endpoint": "http://127.0.0.1:1"}, {"basin": "no-such-basin"}, {"typo": "1"}):
        with pytest.raises(PySparkException) as raised:
            read(spark, secured, **{**secrets, "retryTimeout": "0", **options}).count()
        texts.append(str(raised.value))
    assert not [text for text in texts if TOKEN in text or KEY in text]
