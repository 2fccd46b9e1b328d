"""An archive of an earlier version, as it was written then."""

from __future__ import annotations

import pyarrow as pa
import pytest

import streamfold.archive
from streamfold.archive.formats import FORMATS
from tests.archive.golden_table import FIRST, FOLDER, SECOND, STATES, Row


def plain(rows: list[Row], columns: pa.Schema) -> list[Row]:
    """The rows as Arrow gives them back, in the order of their keys."""
    found = pa.Table.from_pylist(rows, schema=columns).to_pylist()
    return sorted(found, key=lambda row: (row["region"], row["id"]))


@pytest.mark.parametrize("format_id", FORMATS.ids())
@pytest.mark.parametrize("position", STATES)
async def test_every_state_is_read_in_every_format(position: str, format_id: str) -> None:
    archive = await streamfold.archive.open(FOLDER, formats=[format_id])
    table = await archive.table(position=position)
    schema = FIRST if int(position) < 20 else SECOND
    assert table.schema.equals(schema.arrow)
    assert plain(table.to_pylist(), schema.arrow) == plain(STATES[position], schema.arrow)


@pytest.mark.parametrize("format_id", FORMATS.ids())
async def test_the_changes_between_all_states_are_read_in_every_format(format_id: str) -> None:
    archive = await streamfold.archive.open(FOLDER, formats=[format_id])
    found = [item async for item in archive.changes("9")]
    assert [(item.from_position, item.to_position) for item in found] == [
        ("9", "14"), ("14", "20"), ("20", "25"), ("25", "31"),
    ]  # fmt: skip
    assert [item.batch["action"].to_pylist() for item in found] == [
        ["UPDATE", "DELETE"], ["DELETE", "INSERT"], ["INSERT"], ["TRUNCATE", "INSERT"],
    ]  # fmt: skip


async def test_nothing_is_wrong_with_it() -> None:
    found = await (await streamfold.archive.open(FOLDER)).verify()
    assert found.problems == ()
    assert (found.artifacts, found.files) == (6, 28)
