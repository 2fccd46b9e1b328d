"""Sample tables and changes that a format must round-trip exactly, extreme values included."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.schema import TableSchema

_TEXTS = [
    "",
    "plain",
    'quote " backslash \\ slash / tab \t feed \n return \r null \x00 unit \x1f delete \x7f',
    "ünïcödé 名前 \U0001f600 \u2028 \ufeff \uffff",
    "<b>&amp;</b>",
    "null",
    '{"looks":"like JSON"}',
]
_US_1 = -62_135_596_800_000_000  # year 1, in microseconds
_US_9999 = 253_402_300_799_999_999

#: Name to type and values that are easily lost or altered. Each type is also tested with nulls.
EVERY_TYPE: dict[str, tuple[pa.DataType, list[Any]]] = {
    "null": (pa.null(), []),
    "bool": (pa.bool_(), [True, False]),
    "int8": (pa.int8(), [-128, 0, 127]),
    "int16": (pa.int16(), [-(2**15), 2**15 - 1]),
    "int32": (pa.int32(), [-(2**31), 2**31 - 1]),
    "int64": (pa.int64(), [-(2**63), -(2**53) - 1, 0, 2**53, 2**53 + 1, 2**63 - 1]),
    "uint8": (pa.uint8(), [0, 255]),
    "uint16": (pa.uint16(), [0, 2**16 - 1]),
    "uint32": (pa.uint32(), [0, 2**32 - 1]),
    "uint64": (pa.uint64(), [0, 2**53 + 1, 2**64 - 1]),
    "float32": (pa.float32(), [0.1, -0.0, 3.4028235e38, 1e-45, math.inf, -math.inf, math.nan]),
    "float64": (pa.float64(), [0.1, -0.0, 1.0, 1e22, 1.7976931348623157e308, 5e-324, 2.0**63]),
    "float64 special": (pa.float64(), [math.nan, math.inf, -math.inf, 1.5]),
    "decimal128": (
        pa.decimal128(38, 10),
        [Decimal(text) for text in ("0", "1E-10", "-0.0000000001", "1234567890123456789012345678")]
        + [Decimal("-9999999999999999999999999999.9999999999")],
    ),
    "decimal128 whole": (pa.decimal128(38, 0), [Decimal(10**38 - 1), Decimal(-1)]),
    "decimal256": (pa.decimal256(76, 38), [Decimal("1E-38"), Decimal(-(10**37)), Decimal(7)]),
    "string": (pa.string(), _TEXTS),
    "binary": (pa.binary(), [b"", b"\x00", b"ab", b"abc", bytes(range(256)), b"\xff" * 5]),
    "date32": (pa.date32(), [0, -719_162, 2_932_896, 2_932_897, -(2**31), 2**31 - 1]),
    "time64[us]": (pa.time64("us"), [0, 1, 86_399_999_999]),
    "time64[ns]": (pa.time64("ns"), [0, 1, 86_399_999_999_999]),
    "timestamp[us]": (pa.timestamp("us"), [0, 1, -1, _US_1, _US_9999, _US_9999 + 1, -(2**63)]),
    "timestamp[ns]": (pa.timestamp("ns"), [0, 1, -1, 2**63 - 1, -(2**63) + 1]),
    "timestamp[us, UTC]": (pa.timestamp("us", "UTC"), [0, 1, 2**63 - 1, 1_700_000_000_123_456]),
    "timestamp[ns, Europe/Paris]": (pa.timestamp("ns", "Europe/Paris"), [0, 1_700_000_000 * 10**9]),
    "list": (pa.list_(pa.int64()), [[], [1], [None, 2**60], [3, 3, 3]]),
    "list of lists": (
        pa.list_(pa.list_(pa.string())),
        [[], [[]], [None], [["a", None], ["", '"']]],
    ),
    "struct": (
        pa.struct([pa.field("a", pa.int64(), nullable=False), pa.field("b.c", pa.string())]),
        [{"a": 1, "b.c": None}, {"a": 2, "b.c": "x"}],
    ),
    "struct of structs": (
        pa.struct([("in", pa.struct([("d", pa.decimal128(20, 2)), ("l", pa.list_(pa.binary()))]))]),
        [{"in": None}, {"in": {"d": Decimal("0.10"), "l": [b"x", None]}}, {"in": {"d": None}}],
    ),
    "list of nothing": (pa.list_(pa.null()), [[], [None], [None, None]]),
    "struct of nothing": (
        pa.struct([("a", pa.null()), ("b", pa.int64())]),
        [{"b": 1}, {"b": None}],
    ),
    "map of nothing": (pa.map_(pa.string(), pa.null()), [[], [("a", None)]]),
    "map": (pa.map_(pa.string(), pa.int64()), [[], [("a", None), ("b", 1)], [("", 2**62)]]),
    "map of structs": (
        pa.map_(pa.string(), pa.struct([("t", pa.timestamp("us", "UTC"))])),
        [[("k", {"t": 1}), ("l", None)], [('"\n', {"t": None})]],
    ),
    "list of structs": (
        pa.list_(pa.struct([pa.field("x", pa.int64(), nullable=False), ("y", pa.string())])),
        [[], [{"x": 1, "y": None}, None], [None], [{"x": 2, "y": "b"}]],
    ),
    "list of maps": (
        pa.list_(pa.map_(pa.string(), pa.float64())),
        [[], [[("x", math.nan)], None, []]],
    ),
}


def table_of(kind: pa.DataType, values: Sequence[Any]) -> tuple[TableSchema, pa.RecordBatch]:
    """Return a table with a key column and a column of `values` mixed with nulls."""
    mixed = [None, *values, None, *reversed(values)]
    schema = TableSchema.of([pa.field("id", pa.int64()), pa.field("value", kind)], ["id"])
    columns = [pa.array(range(len(mixed)), pa.int64()), pa.array(mixed, kind)]
    return schema, pa.RecordBatch.from_arrays(columns, schema=schema.arrow)


#: A table of everyday columns with a two-column key.
ORDERS = TableSchema.of(
    [
        pa.field("shop", pa.string()),
        pa.field("number", pa.int64()),
        pa.field("placed", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("total", pa.decimal128(12, 2)),
        pa.field("note", pa.string()),
        pa.field("tags", pa.list_(pa.string())),
    ],
    ["shop", "number"],
)


@lru_cache(maxsize=16)  # holds every table of the kit: one takes up to a second to build
def orders(count: int, seed: int = 1, note: str = "") -> pa.RecordBatch:
    """Return rows of ORDERS. Equal arguments give equal rows."""
    chance = random.Random(seed)  # noqa: S311 - reproducible data, no secret
    rows = [
        {
            "shop": f"shop {chance.randrange(50)}",
            "number": number,
            "placed": chance.randrange(2**50),
            "total": None if number % 7 == 0 else Decimal(chance.randrange(10**9)).scaleb(-2),
            "note": chance.choice([None, "", f"{note} {number}", "line\nbreak", 'say "hi"']),
            "tags": chance.choice([None, [], ["a"], ["b", None, "ü"]]),
        }
        for number in range(count)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=ORDERS.arrow)


def changes_of(schema: TableSchema, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return a TRUNCATE, then per row one change: INSERT, UPDATE to itself and DELETE in turn."""
    actions = pa.array(["INSERT", "UPDATE", "DELETE"] * len(rows))[: len(rows)]
    kinds = {field.name: field.type for field in schema.changes}
    images = [
        pa.StructArray.from_arrays(
            [rows[field.name] for field in kinds[name]],
            fields=list(kinds[name]),
            mask=pc.equal(actions, absent),
        )
        for name, absent in (("key", "TRUNCATE"), ("before", "INSERT"), ("after", "DELETE"))
    ]
    columns = [actions, *images]
    truncate = [pa.array(["TRUNCATE"]), *(pa.nulls(1, image.type) for image in images)]
    return pa.concat_batches(
        [pa.record_batch(truncate, schema.changes), pa.record_batch(columns, schema.changes)]
    )


def cut(batch: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    """Yield the batch in slices of `size` rows."""
    for start in range(0, len(batch), size):
        yield batch.slice(start, size)


def in_another_layout(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return equal values in the other Arrow string layouts, which some libraries produce."""
    fields = [
        field.with_type(pa.large_string()) if pa.types.is_string(field.type) else field
        for field in batch.schema
    ]
    large = batch.cast(pa.schema(fields))
    first = large.schema.names[0]
    return large.set_column(0, first, large.column(0).dictionary_encode())


def misfits() -> dict[str, tuple[TableSchema, pa.RecordBatch]]:
    """Return batches that violate their schema, keyed by the violation."""
    rows = orders(3)
    twice = pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))
    mapped, _ = table_of(*EVERY_TYPE["map"])
    return {
        "extra": (ORDERS, rows.append_column("extra", pa.array([1, 2, 3]))),
        "type": (ORDERS, rows.set_column(1, "number", pa.array(["a", "b", "c"]))),
        "null": (ORDERS, rows.set_column(1, "number", pa.array([1, None, 3]))),
        "missing": (ORDERS, rows.select(["shop", "number"])),
        "map": (mapped, pa.record_batch([pa.array([1]), twice], names=["id", "value"])),
    }


def bad_changes() -> list[list[dict[str, Any]]]:
    """Return invalid changes of ORDERS, which a format must reject."""
    row, other = orders(2).to_pylist()
    key = {name: row[name] for name in ORDERS.key_fields}
    return [
        [{"action": "UPSERT", "key": key, "after": row}],
        [{"action": "INSERT", "key": key, "after": None}],
        [{"action": "INSERT", "key": None, "after": row}],
        [{"action": "INSERT", "key": key, "before": row, "after": row}],
        [{"action": "DELETE", "key": key, "after": row}],
        [{"action": "UPDATE", "key": key, "before": row, "after": other}],
        [{"action": "TRUNCATE", "key": key}],
        [{"action": "INSERT", "key": key, "after": row}, {"action": "TRUNCATE"}],
    ]
