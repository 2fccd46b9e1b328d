"""Decodes Debezium's JSON changes, with or without a schema beside the payload.

Reads `before`, `after`, `op` and the transaction. The order of the stream counts, not positions and
times of the source. Tombstones, transaction markers and messages are not changes. A value that the
database did not send leaves its column unchanged.

Transactions are those of `provide.transaction.metadata`: `transaction` names the one a change belongs
to, and BEGIN and END records mark its ends. Their counts cover all tables, so they are not used.
`source.txId` alone does not tell where a transaction ends.

A schema gives the types of columns and the units of numbers. Without one, dates are days, and other
times without zone whole numbers in `time_unit`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

import msgspec
import pyarrow as pa

from streamfold.archive.schema import TableSchema
from streamfold.snapshotter.decoding.arrow_rows import ABSENT, RowReading
from streamfold.snapshotter.decoding.assembly import STOP, Assembly
from streamfold.snapshotter.decoding.decoder import (
    Decoded,
    DecoderOptions,
    DecoderType,
    under_schema,
)
from streamfold.snapshotter.decoding.envelope import OP_OF_LETTER
from streamfold.snapshotter.decoding.json_values import Hint
from streamfold.snapshotter.decoding.records import RawChanges, RecordIntake
from streamfold.snapshotter.transactions import OUTSIDE, Membership, tail_of

_PLAIN = {
    "boolean": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float32(),
    "float32": pa.float32(),
    "double": pa.float64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
}

_CONNECT, _DEBEZIUM = "org.apache.kafka.connect.data", "io.debezium.time"
_TIMES = {
    f"{_CONNECT}.Date": Hint(pa.date32()),
    f"{_CONNECT}.Time": Hint(pa.time64("us"), "ms"),
    f"{_CONNECT}.Timestamp": Hint(pa.timestamp("us"), "ms"),
    f"{_DEBEZIUM}.Date": Hint(pa.date32()),
    f"{_DEBEZIUM}.Time": Hint(pa.time64("us"), "ms"),
    f"{_DEBEZIUM}.MicroTime": Hint(pa.time64("us"), "us"),
    f"{_DEBEZIUM}.NanoTime": Hint(pa.time64("ns"), "ns"),
    f"{_DEBEZIUM}.Timestamp": Hint(pa.timestamp("us"), "ms"),
    f"{_DEBEZIUM}.MicroTimestamp": Hint(pa.timestamp("us"), "us"),
    f"{_DEBEZIUM}.NanoTimestamp": Hint(pa.timestamp("ns"), "ns"),
    f"{_DEBEZIUM}.ZonedTimestamp": Hint(pa.timestamp("us", "UTC")),
}
_DECIMAL = f"{_CONNECT}.Decimal"
#: Digits of a decimal without a declared precision: all that 128 bits hold.
_DIGITS_DEFAULT = 38
#: A decimal with a scale in every value, such as PostgreSQL's plain `numeric`: Spark's default, which
#: more digits widen.
_VARIABLE = "io.debezium.data.VariableScaleDecimal"
_VARIABLE_TYPE = pa.decimal128(_DIGITS_DEFAULT, 18)
#: Debezium's default for a value that the database did not send.
UNAVAILABLE = "__debezium_unavailable_value"
#: The unit of times in most databases: microseconds.
TIME_UNIT: Final = "us"
#: A message that an application wrote to the log.
_MESSAGE = "m"
_MARKERS = ("BEGIN", "END")
#: Records that do not end a transaction.
_OF_NONE = ("r", _MESSAGE)


def hints_of(schema: Any) -> dict[str, Hint]:
    """Return hints by column from the schema of an envelope; none for unknown types."""
    fields = schema.get("fields") if isinstance(schema, dict) else None
    for image in fields if isinstance(fields, list) else ():
        if isinstance(image, dict) and image.get("field") in ("after", "before"):
            columns = image.get("fields") or ()
            if hints := dict(_hint(c) for c in columns if isinstance(c, dict) and "field" in c):
                return hints
    return {}


def _hint(column: dict[str, Any]) -> tuple[str, Hint]:
    name, kind = column.get("name"), column.get("type")
    if name in _TIMES:
        return str(column["field"]), _TIMES[name]
    if name == _DECIMAL and kind == "bytes":
        return str(column["field"]), _decimal(column.get("parameters") or {})
    return str(column["field"]), Hint(_kind(column))


def _kind(declared: Any) -> pa.DataType | None:
    """Return the type of a column, item or field; None if it is unknown."""
    if not isinstance(declared, dict):
        return None
    match declared.get("name"), declared.get("type"):
        case (name, _) if name == _VARIABLE:
            return _VARIABLE_TYPE
        case (name, _) if name in _TIMES or name == _DECIMAL:
            return None  # numbers whose unit would be lost
        case (_, "array"):
            item = _kind(declared.get("items"))
            return None if item is None else pa.list_(item)
        case (_, "map"):
            return _map_type(declared)
        case (_, "struct"):
            return _struct_type(declared.get("fields"))
        case (_, kind):
            return _PLAIN.get(str(kind))
    return None


def _map_type(declared: dict[str, Any]) -> pa.DataType | None:
    keys, values = _kind(declared.get("keys")), _kind(declared.get("values"))
    return pa.map_(keys, values) if keys == pa.string() and values is not None else None


def _struct_type(declared: Any) -> pa.DataType | None:
    fields = [field for field in declared or () if isinstance(field, dict)]
    kinds = {str(field.get("field")): _kind(field) for field in fields}
    if not kinds or len(kinds) < len(fields) or None in kinds.values():
        return None
    return pa.struct([pa.field(name, kind) for name, kind in kinds.items()])


def _decimal(parameters: dict[str, Any]) -> Hint:
    scale = int(parameters.get("scale", 0))
    digits = int(parameters.get("connect.decimal.precision", _DIGITS_DEFAULT))
    if 0 <= scale <= digits <= _DIGITS_DEFAULT:
        return Hint(pa.decimal128(digits, scale), packed_scale=scale)
    return Hint(packed_scale=scale)


class _Transaction(msgspec.Struct, frozen=True, gc=False):
    id: str | None = None


class _Source(msgspec.Struct, frozen=True, gc=False, rename={"tx_id": "txId"}):
    tx_id: int | str | None = None


class _Payload(msgspec.Struct, frozen=True):
    op: str | None = None
    before: msgspec.Raw = ABSENT
    after: msgspec.Raw = ABSENT
    transaction: _Transaction | None = None
    source: _Source | None = None
    #: BEGIN or END of a transaction, instead of an op, and its id.
    status: str | None = None
    id: str | None = None

    def membership(self) -> Membership | None:
        """Return the transaction after the record; None if it says nothing, as in a first copy."""
        if self.op is None:
            begins = self.status == "BEGIN" and self.id is not None
            marked = Membership(self.id, marked=True) if begins else OUTSIDE
            return marked if self.status in _MARKERS else None
        if self.transaction is not None and self.transaction.id is not None:
            return Membership(self.transaction.id)
        return None if self.op in _OF_NONE else OUTSIDE

    @property
    def txn(self) -> str | None:
        if self.transaction is not None and self.transaction.id is not None:
            return self.transaction.id
        if self.source is not None and self.source.tx_id is not None:
            return str(self.source.tx_id)
        return None


class _Message(_Payload, frozen=True):
    """A payload, alone or with its schema."""

    schema: msgspec.Raw = ABSENT
    payload: _Payload | msgspec.UnsetType | None = msgspec.UNSET

    def unwrapped(self) -> _Payload | None:
        return self if self.payload is msgspec.UNSET else self.payload


_decode = msgspec.json.Decoder(_Message).decode


@dataclass(frozen=True, slots=True)
class DebeziumDecoder:
    """Decodes Debezium's JSON."""

    key_fields: tuple[str, ...]
    mismatch: str = STOP
    #: Unit of times without zone if there is no schema: ms, us or ns.
    time_unit: str = TIME_UNIT
    unavailable: str = UNAVAILABLE

    kind = "debezium"

    def decode(self, records: pa.RecordBatch | pa.Table, schema: TableSchema | None) -> Decoded:
        intake = RecordIntake.of(records)
        intake.ignore(_is_tombstone)
        indices, messages = intake.parsed(_decode)
        tail = tail_of(_backwards(intake, indices, messages))
        runs: list[_Run] = []
        for index, message in zip(indices, messages, strict=True):
            payload = message.unwrapped()
            if _is_nothing(payload):
                intake.ignored += 1
            elif payload is None or payload.op not in OP_OF_LETTER:
                intake.refuse(index, _reason(payload))
            else:
                schema_raw = None if message.schema == ABSENT else bytes(message.schema)
                # The schema, and with it the unit of numbers, can change within a batch.
                if not runs or runs[-1].schema_raw != schema_raw:
                    runs.append(_Run(schema_raw))
                runs[-1].indices.append(index)
                runs[-1].payloads.append(payload)
        decoded = self._joined(intake, runs or [_Run(None)], schema)
        return dataclasses.replace(decoded, tail=tail)

    def _joined(
        self, intake: RecordIntake, runs: list[_Run], schema: TableSchema | None
    ) -> Decoded:
        tables = []
        for run in runs:
            hints = {} if run.schema_raw is None else _hints(run.schema_raw)
            reading = RowReading(self.unavailable, self.time_unit, hints)
            how = Assembly(self.key_fields, reading, self.mismatch)
            decoded = how.decoded(intake, run.raw_changes(), schema)
            schema = decoded.schema
            tables.append(decoded.changes)
        if schema is not None:
            tables = [under_schema(table, schema) for table in tables]
        return dataclasses.replace(decoded, changes=pa.concat_tables(tables))


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive records with the same schema."""

    schema_raw: bytes | None
    indices: list[int] = field(default_factory=list)
    payloads: list[_Payload] = field(default_factory=list)

    def raw_changes(self) -> RawChanges:
        return RawChanges(
            self.indices,
            [OP_OF_LETTER[p.op or ""] for p in self.payloads],
            [ABSENT] * len(self.payloads),
            [p.before for p in self.payloads],
            [p.after for p in self.payloads],
            [()] * len(self.payloads),
            [p.txn for p in self.payloads],
        )


def _is_tombstone(body: bytes) -> bool:
    return not body or body.strip() in (b"", b"null")


def _backwards(
    intake: RecordIntake, indices: Sequence[int], messages: Sequence[_Message]
) -> Iterator[tuple[int, Membership]]:
    """Yield the transaction after each record, the last one first."""
    for index, message in zip(reversed(indices), reversed(messages), strict=True):
        payload = message.unwrapped()
        membership = payload.membership() if payload is not None else None
        if membership is not None:
            yield int(intake.seq_nums[index]), membership


def _is_nothing(payload: _Payload | None) -> bool:
    """Return whether this is a tombstone with a schema, a transaction marker, or a message."""
    if payload is None:
        return True
    return payload.op == _MESSAGE or (payload.op is None and payload.status in _MARKERS)


def _reason(payload: _Payload | None) -> str:
    if payload is None or payload.op is None:
        return "the record has no op: it is not a change of Debezium's"
    return f"op {payload.op!r} is not known: the ops are {', '.join([*OP_OF_LETTER, _MESSAGE])}"


@lru_cache(maxsize=64)
def _hints(raw: bytes) -> dict[str, Hint]:
    # Records carry the same schema until the table changes.
    schema: Any = msgspec.json.decode(raw)
    return hints_of(schema)


class DebeziumOptions(DecoderOptions, frozen=True, kw_only=True):
    time_unit: Annotated[
        Literal["ms", "us", "ns"],
        msgspec.Meta(
            description="unit of times without zone if no schema says it: `ms`, `us`, `ns`; dates are "
            "days"
        ),
    ] = TIME_UNIT
    unavailable: Annotated[
        str, msgspec.Meta(description="the connector's `unavailable.value.placeholder`")
    ] = UNAVAILABLE


def _open(keys: tuple[str, ...], options: DebeziumOptions) -> DebeziumDecoder:
    return DebeziumDecoder(keys, options.mismatch, options.time_unit, options.unavailable)


DEBEZIUM = DecoderType(
    id=DebeziumDecoder.kind,
    summary="JSON of Debezium's connectors",
    options=DebeziumOptions,
    open=_open,
)
