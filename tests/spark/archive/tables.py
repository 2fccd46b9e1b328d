"""Archives for tests: a table with a column of every kind, in key buckets or not, with a history."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from streamfold.archive import ArchiveWriter, Destination, Mirrors, TableSchema, write_part
from streamfold.archive.buckets import BUCKETING, SPLITMIX64, bucket_numbers
from streamfold.archive.formats import format_of
from streamfold.archive.manifest.positions import SEQ_NUM
from streamfold.archive.write.artifacts import PartPlan, WrittenPart
from tests.archive.tables import START, Clock, new_ids

Row = dict[str, Any]
State = dict[int, Row]
BUCKETS = 4

_POINT = pa.struct([("x", pa.uint16()), ("at", pa.time64("us"))])
SCHEMA = TableSchema.of(
    [
        pa.field("id", pa.int64()),
        pa.field("flag", pa.bool_()),
        pa.field("i8", pa.int8()),
        pa.field("i16", pa.int16()),
        pa.field("i32", pa.int32()),
        pa.field("u8", pa.uint8()),
        pa.field("u16", pa.uint16()),
        pa.field("u32", pa.uint32()),
        pa.field("u64", pa.uint64()),
        pa.field("f32", pa.float32()),
        pa.field("f64", pa.float64()),
        pa.field("price", pa.decimal128(12, 2)),
        pa.field("huge", pa.decimal256(60, 3)),
        pa.field("small", pa.decimal256(10, 1)),
        pa.field("name", pa.string()),
        pa.field("raw", pa.binary()),
        pa.field("day", pa.date32()),
        pa.field("time", pa.time64("ns")),
        pa.field("seen", pa.timestamp("us", "Europe/Berlin")),
        pa.field("local", pa.timestamp("us")),
        pa.field("exact", pa.timestamp("ns", "UTC")),
        pa.field("tags", pa.list_(pa.field("item", pa.string(), nullable=False))),
        pa.field("points", pa.list_(_POINT)),
        pa.field("counts", pa.map_(pa.string(), pa.uint64())),
        pa.field("unseen", pa.null()),
        pa.field("blank", pa.list_(pa.null())),
        pa.field("nested", pa.struct([("deep", pa.map_(pa.string(), pa.list_(pa.int8())))])),
    ],
    ["id"],
)


def row(key: int, chance: random.Random) -> Row:
    """A row with values from all over their ranges, a fifth of them null."""
    moment = START + timedelta(microseconds=chance.randrange(10**15))
    values: Row = {
        "flag": chance.random() < 0.5,
        "i8": chance.randrange(-(2**7), 2**7),
        "i16": chance.randrange(-(2**15), 2**15),
        "i32": chance.randrange(-(2**31), 2**31),
        "u8": chance.randrange(2**8),
        "u16": chance.randrange(2**16),
        "u32": chance.randrange(2**32),
        "u64": chance.choice([0, 2**64 - 1, chance.randrange(2**64)]),
        "f32": chance.choice([0.5, -0.0, float("nan"), float("inf")]),
        "f64": chance.choice([chance.gauss(0, 1), float("nan"), -0.0]),
        "price": Decimal(chance.randrange(-(10**12), 10**12)).scaleb(-2),
        "huge": Decimal(f"{chance.randrange(10**56)}.{chance.randrange(1000):03d}"),
        "small": Decimal(chance.randrange(-(10**9), 10**9)).scaleb(-1),
        "name": chance.choice(["", "Ä", "a,b", "𝄞", f"name {key}", "apple", "apricot"]),
        "raw": chance.randbytes(chance.randrange(4)),
        "day": date(1960, 1, 1) + timedelta(days=chance.randrange(40_000)),
        "time": chance.randrange(86_400 * 10**9),
        "seen": moment,
        "local": moment.replace(tzinfo=None),
        "exact": chance.randrange(-(2**62), 2**62),
        "tags": chance.choice([[], ["x"], ["", "y"]]),
        "points": [{"x": 65_535, "at": 1}, None, {"x": 0, "at": None}],
        "counts": {"a": 2**64 - 1, "b": None},
        "nested": {"deep": {"k": [1, None, -128], "n": None}},
    }
    known = {n: None if chance.random() < 0.2 else v for n, v in values.items()}
    return {"id": key} | known | {"unseen": None, "blank": [None] * (key % 3)}


def rows(state: Iterable[Row]) -> list[pa.RecordBatch]:
    return [pa.RecordBatch.from_pylist(list(state), schema=SCHEMA.arrow)]


def changes(before: Mapping[int, Row], after: Mapping[int, Row]) -> list[pa.RecordBatch]:
    """What turns one state into another, with the old values."""
    plain = [
        {
            "action": "DELETE" if new is None else "INSERT" if old is None else "UPDATE",
            "key": {"id": key},
            "before": old,
            "after": new,
        }
        for key in sorted({*before, *after})
        for old, new in [(before.get(key), after.get(key))]
        if old is not new
    ]
    return [pa.RecordBatch.from_pylist(plain, schema=SCHEMA.changes)]


@cache
def bucket_of(key: int, count: int = BUCKETS) -> int:
    return int(bucket_numbers([pa.array([key])], count)[0])


class History:
    """An archive being written, and the state at every position, a minute apart."""

    def __init__(
        self, writer: ArchiveWriter, destination: Destination, clock: Clock, buckets: int | None
    ) -> None:
        self.writer = writer
        self.clock = clock
        self.states: dict[str, State] = {}
        self._mirrors = Mirrors([destination], SEQ_NUM)
        self._buckets = buckets
        #: Whether parts say by which hash their buckets were chosen.
        self.marked = True

    @classmethod
    def begin(
        cls, destination: Destination, *, buckets: int | None, form: str, ids: str
    ) -> History:
        clock = Clock()
        opening = ArchiveWriter.open(
            "public.things", SCHEMA, [destination], formats=[format_of(form)],
            writer_id="w", now=clock.now, new_id=new_ids(ids),
        )  # fmt: skip
        return cls(asyncio.run(opening), destination, clock, buckets)

    @property
    def state(self) -> State:
        return self.states[self.writer.head or ""]

    def base(self, state: State, position: str, reason: str = "first") -> None:
        asyncio.run(self._base(state, position, reason))

    async def _base(self, state: State, position: str, reason: str) -> None:
        plan = self.writer.plan_base(position)
        parts = [
            await self._part(plan, rows(r for k, r in state.items() if self._in(k, b)), b)
            for b in self._all()
        ]
        self.clock.advance(minutes=1)
        await self.writer.commit_base(plan, parts, reason=reason)
        self.states[position] = state

    def diff(self, state: State, position: str, *, truncate: bool = False) -> None:
        asyncio.run(self._diff(state, position, truncate))

    async def _diff(self, state: State, position: str, truncate: bool) -> None:
        before = {} if truncate else self.state
        plan = self.writer.plan_diff(str(self.writer.head), position)
        parts = []
        for bucket in self._all():
            old = {k: r for k, r in before.items() if self._in(k, bucket)}
            new = {k: r for k, r in state.items() if self._in(k, bucket)}
            batches = changes(old, new)
            if truncate and bucket in (None, 0):
                head = pa.RecordBatch.from_pylist([{"action": "TRUNCATE"}], schema=SCHEMA.changes)
                batches = [head, *batches]
            elif not len(batches[0]):
                continue
            parts.append(await self._part(plan, batches, bucket, truncates=truncate))
        self.clock.advance(minutes=1)
        await self.writer.commit_diff(plan, parts)
        self.states[position] = state

    async def _part(
        self,
        plan: PartPlan,
        batches: list[pa.RecordBatch],
        bucket: int | None,
        *,
        truncates: bool = False,
    ) -> WrittenPart:
        written = await write_part(plan, batches, self._mirrors, bucket=bucket)
        if bucket is None or not self.marked:
            return written
        extra = {BUCKETING: SPLITMIX64} | ({"truncates": True} if truncates else {})
        return WrittenPart(
            {name: msgspec.structs.replace(p, extra=extra) for name, p in written.files.items()}
        )

    def _all(self) -> Iterable[int | None]:
        return [None] if self._buckets is None else range(self._buckets)

    def _in(self, key: int, bucket: int | None) -> bool:
        return bucket is None or bucket_of(key, self._buckets or 1) == bucket


def write_history(
    destination: Destination,
    *,
    buckets: int | None = None,
    form: str = "parquet",
    marked: bool = True,
    size: int = 60,
    ids: str = "id",
) -> History:
    """Two epochs: base 9, diffs to 14 and 20, base 20, diffs to 31 and 40. Minutes 1 to 6."""
    chance = random.Random(f"archive {size}")
    history = History.begin(destination, buckets=buckets, form=form, ids=ids)
    history.marked = marked
    first = {key: row(key, chance) for key in range(size)}
    history.base(first, "9")
    for position in ("14", "20"):
        history.diff(_changed(history.state, chance), position)
    history.base(history.state, "20", "forced")
    for position in ("31", "40"):
        history.diff(_changed(history.state, chance), position)
    return history


def _changed(state: State, chance: random.Random) -> State:
    """A tenth of the rows updated, a tenth deleted, and some that are new."""
    found: State = {}
    for key, old in state.items():
        luck = chance.random()
        if luck < 0.1:
            found[key] = row(key, chance)
        elif luck > 0.2:
            found[key] = old
    first = max(state) + 1
    return found | {key: row(key, chance) for key in range(first, first + len(state) // 20)}


def folder_at(path: Path) -> Destination:
    return Destination.open(path.as_uri())
