"""Values that do not fit a column stop the table, and every suggested remedy works."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import streamfold.archive
from streamfold.cli.archives.json_output import archive_text
from streamfold.snapshotter.decoding import DEAD_LETTER, EnvelopeDecoder
from streamfold.snapshotter.status.table_status import State
from tests.spark.server import Server
from tests.spark.snapshotter.feeding import envelope, feed
from tests.spark.snapshotter.live import running
from tests.spark.snapshotter.tables import check_every_boundary, state_of, table_job


def row(key: int) -> bytes:
    return envelope("c", after={"id": key, "name": f"n{key}", "price": 1.5})


def unfit(key: int) -> bytes:
    return envelope("u", {"id": key}, {"id": key, "name": "unfit", "price": "dear"})


def letters_of(folder: Path) -> list[tuple[int, str]]:
    files = sorted((folder / "dead-letters").glob("*.jsonl"))
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [(letter["seq_num"], letter["reason"]) for letter in found]


def test_a_table_that_stopped_continues_where_it_is_emptied(
    spark: SparkSession,
    server: Server,
    fresh: Callable[[], str],
    tmp_path: Path,
) -> None:
    stream, folder = fresh(), tmp_path / "table"
    # Several batches are between the record that does not fit and the one that empties the table.
    job = table_job(server, stream, folder, max_records=3)
    bodies = [row(1), row(2), unfit(1), *(row(key) for key in range(10, 20))]
    feed(server, stream, bodies)
    with running(spark, tmp_path / "scratch", job) as live:
        error = live.wait_for_state(job.table, State.STOPPED).last_error
        assert error is not None
        assert error.code == "schema_incompatible"
        for part in (
            "record 2",
            '{"id":1}',
            "price",
            "'dear'",
            "--recopy",
            "[2]",
            "dead_letter",
        ):
            assert part in error.message
    again = [envelope("t"), row(3), unfit(3), envelope("t"), row(4)]
    feed(server, stream, again)
    with running(spark, tmp_path / "scratch", job) as live:
        live.wait_for_head(job.table, len(bodies) + len(again) - 1)
    assert list(state_of(folder)) == [4]
    check_every_boundary(folder, [*bodies, *again])
    assert letters_of(folder) == []


def test_a_table_continues_without_the_record_that_is_named_or_without_all_that_do_not_fit(
    spark: SparkSession,
    server: Server,
    fresh: Callable[[], str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream, folder = fresh(), tmp_path / "table"
    feed(server, stream, [row(1), unfit(1), row(2)])
    job = table_job(server, stream, folder, skipped=(1,))
    with running(spark, tmp_path / "scratch", job) as live:
        live.wait_for_head(job.table, 2)
        feed(server, stream, [unfit(2), row(3)])
        stopped = live.wait_for_state(job.table, State.STOPPED)
        assert stopped.last_error is not None
        assert "record 3" in stopped.last_error.message
    assert letters_of(folder) == [(1, "dead_letters.records names it")]
    lenient = table_job(server, stream, folder, decoder=EnvelopeDecoder(("id",), DEAD_LETTER))
    with caplog.at_level(logging.WARNING), running(spark, tmp_path / "scratch", lenient) as live:
        live.wait_for_head(job.table, 4)
        feed(server, stream, [b"<xml/>", b"{}"])
        live.wait_for_head(job.table, 6)
        _, answer = live.ask("GET", "/status")
    shown, location = answer["tables"][job.table], f"{folder.as_uri()}/dead-letters/"
    assert (shown["counts"]["dead_letters"], shown["dead_letters"]["total"]) == (3, 4)
    assert (shown["dead_letters"]["seq_num"], shown["dead_letters"]["location"]) == (5, location)
    assert "JSON is malformed" in shown["dead_letters"]["reason"]
    _, first, second = (text for text in caplog.messages if "became dead letters" in text)
    assert first.startswith(
        f"table {job.table}: 1 of 2 records became dead letters, in {location}; the first is record "
        "3: price"
    )
    assert "2 of 2 records" in second
    archive = asyncio.run(streamfold.archive.open(folder))
    assert "letters  4 records could not be decoded" in archive_text(archive, archive.plan())
    assert [seq_num for seq_num, _ in letters_of(folder)] == [1, 3, 5, 6]
    assert state_of(folder)[2]["name"] == "n2"
