"""Reads of a damaged table return everything around the damage, and an error at it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamfold.store.engine import slatedb
from streamfold.store.engine.engine import (
    KeySpan,
    Row,
    TableDamagedError,
    commit_rows,
    first_row,
    readable_pages,
)
from streamfold.store.engine.location import open_location
from streamfold.store.engine.native import SlateManifest
from streamfold.store.engine.slatedb import SlateEngine, open_admin
from streamfold.store.engine.table_check import TableCheck, reader_of
from tests.store.conftest import incompressible
from tests.store.damaged_tables import Place, Table, only_table
from tests.store.small_tables import TABLE_BYTES, use_small_tables

#: A table has a filter from 1000 rows on, and some 60 of these in each block.
ROWS = 1200
END = b"row~"


def key(number: int) -> bytes:
    return b"row%06d" % number


@pytest.fixture
async def table(tmp_path: Path) -> Table:
    engine = await SlateEngine.open(open_location(tmp_path.as_uri()))
    for first in range(0, ROWS, 100):
        rows = [(key(n), incompressible(1000, n)) for n in range(first, first + 100)]
        await commit_rows(engine, rows)
    await engine.close()
    return await only_table(tmp_path)


async def open_engine(tmp_path: Path) -> SlateEngine:
    return await SlateEngine.open(open_location(tmp_path.as_uri()))


async def scanned(
    engine: SlateEngine, start: bytes = b"row", *, descending: bool = False, eager: bool = False
) -> tuple[list[Row], TableDamagedError]:
    """The rows before the damage, and the damage."""
    rows: list[Row] = []
    scan = engine.scan(start, END, descending=descending, eager=eager)
    try:
        async for page in scan:
            rows += page
    except TableDamagedError as damage:
        return rows, damage
    raise AssertionError("the scan met no damage")


async def test_a_scan_returns_all_rows_before_a_damaged_block_and_continues_after_it(
    tmp_path: Path, table: Table
) -> None:
    table.flip(Place.RECORDS)
    middle = len(table.blocks) // 2
    start, end = table.blocks[middle][1], table.blocks[middle + 1][1]
    engine = await open_engine(tmp_path)
    for eager in (False, True):
        rows, damage = await scanned(engine, eager=eager)
        assert [row[0] for row in rows] == [key(n) for n in range(ROWS) if key(n) < start]
        assert damage.file == table.name
    behind = [row async for page in engine.scan(damage.span.end, END) for row in page]
    # SlateDB looks for the key with which the next block begins in both.
    assert [row[0] for row in behind] == [key(n) for n in range(ROWS) if key(n) > end]
    down, _ = await scanned(engine, descending=True)
    assert down == behind[::-1]
    readable = [row async for page in readable_pages(engine, key(0), END, 10) for row in page]
    assert readable == rows + behind
    last = len(rows) - 1
    assert await engine.get(key(last)) == incompressible(1000, last)
    with pytest.raises(TableDamagedError, match=table.name):
        await engine.get(key(last + 1))
    await engine.close(flush=False)


async def test_two_damaged_blocks_are_told_apart(tmp_path: Path, table: Table) -> None:
    for number in (4, 8):
        table.flip_at(table.blocks[number][0] + 10)
    engine = await open_engine(tmp_path)
    _, first = await scanned(engine)
    between, second = await scanned(engine, first.span.end)
    assert (first.span.start, second.span.start) == (table.blocks[4][1], table.blocks[8][1])
    between_keys = [key(n) for n in range(ROWS) if table.blocks[5][1] < key(n) < second.span.start]
    assert [row[0] for row in between] == between_keys
    await engine.close(flush=False)


async def test_a_damaged_filter_costs_no_row(tmp_path: Path, table: Table) -> None:
    table.flip(Place.FILTER)
    engine = await open_engine(tmp_path)
    numbers = [0, 1, ROWS // 2, ROWS - 2, ROWS - 1]
    assert await engine.get_many([key(n) for n in numbers]) == [
        incompressible(1000, n) for n in numbers
    ]
    assert await engine.get(b"row000000x") is None
    assert engine.damaged_files == (table.name,)
    await engine.close(flush=False)


async def test_rows_that_were_written_since_are_read_although_an_older_table_is_damaged(
    tmp_path: Path, table: Table
) -> None:
    table.flip(Place.INDEX)
    engine = await open_engine(tmp_path)
    await commit_rows(engine, [(key(5), b"newer")])
    assert await engine.get(key(5)) == b"newer"
    with pytest.raises(TableDamagedError, match=r"put the same file back from a backup"):
        await engine.get(key(6))
    assert await engine.get(b"other") is None
    await engine.close(flush=False)


async def test_a_table_that_is_cut_short_is_named(tmp_path: Path, table: Table) -> None:
    table.path.write_bytes(table.path.read_bytes()[: table.view.index_offset // 2])
    engine = await open_engine(tmp_path)
    with pytest.raises(TableDamagedError, match=table.name):
        await first_row(engine, key(0), END)
    await engine.close(flush=False)


@pytest.mark.parametrize("part", ["filter_offset", "index_offset"])
async def test_a_table_that_ends_within_a_checksum_is_named(
    tmp_path: Path, table: Table, part: str
) -> None:
    """SlateDB panics where less than a checksum is left of a block (upstream defect 22)."""
    table.path.write_bytes(table.path.read_bytes()[: getattr(table.view, part) + 3])
    engine = await open_engine(tmp_path)
    with pytest.raises(TableDamagedError, match=table.name):
        await engine.get_many([key(500), key(501)])
    with pytest.raises(TableDamagedError, match=table.name):
        await engine.get(key(500))
    assert await engine.get(b"other") is None
    await engine.close(flush=False)


async def test_only_the_table_that_is_cut_short_counts_as_damaged(
    tmp_path: Path, table: Table
) -> None:
    """SlateDB names no file then."""
    engine = await open_engine(tmp_path)
    await commit_rows(engine, [(key(n), b"newer") for n in range(0, ROWS, 50)])
    await engine.close()
    table.path.write_bytes(table.path.read_bytes()[: table.view.index_offset // 2])
    engine = await open_engine(tmp_path)
    await scanned(engine)
    assert engine.damaged_files == (table.name,)
    await engine.close(flush=False)


async def test_a_table_that_is_replaced_while_it_is_checked_is_not_damaged(
    tmp_path: Path, table: Table
) -> None:
    location = open_location(tmp_path.as_uri())
    newest = await open_admin(location).read_manifest()
    assert newest is not None
    manifests = [newest, newest._replace(young=[], runs=[])]

    async def manifest() -> SlateManifest:
        return manifests.pop(0)

    check = TableCheck(manifest, reader_of(location.folder, None))
    table.path.unlink()
    assert not await check.damage(f"compacted/{table.path.name} not found", KeySpan(b"row", END))
    assert not check.damaged


async def test_damaged_tables_are_not_merged_on_request(tmp_path: Path, table: Table) -> None:
    """SlateDB would try again without end."""
    table.flip(Place.RECORDS)
    engine = await open_engine(tmp_path)
    await scanned(engine)
    assert not await engine.merge((), young=True)
    await engine.close(flush=False)


async def test_writers_do_not_wait_without_end_for_a_merge_of_a_damaged_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SlateDB never merges young tables of which one is damaged: a store that has many gets more
    (upstream defect 21).
    """
    use_small_tables(monkeypatch.setattr)
    small = slatedb._settings

    def smaller(*, local: bool, young: int) -> dict[str, Any]:
        return small(local=local, young=young) | {"max_unflushed_bytes": 2 * TABLE_BYTES}

    monkeypatch.setattr(slatedb, "_settings", smaller)
    engine = await open_engine(tmp_path)
    await commit_rows(engine, [(key(0), incompressible(1000))])
    await engine.flush()
    [oldest] = (tmp_path / "db" / "compacted").iterdir()
    oldest.write_bytes(bytes(oldest.stat().st_size))
    number = 0

    async def write_tables(most: int) -> None:
        nonlocal number
        while len((await engine.tables()).young) < most:
            number += 1
            await commit_rows(engine, [(key(number), incompressible(TABLE_BYTES, number))])

    await write_tables(32)
    await engine.close(flush=False)
    engine = await open_engine(tmp_path)
    async with asyncio.timeout(60):
        await write_tables(40)
    await engine.close(flush=False)
