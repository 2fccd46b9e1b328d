"""Reading from storage past the server gives the server's rows, positions and errors."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
import s2_sdk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from streamfold.errors import DecryptionFailedError, KeyRequiredError, NotFoundError
from streamfold.spark import DataLossError, OptionError
from streamfold.spark.stream.client import ServerConnection, StreamCalls
from streamfold.spark.stream.options import COLUMNS, parse_source
from streamfold.spark.stream.range_reads import Range, Wanted, read_range
from streamfold.spark.stream.rows import arrow_schema, record_batch
from streamfold.spark.stream.source import StreamReader
from streamfold.spark.stream.stored import StoredBasin, open_basin, read_stored
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import open_admin

from .server import BASIN, KEY, SecuredServer, Server

_names = (f"stored {number}" for number in itertools.count())
BYTES = st.binary(max_size=40)
RECORDS = st.lists(
    st.builds(
        s2_sdk.Record,
        BYTES,
        st.lists(st.tuples(st.binary(min_size=1, max_size=8), BYTES), max_size=2),
        timestamp=st.none() | st.integers(0, 2**40),
    ),
    min_size=1,
    max_size=30,
)


def stored(server: Server, key: str = "") -> StoredBasin:
    return StoredBasin(server.stored["store"], BASIN, key)


def rows(found: Any, stream: str) -> pa.Table:
    schema = arrow_schema(COLUMNS)
    batches = [record_batch(stream, columns, schema) for columns in found]
    return pa.Table.from_batches(batches, schema).combine_chunks()


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(RECORDS, min_size=1, max_size=3), st.integers(0, 40), st.data())
def test_both_ways_give_equal_rows_and_positions(
    server: Server, batches: list[list[s2_sdk.Record]], trim: int, data: st.DataObject
) -> None:
    stream, count = next(_names), sum(map(len, batches))
    server.create(stream)
    for batch in batches:
        server.append(stream, batch)
    server.trim(stream, min(trim, count))
    start = data.draw(st.integers(0, count))
    part = Range(stream, start, data.draw(st.integers(start, count + 1)))
    since = data.draw(st.integers(0, 2**40))
    endpoint, tolerant = (
        parse_source({**server.options, "stream": stream}).endpoint,
        Wanted(fail_on_data_loss=False),
    )
    with ServerConnection(endpoint) as connection, open_basin(stored(server)) as basin:
        served = StreamCalls(connection)
        assert basin.tail(stream) == served.tail(stream)
        assert basin.first(stream, start) == served.first(stream, start)
        assert basin.first_since(stream, since) == served.first_since(stream, since)
        assert basin.names(stream) == served.names(stream)
    found = rows(read_stored(stored(server), part, tolerant), stream)
    assert found.equals(rows(read_range(endpoint, part, tolerant), stream))


def test_missing_records_and_streams_are_reported_as_by_the_server(
    server: Server, fresh: Callable[[], str]
) -> None:
    stream, gone = fresh(), fresh()
    server.append_numbers(stream, range(2000))
    server.trim(stream, 1500)
    with pytest.raises(DataLossError, match=r"records 100 to 1499 .* is 1500"):
        list(read_stored(stored(server), Range(stream, 100, 1800), Wanted()))
    with pytest.raises(DataLossError, match="records 0 to 4 "):
        list(read_stored(stored(server), Range(gone, 0, 5), Wanted()))
    with open_basin(stored(server)) as basin, pytest.raises(NotFoundError, match="no such stream"):
        basin.tail("no such stream")
    with (
        pytest.raises(NotFoundError, match="there is no store"),
        open_basin(StoredBasin("file:///nowhere/at/all", BASIN)),
    ):
        pass


def test_an_encrypted_stream_needs_its_key(secured: SecuredServer) -> None:
    secured.append_sealed("past the server", range(300))
    part = Range("past the server", 0, 300)
    found = rows(read_stored(stored(secured, KEY), part, Wanted()), part.stream)
    assert found["body"].to_pylist() == [b"%d" % number for number in range(300)]
    with pytest.raises(KeyRequiredError):
        list(read_stored(stored(secured), part, Wanted()))
    with pytest.raises(DecryptionFailedError):
        list(read_stored(stored(secured, KEY.replace("aG", "bG")), part, Wanted()))


def test_records_in_chunk_files_are_read_past_the_server(
    server: Server, fresh: Callable[[], str]
) -> None:
    stream = fresh()
    bodies = [random.Random(number).randbytes(300 << 10) for number in range(3)]
    server.append(stream, [s2_sdk.Record(body=body) for body in bodies])
    folder = Path(urlsplit(server.stored["store"]).path)
    assert any((folder / "chunks").glob("*/*/*-*"))
    found = rows(read_stored(stored(server), Range(stream, 0, 3), Wanted()), stream)
    assert found["body"].to_pylist() == bodies


def test_files_are_pinned_by_a_checkpoint_while_a_store_is_open(server: Server) -> None:
    location = open_location(server.stored["store"])

    def checkpoints() -> set[str]:
        manifest = asyncio.run(open_admin(location).read_manifest())
        assert manifest is not None
        return {checkpoint.id for checkpoint in manifest.checkpoints}

    before = checkpoints()
    with open_basin(stored(server)):
        assert len(checkpoints() - before) == 1
    assert checkpoints() <= before


def test_options_of_a_server_and_a_store_are_not_combined() -> None:
    given_options = {"store": "file:///somewhere", "basin": BASIN, "stream": "s"}
    with pytest.raises(OptionError, match="cannot be combined with store"):
        parse_source({**given_options, "endpoint": "http://localhost"})
    with pytest.raises(OptionError, match="it must be file:///folder or s3://bucket/prefix"):
        parse_source({**given_options, "store": "memory:"})
    with pytest.raises(OptionError, match="32 bytes in base64"):
        parse_source({**given_options, "encryptionKey": "short"})


def test_a_streaming_query_gets_what_was_appended_since_its_last_batch(
    server: Server, fresh: Callable[[], str]
) -> None:
    stream = fresh()
    server.append_numbers(stream, range(100))
    given_options = {**server.stored, "stream": stream, "startingOffsets": "earliest"}
    reader = StreamReader(parse_source(given_options))
    start = reader.initialOffset()
    middle = reader.latestOffset(start, ReadMaxRows(60))
    server.append_numbers(stream, range(100, 150))
    end = reader.latestOffset(middle, ReadAllAvailable())
    assert (start, middle, end) == ({stream: 0}, {stream: 60}, {stream: 150})
    bodies = [
        int(body)
        for part in reader.partitions(middle, end)
        for batch in reader.read(part)
        for body in batch["body"].to_pylist()
    ]
    assert bodies == list(range(60, 150))


def test_spark_reads_a_store_in_partitions(
    spark: SparkSession, server: Server, fresh: Callable[[], str]
) -> None:
    stream = fresh()
    server.append_numbers(stream, range(3000))
    options = {**server.stored, "stream": stream, "minPartitions": "3"}
    found = spark.read.format("streamfold").options(**options).load()
    assert found.rdd.getNumPartitions() == 3
    assert {int(row.body) for row in found.collect()} == set(range(3000))
