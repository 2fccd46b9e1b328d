"""The option `filters`: column conditions, applied exactly to rows and also used to skip files.

Filters are an option because Spark 4.3 stores the filters it pushes to a Python source on the
DataFrame, and applies an earlier query's filters to every later query (upstream defect 25).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from streamfold.spark.errors import OptionError

_MASKS: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "in": lambda column, values: pc.is_in(column, value_set=values),
    "not in": lambda column, values: pc.and_(
        column.is_valid(), pc.invert(pc.is_in(column, value_set=values))
    ),
    "is null": lambda column, _: column.is_null(),
    "is not null": lambda column, _: column.is_valid(),
    "starts with": lambda column, value: pc.starts_with(column, value.as_py()),
}
_NULLS = ("is null", "is not null")
_LISTS = ("in", "not in")
_RULE = (
    'must be JSON such as [["id", "in", [5, 7]], ["name", "is not null"]], all of which must hold; '
    f"the tests are {', '.join(_MASKS)}"
)


@dataclass(frozen=True, slots=True)
class Condition:
    """One test of one Spark column. `value` is a Python value or a tuple of Python values."""

    column: str
    test: str
    value: Any = None

    def mask(self, batch: pa.RecordBatch) -> Any:
        """Return a mask that is true for rows that pass. A null passes only `is null`."""
        column = batch.column(self.column)
        return pc.fill_null(_MASKS[self.test](column, self._operand(column.type)), False)

    @property
    def values(self) -> tuple[Any, ...] | None:
        """The only values that pass, or None if the test does not list values."""
        if self.test == "in":
            return tuple(self.value)
        return (self.value,) if self.test == "=" else None

    def may_hold(self, least: Any, most: Any) -> bool:
        """Return whether any value from `least` to `most`, both inclusive, may pass."""
        if (values := self.values) is not None:
            return any(least <= value <= most for value in values)
        match self.test:
            case "<":
                return bool(least < self.value)
            case "<=":
                return bool(least <= self.value)
            case ">":
                return bool(most > self.value)
            case ">=":
                return bool(most >= self.value)
            case "starts with":
                return bool(most >= self.value and least[: len(self.value)] <= self.value)
        return True

    def check(self, kind: pa.DataType) -> None:
        """Reject a test whose result could differ from Spark's."""
        types = pa.types
        if self.test in _NULLS:
            return
        if types.is_nested(kind) or types.is_floating(kind):
            raise ValueError(f"{kind} cannot be compared here: use where(...) instead")
        if self.test == "starts with" and not types.is_string(kind):
            raise ValueError(f"{kind} is not text")
        if types.is_boolean(kind) and self.test not in ("=", "!=", *_LISTS):
            raise ValueError(f"{kind} has no order")
        self._operand(kind)

    def _operand(self, kind: pa.DataType) -> Any:
        if self.test in _NULLS:
            return None
        return pa.array(self.value, kind) if self.test in _LISTS else pa.scalar(self.value, kind)


def parse_conditions(text: str, columns: pa.Schema) -> tuple[Condition, ...]:
    """Parse conditions on these columns. Raises OptionError if they are invalid."""
    try:
        entries = json.loads(text, parse_float=Decimal)
    except ValueError:
        entries = None
    if not isinstance(entries, list):
        raise OptionError("filters", f"is {text[:80]!r}, it {_RULE}")
    return tuple(_parsed(entry, columns) for entry in entries)


def matching(batch: pa.RecordBatch, conditions: Sequence[Condition]) -> pa.RecordBatch:
    """Return the rows that pass all conditions."""
    if not conditions:
        return batch
    return batch.filter(reduce(pc.and_, [condition.mask(batch) for condition in conditions]))


def _parsed(entry: object, columns: pa.Schema) -> Condition:
    match entry:
        case [str(name), "is null" | "is not null" as test]:
            value: Any = None
        case [str(name), "in" | "not in" as test, list(value)]:
            pass
        case [str(name), str(test), str() | int() | Decimal() as value] if (
            test in _MASKS and test not in (*_LISTS, *_NULLS)
        ):
            pass
        case _:
            raise OptionError("filters", f"has {entry!r}, it {_RULE}")
    if columns.names.count(name) != 1:
        raise OptionError("filters", f"names {name!r}, which is not one of {columns.names}")
    kind = columns.field(name).type
    try:
        condition = Condition(name, test, _typed(value, kind))
        condition.check(kind)
    except (pa.ArrowException, TypeError, ValueError, ArithmeticError) as error:
        raise OptionError("filters", f"has {entry!r}, and the column is {kind}: {error}") from None
    return condition


def _typed(value: Any, kind: pa.DataType) -> Any:
    """Convert a JSON value to the column's Python type.

    Times are ISO text, decimals text or numbers, and bytes base64.
    """
    types = pa.types
    if isinstance(value, list):
        if None in value:
            raise ValueError("null cannot be compared: use is null")
        return tuple(_typed(item, kind) for item in value)
    if value is None:
        return None
    if isinstance(value, bool) != types.is_boolean(kind):
        raise ValueError(f"{value!r} has another type")
    if types.is_date(kind):
        return date.fromisoformat(value)
    if types.is_timestamp(kind):
        moment = datetime.fromisoformat(value)
        if (moment.tzinfo is None) != (kind.tz is None):
            raise ValueError(f"{value!r} must be written {'with' if kind.tz else 'without'} a zone")
        return moment
    if types.is_decimal(kind):
        return Decimal(value)
    return base64.b64decode(value, validate=True) if types.is_binary(kind) else value
