"""Key buckets never change, because archives outlive the code that reads them."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from bench.folding import rebase_with
from bench.table_archives import manifest_of, write_archive
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from streamfold.archive.buckets import (
    BUCKETS_MAX,
    bucket_count,
    bucket_numbers,
    hash_words,
)
from streamfold.archive.read.layers import Stack
from streamfold.errors import InvalidError

MOMENT = datetime(2026, 6, 3, 12, tzinfo=UTC)


def golden(values: list[object], kind: pa.DataType) -> list[int]:
    return [int(word) for word in hash_words([pa.array(values, kind)])]


def test_hashes_are_those_of_the_first_version() -> None:
    found = {
        "int64": golden([0, 1, -1, 2**63 - 1], pa.int64()),
        "string": golden(["", "a", "abcdefgh", "abcdefghi", "grün"], pa.string()),
        "binary": golden([b"", b"\0", b"\0\0"], pa.binary()),
        "bool": golden([False, True], pa.bool_()),
        "date": golden([date(2026, 6, 3)], pa.date32()),
        "timestamp": golden([MOMENT], pa.timestamp("us", "UTC")),
        "decimal": golden([Decimal("1.50"), Decimal("-0.0000001")], pa.decimal128(20, 8)),
    }
    assert found == GOLDEN


def test_a_key_keeps_its_bucket_when_its_column_widens() -> None:
    numbers = pa.array([0, 1, 200, 255], pa.uint8())
    wider = [numbers.cast(kind) for kind in (pa.uint16(), pa.uint64(), pa.int16(), pa.int64())]
    for column in wider:
        assert (hash_words([column]) == hash_words([numbers])).all()
    prices = pa.array([Decimal("1.5"), Decimal("100"), Decimal("-2.25")], pa.decimal128(10, 2))
    wide = prices.cast(pa.decimal256(50, 12))
    assert (hash_words([prices]) == hash_words([wide])).all()


@given(st.lists(st.text(max_size=40), min_size=1), st.integers(0, 5))
def test_a_slice_hashes_as_its_values_do(values: list[str], start: int) -> None:
    whole = pa.array(values, pa.string())
    parts = whole.slice(min(start, len(values) - 1))
    singly = [int(hash_words([pa.array([value], pa.string())])[0]) for value in parts.to_pylist()]
    assert hash_words([parts]).tolist() == singly


def test_a_bucket_splits_into_two_without_the_others() -> None:
    keys = [pa.array(range(10_000), pa.int64()), pa.array(["x", "y"] * 5000)]
    eight, sixteen = bucket_numbers(keys, 8), bucket_numbers(keys, 16)
    assert (sixteen % 8 == eight).all()
    assert np.bincount(sixteen).min() > 10_000 / 16 * 0.8
    assert not (bucket_numbers(list(reversed(keys)), 16) == sixteen).all()


@pytest.mark.parametrize("count", [0, 3, -4])
def test_a_count_that_is_not_a_power_of_two_is_refused(count: int) -> None:
    with pytest.raises(InvalidError, match="power of two"):
        bucket_numbers([pa.array([1])], count)


def test_the_count_follows_the_size_and_never_falls() -> None:
    assert [bucket_count(size, bucket_bytes=100) for size in (0, 100, 101, 399)] == [1, 1, 2, 4]
    assert bucket_count(1, least=8) == 8
    assert bucket_count(1 << 50) == BUCKETS_MAX


def test_the_archives_of_the_fold_benchmark_are_folded_bucket_by_bucket(tmp_path: Path) -> None:
    asyncio.run(write_archive(tmp_path, 100, [np.arange(0, 100, 3)], buckets=4))
    stack = Stack.of(manifest_of(tmp_path))
    assert (stack.buckets, stack.is_bucketed) == (4, True)
    assert all(diff.is_bucketed for diff in stack.diffs)


def test_the_fold_benchmark_folds_by_tasks_of_spark(spark: SparkSession, tmp_path: Path) -> None:
    asyncio.run(write_archive(tmp_path, 100, [np.arange(0, 100, 3)], buckets=4))
    assert rebase_with(spark, tmp_path) == manifest_of(tmp_path).base.row_count
    assert manifest_of(tmp_path).epoch == 2


GOLDEN: dict[str, list[int]] = {
    "binary": [12035550249420947055, 12793040940332582595, 1825907084063272085],
    "bool": [12035550249420947055, 6791897765849424158],
    "date": [11360943663826334979],
    "decimal": [17170253676513643562, 10123738431655934300],
    "int64": [12035550249420947055, 6791897765849424158, 6755974106381971767, 7622863033291099422],
    "string": [
        12035550249420947055,
        14291139579252193271,
        13225188406043880956,
        5313049184131344851,
        12638797476041124089,
    ],
    "timestamp": [7536737691483110810],
}
