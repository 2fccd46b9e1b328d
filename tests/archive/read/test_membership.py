"""Key lookups among many keys agree with a plain set for every type."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from streamfold.archive.read.folding import KeyIndex, WholeNumbers, members_of

START = datetime(2026, 6, 3, tzinfo=UTC)
KINDS: dict[pa.DataType, Callable[[int], Any]] = {
    pa.int64(): lambda n: n * 0x1234_5678_9ABC - (1 << 62),
    pa.int8(): lambda n: n % 256 - 128,
    pa.uint64(): lambda n: (1 << 64) - 1 - n,
    pa.date32(): lambda n: date(1960, 1, 1) + timedelta(days=n),
    pa.timestamp("us", "UTC"): lambda n: START - timedelta(microseconds=n),
    pa.string(): lambda n: f"key {n}",
    pa.binary(): lambda n: n.to_bytes(4),
    pa.decimal128(20, 2): lambda n: Decimal(n).scaleb(-2),
    pa.float64(): lambda n: n / 4,
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("count", [1, 300])
def test_every_type_is_found_as_in_a_set(kind: pa.DataType, count: int) -> None:
    chance = random.Random(5)
    made = [KINDS[kind](chance.randrange(1000)) for _ in range(count)]
    asked = [KINDS[kind](n) for n in range(1000)]
    index = KeyIndex([pa.chunked_array([pa.array(made[:7], kind), pa.array(made[7:], kind)])])
    halves = [pa.array(asked[:400], kind), pa.array(asked[400:], kind)]
    found = index.holds([pa.chunked_array(halves)])
    assert found.tolist() == [value in set(made) for value in asked], "seed 5"
    assert len({*zip(made, index.numbers.tolist(), strict=True)}) == len({*made})


def test_null_is_not_a_member() -> None:
    members = members_of(pa.array([0, 5]))
    assert isinstance(members, WholeNumbers)
    assert members.holds(pa.chunked_array([[None, 5, 0, 7]])).tolist() == [False, True, True, False]
