"""Delta Lake's own package for Spark, as published, reads the log over an archive's files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamfold.archive import Collector, Retention, TableSchema
from streamfold.archive.engines.delta_log import publish_delta_log
from streamfold.archive.formats import ParquetFormat
from tests.archive.reading import folder_at
from tests.archive.tables import net_changes, new_ids, open_writer, rows

Query = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def query(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Query]:
    """A Spark in a process of its own: the package must be there when it starts."""
    log = tmp_path_factory.mktemp("spark") / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.interop.delta_queries"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    assert process.stdin
    assert process.stdout
    source, sink = process.stdin, process.stdout

    def ask(sql: str) -> dict[str, Any]:
        source.write(f"{sql}\n")
        source.flush()
        for line in sink:
            if line.startswith("{"):  # Spark prints how it finds packages
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise AssertionError(log.read_text())

    try:
        yield ask
    finally:
        source.close()
        process.wait(120)
        sink.close()


def names(found: dict[str, Any]) -> dict[int, str]:
    assert "rows" in found, found
    return {row["id"]: row["name"] for row in found["rows"]}


async def test_spark_reads_every_version_until_it_is_collected(
    tmp_path: Path, query: Query
) -> None:
    destination = folder_at(tmp_path)
    writer = await open_writer(destination, formats=[ParquetFormat()])
    states = [{1: "a", 2: "b"}]
    await writer.write_base({0: rows({1: "a"}), 1: rows({2: "b"})}, "1", reason="first")
    await publish_delta_log(destination)
    for number in range(2, 13):  # more versions than a checkpoint covers
        states.append({1: f"a{number}", 2: "b"})
        changes = net_changes(states[-2], states[-1])
        changed = {0: rows({1: f"a{number}"})}
        await writer.rebase(changed, changes, str(number), reason="forced", reuse=[1])
        await publish_delta_log(destination)
    table = f"delta.`{tmp_path}`"
    assert names(query(f"SELECT * FROM {table}")) == states[-1]
    for version in (0, 1, 10, 11):
        assert names(query(f"SELECT * FROM {table} VERSION AS OF {version}")) == states[version]

    later = datetime.now(UTC) + timedelta(seconds=2)
    collector = Collector([destination], now=lambda: later, new_id=new_ids("gc"))
    await collector.collect(Retention(keep_epochs=2, grace=timedelta(0)))
    assert names(query(f"SELECT * FROM {table}")) == states[-1]
    assert names(query(f"SELECT * FROM {table} VERSION AS OF 10")) == states[10]
    assert "error" in query(f"SELECT * FROM {table} VERSION AS OF 9")


async def test_spark_reads_every_type_that_the_log_shows(tmp_path: Path, query: Query) -> None:
    kinds = {
        "id": pa.int64(), "tiny": pa.int8(), "small": pa.int16(), "medium": pa.int32(),
        "single": pa.float32(), "double": pa.float64(), "flag": pa.bool_(),
        "price": pa.decimal128(12, 3), "day": pa.date32(), "bytes": pa.binary(),
        "local": pa.timestamp("us"), "instant": pa.timestamp("us", "UTC"),
        "tags": pa.list_(pa.string()), "inner": pa.struct([("a", pa.int32())]), "none": pa.string(),
    }  # fmt: skip
    schema = TableSchema.of(pa.schema(list(kinds.items())), ["id"])
    row = {
        "id": 1 << 60, "tiny": -128, "small": 32767, "medium": -(1 << 31),
        "single": 0.5, "double": 0.1, "flag": True,
        "price": Decimal("123456789.125"), "day": date(1969, 12, 31), "bytes": b"\x00\xff",
        "local": datetime(2024, 2, 29, 1, 2, 3, 4),
        "instant": datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=UTC),
        "tags": ["x", "y z"], "inner": {"a": 7}, "none": None,
    }  # fmt: skip
    writer = await open_writer(folder_at(tmp_path), schema=schema, formats=[ParquetFormat()])
    batch = pa.RecordBatch.from_pylist([row], schema=writer.schema.arrow)
    await writer.write_base([batch], "1", reason="first")
    await publish_delta_log(folder_at(tmp_path))
    texts = ", ".join(f"CAST({name} AS STRING)" for name in ("price", "local", "instant"))
    (found,) = query(f"SELECT * FROM delta.`{tmp_path}`")["rows"]
    assert {
        name: found[name] for name in ("id", "tiny", "small", "medium", "single", "double")
    } == {name: row[name] for name in ("id", "tiny", "small", "medium", "single", "double")}
    assert (found["flag"], found["day"], found["bytes"]) == (True, "1969-12-31", "AP8=")
    assert (found["tags"], found["inner"], found.get("none")) == (["x", "y z"], {"a": 7}, None)
    (exact,) = query(f"SELECT concat_ws('|', {texts}) AS t FROM delta.`{tmp_path}`")["rows"]
    moment = "2024-02-29 01:02:03.000004"
    assert exact == {"t": f"123456789.125|{moment}|{moment}"}
