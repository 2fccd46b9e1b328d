"""Archives that Laredo's own writer wrote, kept in `laredo_written`: ours reads every state of them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import streamfold.archive
from streamfold.archive.schema import TableSchema

GOLDEN = Path(__file__).parent / "laredo_written"
ODD = '<a & b> \u2028 \n "quoted" \\ ü 😀'

Row = Mapping[str, Any]
Step = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class History:
    """What the writer was given: a step is a base with `Rows`, or a diff with `Changes`."""

    schema: TableSchema
    steps: Sequence[Step]

    @property
    def keys(self) -> list[str]:
        return list(self.schema.key_fields)

    def states(self) -> dict[str, list[Row]]:
        """The table at every position, sorted."""
        table: dict[tuple[Any, ...], Row] = {}
        found = {}
        for step in self.steps:
            if "Rows" in step:
                table = {self.key(row): row for row in step["Rows"]}
            for change in step.get("Changes", ()):
                if not change:
                    table.clear()
                elif "New" in change:
                    table[self.key(change["New"])] = change["New"]
                else:
                    del table[self.key(change["Old"])]
            found[step["Position"]] = self.sorted(table.values())
        return found

    def key(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.keys)

    def sorted(self, rows: Any) -> list[Row]:
        return sorted(rows, key=self.key)


def order(number: int, name: str | None, price: float | None, paid: bool | None = None) -> Row:
    return {"id": number, "name": name, "price": price, "paid": paid}


def item(tenant: int, code: str, name: str | None) -> Row:
    return {"tenant": tenant, "code": code, "name": name}


#: The writer prints the key 1000000 as it is, its reader makes 1e+06 of it; ours goes by the images.
ONE_KEY = History(
    TableSchema.of(
        pa.schema([
            ("id", pa.int64()), ("name", pa.string()), ("price", pa.float64()), ("paid", pa.bool_()),
        ]),
        ["id"],
    ),
    [
        {"Position": "0/16B3748", "Rows": [order(1, ODD, 0.5, True), order(1_000_000, None, None)]},
        {"Position": "0/16B3800", "Changes": [
            {"New": order(2, "", -1.25, False)},
            {"Old": order(1_000_000, None, None)},
            {"Old": order(1, ODD, 0.5, True), "New": order(1, "changed", 1e21)},
        ]},
        {"Position": "0/FFFFFFFF", "Changes": [{}]},
        {"Position": "1/0", "Changes": [{"New": order(1_234_567, "after", 3.0)}]},
        {"Position": "1/A0", "Rows": [order(1_234_567, "after", 3.0), order(5, "x", 1e-7)]},
        {"Position": "1/B0", "Changes": [{"Old": order(1_234_567, "after", 3.0)}]},
    ],
)  # fmt: skip
TWO_KEYS = History(
    TableSchema.of(
        pa.schema([("tenant", pa.int64()), ("code", pa.string()), ("name", pa.string())]),
        ["tenant", "code"],
    ),
    [
        {"Position": "", "Rows": []},
        {"Position": "0/1", "Changes": [
            {"New": item(1, "a b", "x")}, {"New": item(2_000_000, "c", None)},
        ]},
        {"Position": "0/2", "Changes": [{"Old": item(2_000_000, "c", None)}]},
        {"Position": "0/3", "Changes": [{}]},
        {"Position": "0/4", "Changes": [{"New": item(1, "", "empty")}]},
        {"Position": "0/5", "Rows": [item(1, "", "empty")]},
        {"Position": "0/6", "Changes": [
            {"Old": item(1, "", "empty"), "New": item(1, "", "full")},
        ]},
    ],
)  # fmt: skip
HISTORIES = {"one_key": ONE_KEY, "two_keys": TWO_KEYS}


async def check_states(folder: Path, history: History, form: str, *, typed: bool) -> None:
    """Our reader finds every state of the history, with and without its schema."""
    archive = await streamfold.archive.open(
        folder,
        formats=[form],
        schema=history.schema if typed else None,
        key_fields=None if typed else history.keys,
    )
    for position, expected in history.states().items():
        rows = (await archive.table(position=position)).to_pylist()
        assert history.sorted(rows) == expected, (form, position)
    assert (await archive.verify()).ok


@pytest.mark.parametrize("typed", [False, True], ids=["inferred", "given"])
@pytest.mark.parametrize("form", ["jsonl", "protobuf"])
@pytest.mark.parametrize("name", HISTORIES)
async def test_every_state_is_read(name: str, form: str, typed: bool) -> None:
    await check_states(GOLDEN / name, HISTORIES[name], form, typed=typed)


async def test_a_table_without_a_change_so_far_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    shutil.copytree(GOLDEN / "no_change", folder)
    archive = await streamfold.archive.open(folder, schema=TWO_KEYS.schema)
    assert archive.manifest.head_position == ""
    assert (await archive.table()).to_pylist() == [item(1, "a", None)]
