"""The archive under `golden/table-v1`, which every later version must read.

It was written once, by `python -m tests.archive.golden_table <folder>`, with a clock and ids that are
the same in every run. It stays as it is: a new version of the format gets a folder of its own.
"""

from __future__ import annotations

import asyncio
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

from streamfold.archive import ArchiveWriter, Source, TableSchema
from streamfold.archive.destinations.destination import Destination
from streamfold.archive.formats import FORMATS, FileCompression, JsonlFormat, format_of
from streamfold.blob import LocalBlobStore
from tests.archive.tables import Clock, new_ids

FOLDER = Path(__file__).parent / "golden" / "table-v1"

FIRST = TableSchema.of(
    pa.schema(
        [
            ("region", pa.string()),
            ("id", pa.int32()),
            ("balance", pa.decimal128(12, 2)),
            ("seen", pa.timestamp("us", "UTC")),
            ("tags", pa.list_(pa.string())),
        ]
    ),
    ["region", "id"],
)
SECOND = TableSchema.of(
    pa.schema([*FIRST.arrow.set(1, pa.field("id", pa.int64())), ("note", pa.binary())]),
    ["region", "id"],
)

Row = dict[str, Any]


def row(region: str, number: int, balance: str | None, *tags: str, **more: Any) -> Row:
    money = None if balance is None else Decimal(balance)
    return {"region": region, "id": number, "balance": money, "seen": 10**15 + number,
            "tags": list(tags), **more}  # fmt: skip


NORTH, SOUTH, EAST = (
    row("north", 1, "1.50"),
    row("south", 1, None, "a", "b"),
    row("east", -7, "0.00"),
)
POORER = row("north", 1, "-99999999.99", "é", "")
FAR = row("north", 2**40, "2.00", note=b"\x00\xff")
LAST = row("west", 9, "3.10", note=b"")

#: The rows at the end of every artifact; columns that were added later are absent.
STATES: dict[str, list[Row]] = {
    "9": [NORTH, SOUTH, EAST],
    "14": [POORER, EAST],
    "20": [POORER, FAR],
    "25": [POORER, FAR, LAST],
    "31": [LAST],
}


def rows(schema: TableSchema, *given: Row) -> list[pa.RecordBatch]:
    return [pa.RecordBatch.from_pylist(list(given), schema=schema.arrow)]


def changes(schema: TableSchema, *given: tuple[str, Row | None]) -> list[pa.RecordBatch]:
    plain = [
        {
            "action": action,
            "key": image and {name: image[name] for name in schema.key_fields},
            "before": image if action == "DELETE" else None,
            "after": image if action in ("INSERT", "UPDATE") else None,
        }
        for action, image in given
    ]
    return [pa.RecordBatch.from_pylist(plain, schema=schema.changes)]


async def write(folder: Path) -> None:
    """Write the archive: two epochs, all formats, new columns, a changed key, a truncate."""
    clock = Clock()
    packed = JsonlFormat(FileCompression.ZSTD)
    writer = await ArchiveWriter.open(
        "public.accounts",
        FIRST,
        [Destination(LocalBlobStore(folder), "s3://archives/accounts/")],
        formats=[format_of(name) for name in FORMATS.ids()],
        diff_formats=[packed, *(format_of(name) for name in FORMATS.ids()[1:])],
        writer_id="golden",
        now=clock.now,
        new_id=new_ids("golden"),
    )
    source = Source(name="accounts", offsets={"accounts": "9"})
    await writer.write_base(rows(FIRST, NORTH, SOUTH, EAST), "9", reason="first", source=source)
    clock.advance(minutes=1)
    given = changes(FIRST, ("UPDATE", POORER), ("DELETE", SOUTH))
    await writer.write_diff(given, "9", "14", record_count=4)
    clock.advance(minutes=1)
    writer.evolve(SECOND)
    moved = changes(SECOND, ("DELETE", EAST), ("INSERT", FAR))
    await writer.write_diff(moved, "14", "20")
    clock.advance(minutes=1)
    buckets = {0: rows(SECOND, POORER, FAR), 1: rows(SECOND, LAST)}
    closing = changes(SECOND, ("INSERT", LAST))
    await writer.rebase(buckets, closing, "25", reason="max_diff_fraction")
    clock.advance(minutes=1)
    await writer.write_diff(changes(SECOND, ("TRUNCATE", None), ("INSERT", LAST)), "25", "31")


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1]).absolute()))
