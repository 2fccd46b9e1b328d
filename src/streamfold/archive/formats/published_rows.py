"""Keys and rows as Laredo's reader needs them, and types for files without a schema.

Laredo's reader identifies rows by the text of their keys: Go's `%v` for one key field, `[a b]` for
several. It makes the text for a base's rows itself, from values as its decoders return them, and
takes the text for changes from the file. So the file must have the text that Go prints, such as
1e+06 for the integer 1000000, which Go decodes to a double. Keys that could have the same text as
another key are rejected, because one row would replace the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.conforming import struct_children
from streamfold.archive.formats.jsonl.json_text import join, plain_text
from streamfold.archive.formats.jsonl.json_values import EXACT_IN_DOUBLE
from streamfold.archive.schema import ACTIONS, TableSchema
from streamfold.errors import InvalidError

#: Maximum digits of integers that Go prints without an exponent.
_PLAIN_DIGITS = 6
#: Maximum characters of a value shown in a message.
_SHOWN = 80


def published_key_text(key: pa.Array, *, exact: bool) -> pa.Array:
    """Return every key's text, null where the key is null. Raises InvalidError for ambiguous keys.

    `exact` says whether the format writes integers that a double cannot hold as text.
    """
    children = struct_children(key)
    _check_keys(list(key.type), children, exact)
    texts = [_printed(child) for child in children]
    text = texts[0]
    if len(texts) > 1:
        text = join("[", pc.binary_join_element_wise(*texts, " "), "]")
    return pc.if_else(key.is_valid(), text, None)


def check_published_rows(schema: TableSchema, rows: pa.RecordBatch, *, exact: bool) -> None:
    """Reject rows that Laredo's reader could mistake for each other."""
    fields = [schema.arrow.field(name) for name in schema.key_fields]
    _check_keys(fields, [rows[field.name] for field in fields], exact)


def check_published_size(encoded: pa.Array, limit: int, form: str) -> None:
    """Reject a row or change with more bytes than Laredo's reader accepts."""
    longest = pc.max(pc.binary_length(encoded)).as_py() or 0
    if longest >= limit:
        raise InvalidError(
            f"a row or change has {longest} bytes as {form}, and Laredo's reader takes less than "
            f"{limit}: use layout streamfold for this table"
        )


def _check_keys(fields: Sequence[pa.Field], columns: Sequence[pa.Array], exact: bool) -> None:
    texts = sum(pa.types.is_string(field.type) for field in fields)
    for field, column in zip(fields, columns, strict=True):
        if texts > 1 and pa.types.is_string(field.type):
            spaced = column.filter(pc.match_substring(column, " "))
            _refuse(field, spaced, "a space between two texts of a key", "use layout streamfold")
        if not exact and pa.types.is_integer(field.type):
            beyond = column.filter(pc.invert(_fits_double(column)))
            way = "write protobuf without jsonl, or use layout streamfold"
            _refuse(field, beyond, "an integer beyond 2^53 in JSON Lines", way)


def _refuse(field: pa.Field, values: pa.Array, what: str, way_out: str) -> None:
    if len(values):
        value = str(values[0].as_py())[:_SHOWN]
        raise InvalidError(
            f"key field {field.name!r} holds {value!r}: Laredo's reader may take {what} for another "
            f"key; {way_out}"
        )


def _fits_double(column: pa.Array) -> pa.Array:
    if column.type.bit_width < 64:
        return pc.is_valid(column)
    fits = pc.less_equal(column, pa.scalar(EXACT_IN_DOUBLE, column.type))
    if pa.types.is_signed_integer(column.type):
        fits = pc.and_(fits, pc.greater_equal(column, pa.scalar(-EXACT_IN_DOUBLE, column.type)))
    return fits


def _printed(column: pa.Array) -> pa.Array:
    """Return every value's text. An integer's is that of the double to which Go decodes it."""
    text, _ = plain_text(column)
    if not pa.types.is_integer(column.type) or not len(column):
        return text
    digits = pc.utf8_ltrim(text, "-")
    lengths = pc.utf8_length(digits)
    if (pc.max(lengths).as_py() or 0) <= _PLAIN_DIGITS:
        return text
    mantissa = pc.utf8_rtrim(digits, "0")
    rest = pc.utf8_slice_codeunits(mantissa, 1, None)
    long = join(
        pc.if_else(pc.starts_with(text, "-"), "-", ""),
        pc.utf8_slice_codeunits(mantissa, 0, 1),
        pc.if_else(pc.equal(rest, ""), "", "."),
        rest,
        "e+",
        pc.utf8_lpad(pc.subtract(lengths, 1).cast(pa.string()), 2, "0"),
    )
    # Beyond 2^53 the format stores the digits as text.
    is_long = pc.and_(pc.greater(lengths, _PLAIN_DIGITS), _fits_double(column))
    return pc.if_else(is_long, long, text)


def inferred_schema(blocks: Iterable[Sequence[dict[str, Any]]]) -> pa.Schema:
    """Return the columns of all rows, in the order of their first appearance.

    Integers stay integers. One beyond signed 64 bits raises ArtifactCorruptError. A column that
    mixes integers with other numbers becomes double. Types are not guessed from text: dates and
    numbers in strings stay strings.
    """
    schema = pa.schema([])
    for rows in blocks:
        try:
            block_schema = pa.Table.from_pylist([_merged_names(rows), *rows]).schema
            schema = pa.unify_schemas([schema, block_schema], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise ArtifactCorruptError(
                f"no type fits all values of a column, read it with a schema: {error}"
            ) from None
    return pa.schema([pa.field(f.name, _without_null(f.type)) for f in schema])


def _merged_names(rows: Sequence[dict[str, Any]]) -> dict[str, None]:
    """Return a row of nulls with every name, because Arrow looks for columns only in the first row."""
    return dict.fromkeys(name for row in rows for name in row)


def _without_null(kind: pa.DataType) -> pa.DataType:
    """Return the type, with string in place of null for columns that hold only nulls."""
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_null(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _without_null(f.type)) for f in kind])
    return kind


def inferred_batch(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=schema)


def selected(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Return these columns of an inferred schema, in the requested order."""
    if columns is None:
        return schema
    if not columns or any(name not in schema.names for name in columns):
        raise InvalidError(
            f"columns {list(columns)} are not all there: name some of {schema.names}"
        )
    return pa.schema([schema.field(name) for name in columns])


def inferred_changes(
    objects: Callable[[], Iterable[list[dict[str, Any]]]],
) -> Iterator[pa.RecordBatch]:
    """Yield published changes `action, key, old, new`.

    Types must be known for the whole file before the first change is yielded, so `objects` is
    called twice and the file read twice.
    """

    def changes() -> Iterator[list[dict[str, Any]]]:
        for rows in objects():
            yield [foreign_change(row) for row in rows]

    images = ([r[n] for r in rows for n in ("before", "after") if r[n]] for rows in changes())
    schema = foreign_changes_schema(inferred_schema(images))
    for rows in changes():
        yield inferred_batch(rows, schema)


def foreign_change(row: dict[str, Any]) -> dict[str, Any]:
    """Return a change as written, without a schema. Its key is the published text."""
    action, key = row.get("action"), row.get("key")
    before, after = row.get("old"), row.get("new")
    if action not in ACTIONS:
        raise ArtifactCorruptError(f"action {action!r} is unknown: it must be one of {ACTIONS}")
    for image in (before, after):
        if not isinstance(image, dict | None):
            raise ArtifactCorruptError("old and new are objects, or absent")
    named = None if action == "TRUNCATE" else {"key": key}
    return {"action": action, "key": named, "before": before, "after": after}


def foreign_changes_schema(row: pa.Schema) -> pa.Schema:
    """Return the Arrow schema of changes whose key fields are unknown."""
    image = pa.struct(list(row))
    return pa.schema(
        [
            pa.field("action", pa.string(), nullable=False),
            pa.field("key", pa.struct([pa.field("key", pa.string())])),
            pa.field("before", image),
            pa.field("after", image),
        ]
    )
