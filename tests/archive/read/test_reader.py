from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

import streamfold.archive
from streamfold.archive import (
    ArchiveWriter,
    ChainGapError,
    ManifestNotFoundError,
    PositionInvalidError,
    PositionPrunedError,
    TableSchema,
)
from streamfold.archive.formats import FORMATS, JsonlFormat, format_of
from streamfold.archive.manifest.positions import LSN
from streamfold.errors import InvalidError
from tests.archive.reading import (
    HISTORY,
    Consumer,
    folder_at,
    names_by_id,
    reopened,
    state_at,
    write_history,
)
from tests.archive.tables import SCHEMA, START, changes, open_writer, rows


@pytest.mark.parametrize("position", HISTORY)
async def test_the_table_is_exact_at_the_end_of_every_artifact(
    tmp_path: Path, position: str
) -> None:
    await write_history(tmp_path)
    archive = await reopened(tmp_path)
    assert await state_at(archive, position) == HISTORY[position]


async def test_without_a_position_the_table_is_the_one_at_the_head(tmp_path: Path) -> None:
    await write_history(tmp_path)
    archive = await reopened(tmp_path)
    assert archive.head == "31"
    assert await state_at(archive) == HISTORY["31"]


async def test_between_two_ends_the_earlier_state_is_given_and_said(tmp_path: Path) -> None:
    await write_history(tmp_path)
    archive = await reopened(tmp_path)
    assert archive.plan(position="19").position == "14"
    assert await state_at(archive, "19") == HISTORY["14"]


@pytest.mark.parametrize(
    ("minutes", "position"), [(0, "9"), (1, "14"), (1.5, "14"), (3, "25"), (60, "31")]
)
async def test_at_a_time_the_table_is_what_was_published_by_then(
    tmp_path: Path, minutes: float, position: str
) -> None:
    await write_history(tmp_path)
    archive = await reopened(tmp_path)
    table = await archive.table(time=START + timedelta(minutes=minutes))
    assert names_by_id(table) == HISTORY[position]


async def test_a_plan_prints_what_is_going_to_be_read(tmp_path: Path) -> None:
    await write_history(tmp_path)
    archive = await reopened(tmp_path)
    first, base, *diffs = str(archive.plan(position="20")).splitlines()
    assert first == "table public.users at 20 of 31"
    assert base.startswith("  epoch 1  base  9  2 rows  jsonl ")
    assert [line.split("  ")[3] for line in diffs] == ["(9, 14]", "(14, 20]"]
    assert "after 14 to 31" in str(archive.plan_changes("14"))


async def test_an_archive_is_what_it_was_until_it_is_refreshed(tmp_path: Path) -> None:
    writer = await write_history(tmp_path)
    archive = await reopened(tmp_path)
    await writer.write_diff(changes(("INSERT", 9, "i")), "31", "40")
    assert await state_at(archive) == HISTORY["31"]
    await archive.refresh()
    assert await state_at(archive) == HISTORY["31"] | {9: "i"}


async def test_the_manifest_may_be_named_instead_of_its_folder(tmp_path: Path) -> None:
    await write_history(tmp_path)
    archive = await streamfold.archive.open(f"{tmp_path.as_uri()}/manifest.json")
    assert archive.uri == tmp_path.as_uri() + "/"
    assert await state_at(archive) == HISTORY["31"]


async def test_a_folder_without_an_archive_is_not_found_and_not_created(tmp_path: Path) -> None:
    with pytest.raises(ManifestNotFoundError, match=r"no manifest\.json"):
        await streamfold.archive.open(tmp_path)
    with pytest.raises(ManifestNotFoundError, match="does not exist"):
        await streamfold.archive.open(tmp_path / "other")
    with pytest.raises(ManifestNotFoundError, match="does not exist"):  # the first try made none
        await streamfold.archive.open(tmp_path / "other")


async def test_positions_out_of_reach_are_distinguished(tmp_path: Path) -> None:
    await write_history(tmp_path)
    archive = await reopened(tmp_path)
    with pytest.raises(PositionPrunedError, match="goes back to '9'"):
        await archive.table(position="8")
    with pytest.raises(PositionPrunedError, match="ask for a later time"):
        await archive.table(time=START - timedelta(seconds=1))
    with pytest.raises(PositionInvalidError, match="after the head '31'"):
        await archive.table(position="32")
    with pytest.raises(PositionInvalidError, match="not a sequence number"):
        await archive.table(position="0/8")
    with pytest.raises(InvalidError, match="one of them"):
        await archive.table(position="9", time=START)
    with pytest.raises(InvalidError, match="has no zone"):
        await archive.table(time=START.replace(tzinfo=None))


async def test_pandas_polars_duckdb_and_batches_get_the_same_rows(tmp_path: Path) -> None:
    await write_history(tmp_path)
    archive = await reopened(tmp_path)
    expected = HISTORY["20"]
    frame = await archive.pandas(position="20")
    assert dict(zip(frame["id"], frame["name"], strict=True)) == expected
    polars = await archive.polars(position="20")
    assert dict(polars.iter_rows()) == expected
    with duckdb.connect() as connection:
        relation = await archive.duckdb(connection, position="20")
        assert dict(relation.filter("id > 1").fetchall()) == {3: "c"}
    assert dict((await archive.duckdb(position="20")).fetchall()) == expected
    batches = [batch async for batch in archive.batches(position="20")]
    assert names_by_id(pa.Table.from_batches(batches)) == expected


async def test_large_integers_with_nulls_stay_exact_in_pandas(tmp_path: Path) -> None:
    schema = TableSchema.of(pa.schema([("id", pa.int64()), ("n", pa.int64())]), ["id"])
    writer = await open_writer(folder_at(tmp_path), schema=schema)
    given = [{"id": 1, "n": 2**53 + 1}, {"id": 2, "n": None}]
    batch = pa.RecordBatch.from_pylist(given, schema=schema.arrow)
    await writer.write_base([batch], "1", reason="first")
    frame = await (await reopened(tmp_path)).pandas()
    assert frame["n"][0] == 2**53 + 1


async def test_columns_come_in_the_order_asked_for(tmp_path: Path) -> None:
    await write_history(tmp_path)
    archive = await reopened(tmp_path)
    names = await archive.table(columns=["name"])
    assert names.column_names == ["name"]
    assert sorted(names["name"].to_pylist()) == ["A", "D", "c"]
    assert (await archive.table(columns=["name", "id"])).column_names == ["name", "id"]
    with pytest.raises(InvalidError, match="name some of"):
        await archive.table(columns=["no such column"])


@pytest.mark.parametrize("format_id", FORMATS.ids())
async def test_every_format_gives_the_same_table(tmp_path: Path, format_id: str) -> None:
    formats = [format_of(name) for name in FORMATS.ids()]
    writer = await open_writer(folder_at(tmp_path), formats=formats)
    await writer.write_base(rows({1: "a", 2: "b"}), "1", reason="first")
    await writer.write_diff(changes(("DELETE", 1, None), ("INSERT", 3, "c")), "1", "2")
    archive = await streamfold.archive.open(tmp_path, formats=[format_id])
    assert await state_at(archive) == {2: "b", 3: "c"}
    seen = Consumer({1: "a", 2: "b"})
    async for item in archive.changes("1"):
        seen.take(item)
    assert seen.state == {2: "b", 3: "c"}


async def test_a_missing_format_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    await write_history(tmp_path)
    archive = await streamfold.archive.open(tmp_path, formats=["parquet"])
    with pytest.raises(streamfold.errors.FormatUnsupportedError, match="jsonl"):
        await archive.table()
    with pytest.raises(InvalidError, match="not known"):
        await streamfold.archive.open(tmp_path, formats=["xml"])


async def test_an_empty_table_has_its_columns(tmp_path: Path) -> None:
    writer = await open_writer(folder_at(tmp_path))
    await writer.write_base(rows({}), "-1", reason="first")
    archive = await reopened(tmp_path)
    table = await archive.table()
    assert (len(table), table.column_names) == (0, ["id", "name"])
    assert (await archive.pandas()).empty
    assert sum([len(batch) async for batch in archive.batches()]) == 0
    await writer.write_diff(changes(("INSERT", 1, "a")), "-1", "0")
    await archive.refresh()
    assert await state_at(archive) == {1: "a"}


async def test_a_truncate_takes_out_what_was_before_and_nothing_after(tmp_path: Path) -> None:
    writer = await open_writer(folder_at(tmp_path))
    await writer.write_base(rows({1: "a", 2: "b"}), "1", reason="first")
    await writer.write_diff(changes(("INSERT", 3, "c")), "1", "2")
    await writer.write_diff(changes(("TRUNCATE", None, None), ("INSERT", 2, "B")), "2", "3")
    await writer.write_diff(changes(("INSERT", 4, "d")), "3", "4")
    archive = await reopened(tmp_path)
    assert await state_at(archive, "2") == {1: "a", 2: "b", 3: "c"}
    assert await state_at(archive, "3") == {2: "B"}
    assert await state_at(archive) == {2: "B", 4: "d"}


async def test_changes_lead_across_a_rebase(tmp_path: Path) -> None:
    await write_history(tmp_path)
    archive = await reopened(tmp_path)
    for since, state in HISTORY.items():
        seen = Consumer(state)
        found = [item async for item in archive.changes(since)]
        for item in found:
            seen.take(item)
        assert seen.state == HISTORY["31"]
        assert [item.from_position for item in found] == [
            p for p in HISTORY if int(p) >= int(since)
        ][:-1]
        assert all(item.last for item in found)


async def test_changes_may_end_before_the_head(tmp_path: Path) -> None:
    await write_history(tmp_path)
    archive = await reopened(tmp_path)
    found = [item.to_position async for item in archive.changes("9", until="20")]
    assert found == ["14", "20"]
    assert [item async for item in archive.changes("31")] == []


async def test_an_empty_diff_still_says_how_far_it_goes(tmp_path: Path) -> None:
    writer = await write_history(tmp_path)
    await writer.write_diff(changes(), "31", "50")
    archive = await reopened(tmp_path)
    [item] = [item async for item in archive.changes("31")]
    assert (item.to_position, len(item.batch), item.last) == ("50", 0, True)
    assert item.batch.schema.names == ["action", "key", "before", "after"]


async def test_changes_before_the_archive_and_over_a_gap_are_different_errors(
    tmp_path: Path,
) -> None:
    writer = await write_history(tmp_path)
    await writer.write_base(rows({7: "g"}), "60", reason="gap")
    archive = await reopened(tmp_path)
    with pytest.raises(ChainGapError, match="'31'"):
        [item async for item in archive.changes("9")]
    with pytest.raises(ChainGapError, match="begin and end where artifacts do"):
        [item async for item in archive.changes("10", until="20")]
    with pytest.raises(PositionPrunedError):
        [item async for item in archive.changes("3")]
    with pytest.raises(PositionInvalidError, match="after the head"):
        [item async for item in archive.changes("61")]
    assert await state_at(archive) == {7: "g"}


async def test_positions_of_changes_compare_as_their_order_says(tmp_path: Path) -> None:
    writer = await ArchiveWriter.open(
        "users", SCHEMA, [folder_at(tmp_path)],
        formats=[JsonlFormat()], writer_id="w", order=LSN,
    )  # fmt: skip
    await writer.write_base(rows({1: "a"}), "0/A", reason="first")
    await writer.write_diff(changes(("INSERT", 2, "b")), "0/A", "0/B")
    await writer.write_diff(changes(("INSERT", 3, "c")), "0/B", "0/C")
    archive = await reopened(tmp_path)
    for since, until in (("0/A", "0/B"), ("0/a", "0/b"), ("0/0A", "00/0000000b")):
        [diff] = archive.plan_changes(since, until=until).diffs
        assert diff.to_position == "0/B"
