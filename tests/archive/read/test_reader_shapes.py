"""Tables that are not the simple case: several key fields, new columns, parts by bucket."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamfold.archive import ArchiveWriter, TableSchema, write_part
from streamfold.archive.destinations.mirrors import Mirrors
from streamfold.archive.formats import format_of
from streamfold.archive.formats.format import FORMATS
from streamfold.archive.manifest.positions import SEQ_NUM
from tests.archive.reading import Consumer, folder_at, reopened, state_at
from tests.archive.tables import Change, changes, open_writer, rows

SCHEMA = TableSchema.of(
    pa.schema([("region", pa.string()), ("day", pa.date32()), ("n", pa.int32())]),
    ["region", "day"],
)


def change(schema: TableSchema, action: str, row: dict[str, Any]) -> dict[str, Any]:
    key = {name: row[name] for name in schema.key_fields}
    return {"action": action, "key": key, "after": None if action == "DELETE" else row}


def changes_of(schema: TableSchema, *given: dict[str, Any]) -> list[pa.RecordBatch]:
    return [pa.RecordBatch.from_pylist(list(given), schema=schema.changes)]


def rows_of(schema: TableSchema, *given: dict[str, Any]) -> list[pa.RecordBatch]:
    return [pa.RecordBatch.from_pylist(list(given), schema=schema.arrow)]


async def test_a_changed_key_leaves_no_old_row(tmp_path: Path) -> None:
    writer = await open_writer(folder_at(tmp_path))
    await writer.write_base(rows({1: "a", 2: "b"}), "1", reason="first")
    await writer.write_diff(changes(("DELETE", 1, None), ("INSERT", 10, "a")), "1", "2")
    assert await state_at(await reopened(tmp_path)) == {2: "b", 10: "a"}


@pytest.mark.parametrize("format_id", ["parquet", "jsonl"])
async def test_rows_of_several_key_fields_are_distinguished_by_all_of_them(
    tmp_path: Path, format_id: str
) -> None:
    formats = [format_of(format_id)]
    writer = await open_writer(folder_at(tmp_path), schema=SCHEMA, formats=formats)
    chance = random.Random(11)
    state: dict[tuple[str, int], int] = {
        (region, day): 0 for region in ("a", "a b", "b") for day in range(20)
    }

    def row(region: str, day: int, n: int) -> dict[str, Any]:
        return {"region": region, "day": day, "n": n}

    await writer.write_base(
        rows_of(SCHEMA, *(row(*k, n) for k, n in state.items())), "0", reason="first"
    )
    for position in range(12):
        touched = chance.sample(sorted(state), 5)
        given = []
        for key in sorted(touched):
            if chance.random() < 0.4:
                del state[key]
                given.append(change(SCHEMA, "DELETE", row(*key, 0)))
            else:
                state[key] = position
                given.append(change(SCHEMA, "UPDATE", row(*key, position)))
        new = (chance.choice("abc"), 100 + position)
        state[new] = -1
        given.append(change(SCHEMA, "INSERT", row(*new, -1)))
        await writer.write_diff(changes_of(SCHEMA, *given), str(position), str(position + 1))
    table = await (await reopened(tmp_path)).table()
    days = table["day"].cast(pa.int32()).to_pylist()
    keys = list(zip(table["region"].to_pylist(), days, strict=True))
    assert len(keys) == len(state)
    assert dict(zip(keys, table["n"].to_pylist(), strict=True)) == state


async def test_a_table_keyed_by_any_type_is_rebuilt(tmp_path: Path) -> None:
    kinds: dict[pa.DataType, tuple[Any, Any]] = {
        pa.bool_(): (True, False),
        pa.uint64(): (2**64 - 1, 1),
        pa.decimal128(38, 10): (Decimal("1.5"), Decimal("-1.5")),
        pa.decimal256(76, 2): (Decimal(10**60), Decimal(1)),
        pa.binary(): (b"\xff", b""),
        pa.timestamp("ns", "UTC"): (2**62, 0),
        pa.time64("us"): (1, 2),
    }
    for number, (kind, (first, second)) in enumerate(kinds.items()):
        folder = tmp_path / str(number)
        schema = TableSchema.of(pa.schema([("id", kind), ("name", pa.string())]), ["id"])
        writer = await open_writer(folder_at(folder), schema=schema, formats=[format_of("parquet")])
        given = [{"id": first, "name": "a"}, {"id": second, "name": "b"}]
        await writer.write_base(rows_of(schema, *given), "0", reason="first")
        updated = change(schema, "UPDATE", {"id": second, "name": "B"})
        await writer.write_diff(changes_of(schema, updated), "0", "1")
        table = await (await reopened(folder)).table()
        expected = rows_of(schema, {"id": first, "name": "a"}, {"id": second, "name": "B"})
        assert table.to_pylist() == expected[0].to_pylist(), kind


@pytest.mark.parametrize("format_id", ["parquet", "jsonl", "protobuf", "protobuf-typed"])
async def test_columns_that_were_added_and_widened_are_there_at_every_position(
    tmp_path: Path, format_id: str
) -> None:
    old = TableSchema.of(pa.schema([("id", pa.int32()), ("n", pa.int8())]), ["id"])
    new = TableSchema.of(
        pa.schema([("id", pa.int64()), ("n", pa.int32()), ("more", pa.string())]), ["id"]
    )
    writer = await open_writer(folder_at(tmp_path), schema=old, formats=[format_of(format_id)])
    await writer.write_base(rows_of(old, {"id": 1, "n": 1}, {"id": 2, "n": 2}), "0", reason="first")
    await writer.write_diff(changes_of(old, change(old, "UPDATE", {"id": 1, "n": 7})), "0", "1")
    writer.evolve(new)
    added = {"id": 2**40, "n": 2**20, "more": "x"}
    await writer.write_diff(
        changes_of(
            new,
            change(new, "DELETE", {"id": 2, "n": None, "more": None}),
            change(new, "INSERT", added),
        ),
        "1",
        "2",
    )
    archive = await reopened(tmp_path)
    before = await archive.table(position="1")
    assert before.schema.equals(old.arrow)
    assert sorted(before.to_pylist(), key=str) == [{"id": 1, "n": 7}, {"id": 2, "n": 2}]
    after = await archive.table()
    assert after.schema.equals(new.arrow)
    assert sorted(after.to_pylist(), key=str) == [{"id": 1, "n": 7, "more": None}, added]
    assert sorted((await archive.table(columns=["more"]))["more"].to_pylist(), key=str) == [
        None,
        "x",
    ]
    schemas = {item.batch.schema async for item in archive.changes("0")}
    assert schemas == {new.changes}


async def write_bucketed(
    writer: ArchiveWriter, folder: Path, parts: Mapping[int, Sequence[Change]],
    start: str, end: str,
) -> None:  # fmt: skip
    plan = writer.plan_diff(start, end)
    mirrors = Mirrors([folder_at(folder)], SEQ_NUM)
    written = [
        await write_part(plan, changes(*given), mirrors, bucket=bucket)
        for bucket, given in parts.items()
    ]
    await writer.commit_diff(plan, written)


async def test_buckets_are_folded_one_by_one_and_reused_ones_are_found(tmp_path: Path) -> None:
    writer = await open_writer(folder_at(tmp_path), formats=[format_of("parquet")])
    even, odd = {2: "b", 4: "d"}, {1: "a", 3: "c"}
    await writer.write_base({0: rows(even), 1: rows(odd)}, "0", reason="first")
    await write_bucketed(
        writer, tmp_path, {0: [("DELETE", 4, None)], 1: [("INSERT", 5, "e")]}, "0", "1"
    )
    archive = await reopened(tmp_path)
    assert await state_at(archive) == {1: "a", 2: "b", 3: "c", 5: "e"}
    closing = changes(("UPDATE", 2, "B"))
    await writer.rebase({0: rows({2: "B"})}, closing, "2", reason="forced", reuse=[])
    await archive.refresh()
    assert await state_at(archive) == {2: "B"}


@pytest.mark.parametrize("said_by", [{0}, {1}, {0, 1}])
async def test_a_truncate_in_any_part_holds_for_the_whole_diff(
    tmp_path: Path, said_by: set[int]
) -> None:
    writer = await open_writer(folder_at(tmp_path), formats=[format_of("parquet")])
    await writer.write_base({0: rows({2: "b"}), 1: rows({1: "a"})}, "0", reason="first")
    await write_bucketed(
        writer, tmp_path, {0: [("INSERT", 4, "d")], 1: [("INSERT", 3, "c")]}, "0", "1"
    )
    inserts: dict[int, Change] = {0: ("INSERT", 6, "f"), 1: ("INSERT", 5, "e")}
    parts: dict[int, list[Change]] = {
        bucket: [("TRUNCATE", None, None), insert] if bucket in said_by else [insert]
        for bucket, insert in inserts.items()
    }
    await write_bucketed(writer, tmp_path, parts, "1", "2")
    await write_bucketed(writer, tmp_path, {0: [("INSERT", 8, "h")]}, "2", "3")
    archive = await reopened(tmp_path)
    expected = {5: "e", 6: "f", 8: "h"}
    assert await state_at(archive) == expected
    seen = Consumer({1: "a", 2: "b"})
    async for item in archive.changes("0"):
        seen.take(item)
    assert seen.state == expected
    # The same where a part without a bucket makes it fold all at once.
    await writer.write_diff(changes(("INSERT", 9, "i")), "3", "4")
    await archive.refresh()
    assert await state_at(archive) == expected | {9: "i"}


async def test_many_changes_of_the_same_keys_are_merged_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamfold.archive.read.folding.MERGE_CHANGES", 3)
    monkeypatch.setattr("streamfold.archive.read.folding.LOOKUP_BYTES", 100)
    writer = await open_writer(folder_at(tmp_path))
    state = dict.fromkeys(range(20), "0")
    await writer.write_base([batch for n in state for batch in rows({n: "0"})], "0", reason="first")
    for position in range(8):
        updates = dict.fromkeys(range(position, position + 6), f"{position}")
        state |= updates
        del state[position]
        given = [
            ("DELETE", position, None),
            *(("UPDATE", n, s) for n, s in updates.items() if n != position),
        ]
        await writer.write_diff(changes(*given), str(position), str(position + 1))
    assert await state_at(await reopened(tmp_path)) == state


@pytest.mark.parametrize("format_id", FORMATS.ids())
async def test_a_table_without_rows_learns_its_columns_from_what_comes_later(
    tmp_path: Path, format_id: str
) -> None:
    formats, nothing = [format_of(format_id)], TableSchema.of_keys(["id"])
    writer = await open_writer(folder_at(tmp_path), schema=nothing, formats=formats)
    await writer.write_base({0: []}, "0", reason="first")
    empty = await (await reopened(tmp_path)).table()
    assert (empty.column_names, len(empty)) == (["id"], 0)
    seen = TableSchema.of([pa.field("id", pa.string()), pa.field("n", pa.null())], ["id"])
    writer.evolve(seen)
    first = {"id": "a", "n": None}
    await writer.write_diff(changes_of(seen, change(seen, "INSERT", first)), "0", "1")
    assert (await (await reopened(tmp_path)).table()).to_pylist() == [first]
    known = TableSchema.of([seen.arrow[0], pa.field("n", pa.list_(pa.int64()))], ["id"])
    writer.evolve(known)
    second = {"id": "b", "n": [1]}
    await writer.write_diff(changes_of(known, change(known, "INSERT", second)), "1", "2")
    table = await (await reopened(tmp_path)).table()
    assert table.sort_by("id").to_pylist() == [first, second]
    assert table.schema.field("n").type == pa.list_(pa.int64())
    assert not table.schema.field("id").nullable


@pytest.mark.parametrize("format_id", FORMATS.ids())
async def test_a_column_may_have_the_name_of_a_path_into_a_struct(
    tmp_path: Path, format_id: str
) -> None:
    shape = pa.struct([("x", pa.int64()), ("y", pa.int64())])
    columns = pa.schema([("s", shape), ("s.x", pa.string()), ("n", pa.int64())])
    schema = TableSchema.of(columns, ["s.x"])
    writer = await open_writer(folder_at(tmp_path), schema=schema, formats=[format_of(format_id)])
    row = {"s": {"x": 1, "y": 2}, "s.x": "k", "n": 3}
    other = {**row, "s.x": "l"}
    await writer.write_base(rows_of(schema, row), "1", reason="first")
    for position in ("1", "2"):
        archive = await reopened(tmp_path)
        for names in (["s.x"], ["s"], ["n", "s.x"], ["n"]):
            found = await archive.table(position="1", columns=names)
            assert found.to_pylist() == [{name: row[name] for name in names}], position
        if position == "1":
            await writer.write_diff(changes_of(schema, change(schema, "INSERT", other)), "1", "2")
    found = await archive.table(columns=["n", "s.x"])
    assert found.to_pylist() == [{"n": 3, "s.x": "k"}, {"n": 3, "s.x": "l"}]
