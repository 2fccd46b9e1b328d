"""The programs in docs/reference/spark.md, run from top to bottom in one session."""

from __future__ import annotations

import asyncio
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from streamfold.archive import ArchiveWriter, Destination, TableSchema
from streamfold.archive.formats import JsonlFormat
from tests.docs.markdown import blocks_of

from .server import BASIN, Server

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "spark.md"
SCHEMA = TableSchema.of(pa.schema([("id", pa.int64()), ("day", pa.date32())]), ["id"])


async def publish_users(folder: Path) -> None:
    """Publish users 5, 6 and 7, and then 8, who is in the diff that ends at 1099."""
    writer = await ArchiveWriter.open(
        "users", SCHEMA, [Destination.open(folder.as_uri())],
        formats=[JsonlFormat()], writer_id="tests",
    )  # fmt: skip
    days = {5: date(2026, 1, 2), 6: date(2026, 1, 2), 7: date(2025, 1, 2)}
    rows = pa.RecordBatch.from_pylist(
        [{"id": user, "day": day} for user, day in days.items()], schema=SCHEMA.arrow
    )
    await writer.write_base([rows], "1041", reason="first")
    insert = {"action": "INSERT", "key": {"id": 8}, "before": None, "after": {"id": 8, "day": None}}
    changes = pa.RecordBatch.from_pylist([insert], schema=SCHEMA.changes)
    await writer.write_diff([changes], "1041", "1099")


def test_the_programs_of_the_page_read_and_append_what_they_say(
    spark: SparkSession, server: Server, tmp_path: Path
) -> None:
    server.create("orders", "copies")
    server.append_numbers("orders", range(3))
    asyncio.run(publish_users(tmp_path / "users"))
    written = {
        "http://localhost:8080": server.url,
        "my-basin": BASIN,
        "s3://bucket/prefix": server.stored["store"],
        "/var/lib/copies": str(tmp_path / "checkpoint"),
        "/var/lib/users": str(tmp_path / "feed checkpoint"),
        "s3://bucket/users": str(tmp_path / "users"),
        "10 seconds": "0 seconds",
    }
    names: dict[str, Any] = {}
    for block in blocks_of(PAGE):
        assert block.language == "python", f"{PAGE.name}:{block.line}"
        text = block.text
        for address, used in written.items():
            text = text.replace(address, used)
        exec(compile(text, f"{PAGE.name}:{block.line}", "exec"), names)
        if "table = " in text:
            assert [bytes(row.body) for row in names["table"].collect()] == [b"0", b"1", b"2"]
    for query in (names["query"], names["following"]):
        query.processAllAvailable()
        query.stop()
    assert sum(batch["numInputRows"] for batch in names["following"].recentProgress) == 1
    assert sorted(server.bodies("copies")) == [b"0", b"0", b"1", b"1", b"2", b"2"]
    assert names["hour"].count() == 0  # the orders are newer
    assert sorted(row.id for row in names["users"].collect()) == [5, 6, 7, 8]
    assert [row.id for row in names["some"].collect()] == [5]
    assert [(row._action, row.id) for row in names["changes"].collect()] == [("INSERT", 8)]
