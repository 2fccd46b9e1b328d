"""A batch of records during decoding: each becomes a raw change or a dead letter, or is ignored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.errors import InvalidError
from streamfold.snapshotter.decoding.arrow_rows import are_present
from streamfold.snapshotter.decoding.decoder import DEAD_LETTERS

T = TypeVar("T")

#: Header of the records of a snapshot inside the stream, which are not changes.
SNAPSHOT_HEADER = b"streamfold-snapshot"
#: Raised for undecodable bodies, such as too deeply nested ones.
UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
Mask = npt.NDArray[np.bool_]


@dataclass(slots=True)
class RecordIntake:
    """A batch of records; `indices` are those to decode."""

    seq_nums: npt.NDArray[np.int64]
    bodies: list[bytes]
    headers: pa.Array | None
    indices: list[int]
    letters: dict[int, str] = field(default_factory=dict)
    ignored: int = 0

    @classmethod
    def of(cls, records: pa.RecordBatch | pa.Table) -> RecordIntake:
        """Return the batch, with stream commands and snapshot parts ignored."""
        table = pa.table(records) if isinstance(records, pa.RecordBatch) else records
        seq_nums = _column(table, "seq_num").cast(pa.int64()).to_numpy(zero_copy_only=False)
        if len(seq_nums) > 1 and (np.diff(seq_nums) <= 0).any():
            raise InvalidError("seq_num does not grow from record to record: sort the batch by it")
        bodies = pc.fill_null(_column(table, "body").cast(pa.binary()), b"").to_pylist()
        headers = _column(table, "headers") if "headers" in table.column_names else None
        apart = _not_of_the_table(headers, len(bodies))
        indices = np.flatnonzero(~apart).tolist()
        return cls(seq_nums, bodies, headers, indices, ignored=len(bodies) - len(indices))

    def ignore(self, is_nothing: Callable[[bytes], bool]) -> None:
        """Ignore records by their body."""
        indices = [index for index in self.indices if not is_nothing(self.bodies[index])]
        self.ignored += len(self.indices) - len(indices)
        self.indices = indices

    def refuse(self, index: int, reason: str) -> None:
        """Make a record a dead letter; the first reason stays."""
        self.letters.setdefault(index, reason)

    def parsed(self, decode: Callable[[bytes], T]) -> tuple[list[int], list[T]]:
        """Decode the records, with the index of each; undecodable ones become dead letters."""
        every = len(self.indices) == len(self.bodies)
        bodies = self.bodies if every else [self.bodies[index] for index in self.indices]
        try:
            return self.indices, list(map(decode, bodies))
        except UNREADABLE:
            return self._parsed_singly(bodies, decode)

    def _parsed_singly(
        self, bodies: Sequence[bytes], decode: Callable[[bytes], T]
    ) -> tuple[list[int], list[T]]:
        indices, messages = [], []
        for index, body in zip(self.indices, bodies, strict=True):
            try:
                messages.append(decode(body))
                indices.append(index)
            except UNREADABLE as error:
                self.refuse(index, str(error) or type(error).__name__)
        return indices, messages

    def header_values(self, name: bytes) -> list[bytes | None]:
        """Return each record's last value of a header."""
        of_records: list[bytes | None] = [None] * len(self.bodies)
        if self.headers is None:
            return of_records
        pairs = self.headers.flatten()
        chosen = pc.equal(pairs.field("name").cast(pa.binary()), name)
        owners = pc.list_parent_indices(self.headers).filter(chosen).to_pylist()
        values = pairs.field("value").cast(pa.binary()).filter(chosen).to_pylist()
        for owner, value in zip(owners, values, strict=True):
            of_records[owner] = value
        return of_records

    def dead_letters(self) -> pa.Table:
        indices = sorted(self.letters)
        columns: list[Any] = [
            pa.array([int(self.seq_nums[index]) for index in indices], pa.int64()),
            pa.array([self.letters[index] for index in indices], pa.string()),
            pa.array([self.bodies[index] for index in indices], pa.binary()),
        ]
        return pa.table(columns, schema=DEAD_LETTERS)


def _column(table: pa.Table, name: str) -> pa.Array:
    if name not in table.column_names:
        raise InvalidError(f"records have no column {name!r}, only {table.column_names}")
    column = table.column(name)
    return (
        column.chunk(0)
        if column.num_chunks == 1
        else pa.concat_arrays(column.chunks or [pa.array([], column.type)])
    )


def _not_of_the_table(headers: pa.Array | None, count: int) -> npt.NDArray[np.bool_]:
    """Return which records are commands, with one nameless header, or parts of a snapshot."""
    apart = np.zeros(count, np.bool_)
    if headers is None or not len(headers.flatten()):
        return apart
    names = headers.flatten().field("name").cast(pa.binary())
    marked = pc.or_(pc.equal(pc.binary_length(names), 0), pc.equal(names, SNAPSHOT_HEADER))
    apart[pc.list_parent_indices(headers).filter(marked).to_numpy()] = True
    return apart


@dataclass(frozen=True, slots=True)
class RawChanges:
    """Changes as recorded, one entry per change in every list; images are JSON or ABSENT."""

    indices: list[int]
    ops: list[str]
    keys: Sequence[msgspec.Raw]
    befores: Sequence[msgspec.Raw]
    afters: Sequence[msgspec.Raw]
    #: Columns that the record declares unchanged.
    unchanged: list[Sequence[str]]
    txns: list[str | None]

    def only(self, mask: Mask) -> RawChanges:
        if mask.all():
            return self
        chosen = np.flatnonzero(mask).tolist()
        lists: tuple[Sequence[Any], ...] = (
            self.indices, self.ops, self.keys, self.befores, self.afters, self.unchanged, self.txns,
        )  # fmt: skip
        return RawChanges(*([values[i] for i in chosen] for values in lists))


def refuse_malformed(intake: RecordIntake, changes: RawChanges) -> tuple[RawChanges, list[Mask]]:
    """Return the changes with the images that their op requires; reject the others."""
    ops = pa.array(changes.ops, pa.string())
    key, before, after = (
        are_present(raws) for raws in (changes.keys, changes.befores, changes.afters)
    )
    rules = (
        (is_op(ops, "insert", "update", "read") & ~after, "has no row after it"),
        (is_op(ops, "delete") & after, "is a delete and has a row after it"),
        (is_op(ops, "delete") & ~key & ~before, "is a delete without a row"),
        (is_op(ops, "truncate") & (key | before | after), "is a truncate and names a row"),
    )
    mask = np.ones(len(changes.ops), np.bool_)
    for broken, reason in rules:
        for row in np.flatnonzero(broken):
            intake.refuse(changes.indices[row], f"the change {reason}")
        mask &= ~broken
    return changes.only(mask), [images[mask] for images in (key, before, after)]


def is_op(ops: pa.Array | pa.ChunkedArray, *names: str) -> Mask:
    mask: Mask = pc.is_in(ops, value_set=pa.array(names)).to_numpy(zero_copy_only=False)
    return mask
