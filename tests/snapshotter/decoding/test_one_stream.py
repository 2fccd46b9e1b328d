"""One table out of a stream of several."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from streamfold.snapshotter.decoding import Decoded, EnvelopeDecoder
from streamfold.snapshotter.transactions import CLOSED, Tail

ORDERS, ITEMS = "public.orders", "public.items"


def change(table: str | None, op: str = "c", number: int = 1, **more: Any) -> dict[str, Any]:
    images = {"c": {"after": {"id": number}}, "r": {"after": {"id": number}}}.get(op, {})
    return {"op": op, **({"table": table} if table else {}), **images, **more}


def txn(number: str, *, last: bool = False) -> dict[str, Any]:
    return {"id": number, "last": last}


def decoded(*bodies: dict[str, Any], table: str | None = ORDERS) -> Decoded:
    plain = [json.dumps(body).encode() for body in bodies]
    headers = [[{"name": b"lsn", "value": b"0/%d" % (n + 1)}] for n in range(len(plain))]
    kind = pa.list_(pa.struct([("name", pa.binary()), ("value", pa.binary())]))
    records = pa.table(
        {
            "seq_num": pa.array(range(len(plain)), pa.int64()),
            "body": pa.array(plain, pa.binary()),
            "headers": pa.array(headers, kind),
        }
    )
    return EnvelopeDecoder(("id",), table=table).decode(records, None)


def ids(found: Decoded) -> list[int]:
    return [row["after"]["id"] for row in found.changes.to_pylist() if row["after"]]


def test_only_the_changes_and_columns_of_the_table_are_decoded() -> None:
    columns = [{"name": "id", "type": "BIGINT"}, {"name": "size", "type": "INT"}]
    found = decoded(
        change(ITEMS, "s", columns=columns),
        change(ORDERS, number=1),
        change(ITEMS, number=2),
        change(ITEMS, "t"),
        change(None, number=3),
    )
    assert (ids(found), found.ignored) == ([1, 3], 3)
    assert found.schema is not None
    assert found.schema.arrow.names == ["id"]
    assert set(found.changes["op"].to_pylist()) == {"insert"}


def test_a_transaction_is_open_until_its_last_change_of_any_table() -> None:
    records = [change(ORDERS, txn=txn("5")), change(ITEMS, txn=txn("5"))]
    assert decoded(*records).tail == Tail("5", 0, marked=True, joins=True, silent=False)
    assert decoded(*records, change(ITEMS, txn=txn("5", last=True))).tail == CLOSED


def test_a_copy_of_another_table_does_not_end_a_transaction() -> None:
    copy = [change(ITEMS, "t"), change(ITEMS, "r"), change(ITEMS, "e", txn="copy 0/1")]
    assert decoded(change(ORDERS, txn=txn("5")), *copy).tail.id == "5"
    assert decoded(change(ORDERS, txn=txn("5")), *copy, table=ITEMS).tail == CLOSED


def test_positions_of_the_source_are_those_of_the_table() -> None:
    found = decoded(change(ITEMS), change(ORDERS), change(ORDERS), change(ITEMS))
    assert found.positions is not None
    span = found.positions.span(0, 4, 0)
    assert span is not None
    assert (span.first, span.last) == (2, 3)


def test_without_a_table_all_records_are_decoded() -> None:
    assert ids(decoded(change(ITEMS, number=1), change(None, number=2), table=None)) == [1, 2]
