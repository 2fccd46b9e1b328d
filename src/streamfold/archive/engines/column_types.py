"""Column types that each engine holds exactly, and how. Other types are rejected by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from streamfold.archive.formats.conforming import cast_batch
from streamfold.archive.schema import is_decimal
from streamfold.errors import InvalidError

#: Maximum digits of a decimal in all three engines.
DECIMAL_DIGITS = 38
#: The signed type that holds every value of each unsigned type.
_SIGNED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}
#: Integers that Iceberg widens to 32 bits.
_SMALL = (pa.int8(), pa.int16(), pa.uint8(), pa.uint16())


@dataclass(frozen=True, slots=True)
class EngineTypes:
    """How one engine handles types that are not nested."""

    name: str
    #: Returns the engine's type that holds every value of a type, or None if it has none.
    hold: Callable[[pa.DataType], pa.DataType | None]
    #: Characters that a column name may not contain.
    forbidden: str = ""
    #: Maps column names that the engine does not distinguish to the same value.
    folded: Callable[[str], object] = str


@dataclass(frozen=True, slots=True)
class EngineColumns:
    """A table's columns as an engine holds them. Every value remains exact."""

    target: pa.Schema

    @classmethod
    def of(cls, schema: pa.Schema, engine: EngineTypes) -> EngineColumns:
        """Choose a type for each column. Raises InvalidError naming a column that cannot be held."""
        _check_names(schema.names, engine)
        return cls(pa.schema([_engine_field(field, engine, field.name) for field in schema]))

    def cast(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch if batch.schema.equals(self.target) else cast_batch(batch, self.target)


def _check_names(names: Sequence[str], engine: EngineTypes) -> None:
    """Reject names that the engine's readers do not accept or do not distinguish."""
    for name in names:
        if any(character in engine.forbidden for character in name):
            raise InvalidError(
                f"column {name!r} has one of the characters {engine.forbidden!r}, which "
                f"{engine.name} does not allow in names: name the other columns with --column "
                "(columns in Python)"
            )
    if len(set(map(engine.folded, names))) < len(names):
        raise InvalidError(
            f"columns {list(names)} differ only in the case of letters, which {engine.name} ignores: "
            "name some of them with --column (columns in Python)"
        )


def _engine_field(field: pa.Field, engine: EngineTypes, column: str) -> pa.Field:
    return pa.field(field.name, _engine_type(field.type, engine, column), field.nullable)


def _engine_type(kind: pa.DataType, engine: EngineTypes, column: str) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([_engine_field(field, engine, column) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_engine_field(kind.value_field, engine, column))
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, _engine_field(kind.item_field, engine, column))
    column_type = engine.hold(kind)
    if column_type is None:
        why = "has held no value yet" if pa.types.is_null(kind) else f"has type {kind}"
        raise InvalidError(
            f"column {column!r} {why}, which {engine.name} cannot hold exactly: name the other "
            "columns with --column (columns in Python)"
        )
    return column_type


def _decimal(kind: pa.DataType) -> pa.DataType | None:
    fits = kind.precision <= DECIMAL_DIGITS
    return pa.decimal128(kind.precision, kind.scale) if fits else None


def _in_duckdb(kind: pa.DataType) -> pa.DataType | None:
    return _decimal(kind) if is_decimal(kind) else kind


def _in_duckdb_file(kind: pa.DataType) -> pa.DataType | None:
    return None if pa.types.is_null(kind) else _in_duckdb(kind)


def _in_delta(kind: pa.DataType) -> pa.DataType | None:
    if is_decimal(kind):
        return _decimal(kind)
    if pa.types.is_timestamp(kind):
        return _instant(kind) if kind.unit == "us" else None
    if pa.types.is_null(kind) or pa.types.is_time(kind):
        return None
    return _SIGNED.get(kind, kind)


def _in_iceberg(kind: pa.DataType) -> pa.DataType | None:
    if pa.types.is_time(kind):
        return kind if kind.unit == "us" else None
    return pa.int32() if kind in _SMALL else _in_delta(kind)


def _instant(kind: pa.DataType) -> pa.DataType:
    """Return the type of the same instants in UTC, because neither format stores a zone's name."""
    return pa.timestamp("us", "UTC") if kind.tz else kind


def _ascii_lower(name: str) -> bytes:
    return name.encode().lower()


# DuckDB ignores the case of ASCII letters, even between quotes. Spark ignores the case of all.
DUCKDB = EngineTypes("DuckDB", _in_duckdb, folded=_ascii_lower)
#: A database file. Unlike a result, it cannot have columns without a type.
DUCKDB_FILE = EngineTypes("a database of DuckDB", _in_duckdb_file, folded=_ascii_lower)
DELTA = EngineTypes("Delta Lake", _in_delta, forbidden=" ,;{}()\n\t=", folded=str.lower)
ICEBERG = EngineTypes("Iceberg", _in_iceberg)
