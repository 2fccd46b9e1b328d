"""Rows in Struct messages, as any writer may write them."""

from __future__ import annotations

import io
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats import ProtobufFormat
from streamfold.archive.formats.admission import PieceLimits
from streamfold.archive.formats.protobuf.frames import read_groups
from streamfold.archive.formats.protobuf.published import SnapshotRow, read_row
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


def read(source: io.BytesIO) -> list[dict[str, Any]]:
    return [
        row for batch in ProtobufFormat().read_rows(source, SCHEMA) for row in batch.to_pylist()
    ]


def test_values_that_a_double_cannot_hold_are_read_exactly() -> None:
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
    assert read(file_of(rows)) == expected


FORMS: dict[str, list[dict[str, Any]]] = {
    "another order": [ROW, dict(reversed(ROW.items()))],
    "a name that is missing": [ROW, {"id": 2.0}],
    "a decimal as a number": [ROW, ROW | {"price": 2.5}],
    "NaN as text": [ROW | {"score": "NaN"}],
}


@pytest.mark.parametrize("rows", FORMS.values(), ids=FORMS.keys())
def test_every_legal_form_of_a_row_is_read(rows: list[dict[str, Any]]) -> None:
    messages = read(file_of(rows))
    assert [row["id"] for row in messages] == [int(row["id"]) for row in rows]
    assert [row["name"] for row in messages] == [row.get("name") for row in rows]


@pytest.mark.parametrize(
    "row", [ROW | {"id": 1.5}, ROW | {"id": "0x10"}, ROW | {"more": 1.0}, ROW | {"sure": "yes"}]
)
def test_a_row_that_does_not_fit_the_schema_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(ArtifactCorruptError, match="after message 0"):
        read(file_of([row]))


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_groups_have_whole_messages_whatever_their_size(size: int) -> None:
    source = file_of([ROW | {"name": "x" * length} for length in (0, 1, 500, 70_000)])
    groups = read_groups(source, PieceLimits(rows=2, size=size))
    names = [read_row(message)["name"] for group in groups for message in group]
    assert [len(name) for name in names] == [0, 1, 500, 70_000]


@pytest.mark.parametrize("cut", [1, 60, 300])
def test_a_message_that_is_cut_off_is_refused(cut: int) -> None:
    data = file_of([ROW | {"name": "x" * 400}]).getvalue()
    with pytest.raises(ArtifactCorruptError, match="a message cannot be read"):
        list(read_groups(io.BytesIO(data[:cut]), PieceLimits(size=50)))
