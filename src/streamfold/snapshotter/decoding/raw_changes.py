"""Changes as records state them, and the rules that they must keep before they are typed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.snapshotter.decoding.arrow_rows import given
from streamfold.snapshotter.decoding.records import RecordIntake

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RawChanges:
    """Changes as records state them, one entry per change in every list; images are JSON, or ABSENT."""

    indices: list[int]
    ops: list[str]
    keys: Sequence[msgspec.Raw]
    befores: Sequence[msgspec.Raw]
    afters: Sequence[msgspec.Raw]
    #: Columns that the record itself names as not changed.
    unchanged: list[Sequence[str]]
    txns: list[str | None]

    def only(self, kept: Mask) -> RawChanges:
        if kept.all():
            return self
        chosen = np.flatnonzero(kept).tolist()
        lists: tuple[Sequence[Any], ...] = (
            self.indices, self.ops, self.keys, self.befores, self.afters, self.unchanged, self.txns,
        )  # fmt: skip
        return RawChanges(*([values[i] for i in chosen] for values in lists))


def refuse_malformed(intake: RecordIntake, changes: RawChanges) -> tuple[RawChanges, list[Mask]]:
    """Keep changes with exactly the images that their op needs; refuse the others."""
    ops = pa.array(changes.ops, pa.string())
    key, before, after = (given(raws) for raws in (changes.keys, changes.befores, changes.afters))
    rules = (
        (is_op(ops, "insert", "update", "read") & ~after, "has no row after it"),
        (is_op(ops, "delete") & after, "is a delete and has a row after it"),
        (is_op(ops, "delete") & ~key & ~before, "is a delete without a row"),
        (is_op(ops, "truncate") & (key | before | after), "is a truncate and names a row"),
    )
    kept = np.ones(len(changes.ops), np.bool_)
    for broken, reason in rules:
        for row in np.flatnonzero(broken):
            intake.refuse(changes.indices[row], f"the change {reason}")
        kept &= ~broken
    return changes.only(kept), [images[kept] for images in (key, before, after)]


def is_op(ops: pa.Array, *names: str) -> Mask:
    found: Mask = pc.is_in(ops, value_set=pa.array(names)).to_numpy(zero_copy_only=False)
    return found
