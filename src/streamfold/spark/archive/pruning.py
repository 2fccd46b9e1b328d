"""Finds the buckets of wanted keys, so that a read of a few keys opens only the files of these.

This needs the writer's statement, a field of the parts, that buckets follow the hash of
`spark.buckets`. Archives that are bucketed otherwise are read in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pyarrow as pa

from streamfold.archive.read.decoding import ChosenFiles
from streamfold.archive.schema.table_schema import TableSchema
from streamfold.spark.archive.filters import Condition
from streamfold.spark.buckets import BUCKETING, SPLITMIX64, bucket_numbers

#: The most keys to look up one by one: beyond it, most buckets are wanted anyway.
KEYS_MAX = 1024


def is_hashed(artifact: ChosenFiles) -> bool:
    """Return whether the writer states that our hash chose the parts' buckets."""
    return all(
        part.bucket is not None and part.extra.get(BUCKETING) == SPLITMIX64
        for part in artifact.parts
    )


def wanted_buckets(
    conditions: Sequence[Condition], schema: TableSchema, artifacts: Sequence[ChosenFiles]
) -> set[int] | None:
    """Return the buckets that hold all keys that pass; None if any bucket may.

    `artifacts` are the base and its diffs.
    """
    base = {part.bucket for part in artifacts[0].parts}
    count = len(base)
    known = base == set(range(count)) and count & (count - 1) == 0
    if not known or not all(map(is_hashed, artifacts)):
        return None
    keys = _wanted_keys(conditions, schema)
    if keys is None:
        return None
    return set(bucket_numbers(keys, count).tolist())


def _wanted_keys(conditions: Sequence[Condition], schema: TableSchema) -> list[pa.Array] | None:
    """Return the key fields of all keys that pass, column by column."""
    listed = {c.column: c.values for c in conditions if c.values is not None}
    choices = [listed.get(name) for name in schema.key_fields]
    size = 1
    for choice in choices:
        size *= KEYS_MAX + 1 if choice is None else len(choice)
    if not choices or size > KEYS_MAX:
        return None
    keys = list(product(*(choice or () for choice in choices)))
    kinds = [schema.arrow.field(name).type for name in schema.key_fields]
    try:
        return [_column([key[i] for key in keys], kind) for i, kind in enumerate(kinds)]
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None  # Spark's type for the column does not convert back to the key's


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    whole = pa.types.is_integer(kind)
    return pa.array([int(value) for value in values] if whole else values, kind)
