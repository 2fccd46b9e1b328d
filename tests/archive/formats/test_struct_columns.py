"""Rows of Struct messages read in step: the same values as one by one, or not at all."""

from __future__ import annotations

import io
import random
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats import ProtobufFormat
from streamfold.archive.formats.admission import Limits
from streamfold.archive.formats.protobuf.frames import read_blocks
from streamfold.archive.formats.protobuf.published import SnapshotRow, read_row
from streamfold.archive.formats.protobuf.structs import IrregularError, read_in_step
from streamfold.archive.schema import TableSchema
from streamfold.records.protobuf import varint

SCHEMA = TableSchema.of(
    pa.schema(
        [
            ("id", pa.int64()),
            ("name", pa.string()),
            ("score", pa.float64()),
            ("sure", pa.bool_()),
            ("price", pa.decimal128(12, 2)),
        ]
    ),
    ["id"],
)
ROW = {"id": 1.0, "name": "a", "score": 0.5, "sure": True, "price": "1.50"}


def file_of(rows: list[dict[str, Any]]) -> io.BytesIO:
    """Return rows as another writer may write them, names in the order given."""
    out = io.BytesIO()
    for row in rows:
        parts = b""
        for name, value in row.items():  # the library would sort them, or not, as it likes
            message = SnapshotRow()
            message.row.update({name: value})
            parts += message.row.SerializeToString()
        message = b"\x0a" + varint(len(parts)) + parts
        out.write(varint(len(message)) + message)
    out.seek(0)
    return out


def in_step(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    [block] = read_blocks(file_of(rows), Limits())
    found: list[dict[str, Any]] = read_in_step(block, SCHEMA.arrow, False).to_pylist()
    return found


def read(source: io.BytesIO) -> list[dict[str, Any]]:
    return [
        row for batch in ProtobufFormat().read_rows(source, SCHEMA) for row in batch.to_pylist()
    ]


def test_rows_that_are_alike_are_read_in_step() -> None:
    rows: list[dict[str, Any]] = [
        {"id": 1.0, "name": "ä" * 200, "score": None, "sure": None, "price": "-0.01"},
        {
            "id": "9007199254740993",
            "name": "",
            "score": float("-inf"),
            "sure": False,
            "price": None,
        },
        {"id": -7.0, "name": None, "score": -0.0, "sure": True, "price": "99.90"},
    ]
    expected = [
        {"id": 1, "name": "ä" * 200, "score": None, "sure": None, "price": Decimal("-0.01")},
        {"id": (1 << 53) + 1, "name": "", "score": float("-inf"), "sure": False, "price": None},
        {"id": -7, "name": None, "score": -0.0, "sure": True, "price": Decimal("99.90")},
    ]
    assert in_step(rows) == read(file_of(rows)) == expected


IRREGULAR: dict[str, list[dict[str, Any]]] = {
    "another order": [ROW, dict(reversed(ROW.items()))],
    "a name that is missing": [ROW, {"id": 2.0}],
    "a name that is missing at first": [{"id": 2.0}, ROW],
    "a decimal as a number": [ROW, ROW | {"price": 2.5}],
    "NaN as text": [ROW | {"score": "NaN"}],
}


@pytest.mark.parametrize("rows", IRREGULAR.values(), ids=IRREGULAR.keys())
def test_other_rows_are_read_one_by_one(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(IrregularError):
        in_step(rows)
    found = read(file_of(rows))
    assert [row["id"] for row in found] == [int(row["id"]) for row in rows]
    assert [row["name"] for row in found] == [row.get("name") for row in rows]


@pytest.mark.parametrize(
    "row", [ROW | {"id": 1.5}, ROW | {"id": "0x10"}, ROW | {"more": 1.0}, ROW | {"sure": "yes"}]
)
def test_the_slower_way_reports_what_is_wrong(row: dict[str, Any]) -> None:
    with pytest.raises(ArtifactCorruptError, match="after message 0"):
        read(file_of([row]))


def test_changed_bytes_never_mean_something_else_than_one_by_one() -> None:
    chance = random.Random(11)
    whole = file_of([ROW | {"id": float(number)} for number in range(20)]).getvalue()
    for _ in range(400):
        data = bytearray(whole)
        data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            [block] = read_blocks(io.BytesIO(data), Limits())
            found = read_in_step(block, SCHEMA.arrow, False)
        except (IrregularError, ArtifactCorruptError, ValueError):
            continue
        [messages] = block.messages(100)
        plain = [read_row(message) for message in messages]
        assert found["name"].to_pylist() == [row.get("name") for row in plain], "seed 11"
        assert found["score"].to_pylist() == pytest.approx(
            [row.get("score") for row in plain], nan_ok=True
        )


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_blocks_have_whole_messages_whatever_their_size(size: int) -> None:
    source = file_of([ROW | {"name": "x" * length} for length in (0, 1, 500, 70_000)])
    blocks = list(read_blocks(source, Limits(size=size)))
    names = [read_row(m)["name"] for block in blocks for ms in block.messages(2) for m in ms]
    assert [len(name) for name in names] == [0, 1, 500, 70_000]


@pytest.mark.parametrize("cut", [1, 60, 300])
def test_a_message_that_is_cut_off_is_refused(cut: int) -> None:
    data = file_of([ROW | {"name": "x" * 400}]).getvalue()
    with pytest.raises(ArtifactCorruptError, match="a message cannot be read"):
        list(read_blocks(io.BytesIO(data[:cut]), Limits(size=50)))
