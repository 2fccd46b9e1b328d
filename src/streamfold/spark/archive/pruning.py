"""Buckets that a key can be in: a read of a few keys opens the files of their buckets alone.

That needs the writer's word that keys are in buckets by the hash of `spark.buckets`: archives
may be bucketed in other ways, and then every bucket is read. The word is a field of the parts.
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

#: Keys that are looked up one by one: beyond these, most buckets are wanted anyway.
KEYS_MAX = 1024


def is_hashed(artifact: ChosenFiles) -> bool:
    """Whether the writer says that the parts hold their keys by our hash."""
    return all(
        part.bucket is not None and part.extra.get(BUCKETING) == SPLITMIX64
        for part in artifact.parts
    )


def wanted_buckets(
    conditions: Sequence[Condition], schema: TableSchema, artifacts: Sequence[ChosenFiles]
) -> set[int] | None:
    """The buckets that hold all keys that pass, None if every bucket may hold some.

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
    """The key fields of all keys that pass, column by column."""
    told = {c.column: c.values for c in conditions if c.values is not None}
    choices = [told.get(name) for name in schema.key_fields]
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
        return None  # Spark has the column in a type that does not lead back to the key's


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    whole = pa.types.is_integer(kind)
    return pa.array([int(value) for value in values] if whole else values, kind)
