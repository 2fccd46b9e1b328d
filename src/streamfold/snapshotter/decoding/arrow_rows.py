"""Reads JSON rows with Arrow, which gives up on anything rare, new or wrong.

`value_reader` then reads them again; what both can read becomes the same columns.
"""

from __future__ import annotations

import base64
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from streamfold.archive.formats.conforming import has_map
from streamfold.archive.formats.jsonl.json_text import begin_as_objects
from streamfold.archive.formats.jsonl.json_values import readable_type, restored
from streamfold.archive.schema import is_decimal
from streamfold.snapshotter.decoding.json_values import PLAIN, Hint

#: Bytes of lines that Arrow reads at once, with several times as much memory.
BLOCK_BYTES = 1 << 20
#: An absent row; others are JSON that is not parsed yet.
ABSENT = msgspec.Raw(b"null")


Mask = npt.NDArray[np.bool_]


class NotPlainError(Exception):
    """Arrow cannot read the rows: something is rare, new or wrong."""


@dataclass(frozen=True, slots=True)
class RowReading:
    """How to read a decoder's rows."""

    #: Stands for a value that the source did not send because it did not change.
    marker: str | None = None
    #: The unit of times without zone that are numbers; None if they are text.
    time_unit: str | None = None
    #: The source's hints about columns, by name.
    hints: dict[str, Hint] = field(default_factory=dict)

    def hint(self, column: pa.Field) -> Hint:
        hint = self.hints.get(column.name)
        if hint is not None:
            return hint
        return Hint(unit=self.time_unit) if self.time_unit else PLAIN

    def is_counted(self, kind: pa.DataType) -> bool:
        """Return whether values of this type are written as whole numbers."""
        if self.time_unit is None or not pa.types.is_temporal(kind):
            return False
        return not (pa.types.is_timestamp(kind) and kind.tz)

    @property
    def markers(self) -> tuple[str, ...]:
        """The marker as text, and as it appears in columns of bytes."""
        if self.marker is None:
            return ()
        return self.marker, base64.b64encode(self.marker.encode()).decode()


@dataclass(slots=True)
class Images:
    """Rows as columns, null where a row is absent, and the columns that the source did not send."""

    columns: dict[str, pa.Array]
    present: Mask
    #: By column, which rows leave it unchanged.
    unsent: dict[str, Mask] = field(default_factory=dict)


def are_present(raws: Sequence[msgspec.Raw]) -> Mask:
    """Return which rows are present."""
    # Usually all or none are, and counting is cheap.
    absent = raws.count(ABSENT)
    if absent in (0, len(raws)):
        return np.full(len(raws), absent == 0)
    return np.fromiter(map(operator.ne, raws, repeat(ABSENT)), np.bool_, len(raws))


def read_plain(
    raws: Sequence[msgspec.Raw], present: Mask, fields: Sequence[pa.Field], reading: RowReading
) -> Images:
    """Read rows with Arrow; NotPlainError if a value or name does not match the fields."""
    lines = raws if present.all() else [*compress(raws, present)]
    if not lines:
        return Images({f.name: pa.nulls(len(raws), f.type) for f in fields}, present)
    if reading.hints or any(has_map(f.type) for f in fields):
        raise NotPlainError
    table = _parsed(lines, fields, reading)
    images = Images({}, present)
    indices = _indices(present)
    for column in fields:
        values = table.column(column.name).combine_chunks()
        values = _without_markers(values, column.name, images, reading, indices)
        typed = _typed(values, column.type, reading)
        images.columns[column.name] = typed if indices is None else typed.take(indices)
    return images


def _parsed(
    lines: Sequence[msgspec.Raw], fields: Sequence[pa.Field], reading: RowReading
) -> pa.Table:
    block = b"\n".join(lines)
    if block.count(b"\n") >= len(lines):
        # JSON has line ends only between values, where a space means the same.
        block = b"\n".join([bytes(line).replace(b"\n", b" ") for line in lines])
    if not begin_as_objects(block):
        raise NotPlainError
    columns = pa.schema([pa.field(f.name, _json_type(f.type, reading)) for f in fields])
    try:
        table = _read_json(block, columns)
        table.validate(full=True)  # Arrow's reader accepts text that is not UTF-8
    except (pa.ArrowException, ValueError):
        raise NotPlainError from None
    try:
        expected = _is_expected(list(table.schema), list(columns))
    except RecursionError:  # nested deeper than any column
        expected = False
    if len(table) != len(lines) or not expected:
        raise NotPlainError
    return table.select(columns.names)


def _read_json(block: bytes, columns: pa.Schema) -> pa.Table:
    """Read the block strictly, which is quicker, or else allowing new fields."""
    failure: pa.ArrowInvalid
    size = BLOCK_BYTES
    for others in ("error", "infer"):
        parse = pj.ParseOptions(explicit_schema=columns, unexpected_field_behavior=others)
        try:
            # One thread: a Spark task has one core.
            options = pj.ReadOptions(use_threads=False, block_size=size)
            return pj.read_json(pa.BufferReader(block), options, parse)
        except pa.ArrowInvalid as error:
            failure = error
            size = len(block) + 1  # one block, in case a row is longer than a block
    raise failure


def _json_type(kind: pa.DataType, reading: RowReading) -> pa.DataType:
    if reading.is_counted(kind):
        return pa.int64()
    # Arrow reads decimals as text and as numbers; a marker is only text.
    return kind if is_decimal(kind) and reading.marker is None else readable_type(kind)


def _is_expected(fields: Sequence[pa.Field], expected: Sequence[pa.Field]) -> bool:
    """Return whether all fields are expected: a new one is a column, even if it is null."""
    kinds = {f.name: f.type for f in expected}
    return all(f.name in kinds and _fits(f.type, kinds[f.name]) for f in fields)


def _fits(kind: pa.DataType, expected: pa.DataType) -> bool:
    if kind == expected:
        return True
    if pa.types.is_list(kind) and pa.types.is_list(expected):
        return _fits(kind.value_type, expected.value_type)
    # `value_reader` handles structs with extra fields.
    return False


def _indices(present: Mask) -> pa.Array | None:
    """Return each row's index among the present rows; None if all are present."""
    if present.all():
        return None
    return pa.array(np.cumsum(present) - 1, mask=~present)


def _without_markers(
    column: pa.Array, name: str, images: Images, reading: RowReading, indices: pa.Array | None
) -> pa.Array:
    """Return the column with null for values that were not sent."""
    if reading.marker is None:
        return column
    texts = pa.array(reading.markers)
    if pa.types.is_nested(column.type):
        is_texts = pa.types.is_list(column.type) and pa.types.is_string(column.type.value_type)
        if is_texts and pc.any(pc.is_in(column.flatten(), value_set=texts)).as_py():
            raise NotPlainError
        return column
    if not pa.types.is_string(column.type):
        return column
    marked = pc.is_in(column, value_set=texts)
    if not pc.any(marked).as_py():
        return column
    rows = marked if indices is None else pc.fill_null(marked.take(indices), False)
    images.unsent[name] = rows.to_numpy(zero_copy_only=False)
    return pc.if_else(marked, None, column)


def _typed(column: pa.Array, kind: pa.DataType, reading: RowReading) -> pa.Array:
    try:
        if not reading.is_counted(kind):
            return restored(column, kind)
        if pa.types.is_date(kind):
            return column.cast(pa.int32()).cast(kind)
        counted = column.cast(pa.timestamp(reading.time_unit)).cast(pa.timestamp(kind.unit))
        return counted.cast(kind) if pa.types.is_timestamp(kind) else _time_of(counted, kind)
    except (pa.ArrowException, ValueError):
        raise NotPlainError from None


def _time_of(counted: pa.Array, kind: pa.DataType) -> pa.Array:
    numbers = counted.cast(pa.int64())
    if pc.any(pc.less(numbers, 0)).as_py():
        raise NotPlainError
    return numbers.cast(kind)
