"""Streamfold's own form of a change, one JSON object per record:

    {"op": "c", "after": {"id": 7, "name": "Ada"}}
    {"op": "u", "key": {"id": 7}, "before": {…}, "after": {…}, "unchanged": ["photo"], "txn": "91"}
    {"op": "d", "key": {"id": 7}}
    {"op": "t"}
    {"op": "e", "txn": "91"}
    {"op": "s", "key": ["id"], "columns": [{"name": "id", "type": "BIGINT", "nullable": false}, …]}

- `op`: c insert, u update, d delete, t truncate, r a row of the first copy. Two are not changes: e ends
  the transaction, s declares the columns of the records that follow.
- `columns`: of s alone; types as in a `schema` of the configuration. A column that is already known
  keeps its type. `source`, beside them, is the source's own type, for people.
- `key`: key of the row *before* the change; may be left out where `before` or `after` shows it. Key
  fields that `after` leaves out are taken from it; where they differ, the row's key changed.
- `after`: the whole row; needed for c, u and r. A column that is left out is null, unless `unchanged`
  names it: then its value is that of the row as it was.
- `before`: the row as it was, or parts of it. Never needed.
- `table`: names the table in a stream of several; a decoder for one of them ignores the others.
- `txn`: text or number of the transaction that the change belongs to; or an object of it as `id` and
  of `last`, true for the last change. An object promises an end, as `last` or as `e`; text and
  numbers do not. See `streamfold.snapshotter.transactions`.

Other fields are refused: a misspelt one would lose data. Put anything else into headers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Literal

import msgspec
import numpy as np
import pyarrow as pa

from streamfold.archive.schema import TableSchema
from streamfold.errors import InvalidError
from streamfold.snapshotter.decoding.arrow_rows import ABSENT, RowReading
from streamfold.snapshotter.decoding.assembly import STOP, Assembly
from streamfold.snapshotter.decoding.ddl import parse_ddl
from streamfold.snapshotter.decoding.decoder import Decoded, DecoderOptions, DecoderType
from streamfold.snapshotter.decoding.json_values import Hint
from streamfold.snapshotter.decoding.records import RawChanges, RecordIntake
from streamfold.snapshotter.source_positions import SourcePositions
from streamfold.snapshotter.transactions import OUTSIDE, Membership, tail_of

OP_OF_LETTER = {"c": "insert", "u": "update", "d": "delete", "t": "truncate", "r": "read"}


#: Not changes: the end of a transaction, and the columns of a table.
_END, _SCHEMA = "e", "s"


class _Column(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    type: str
    nullable: bool = True
    source: str = ""


class _Transaction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    id: str | int
    last: bool = False


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    op: Literal["c", "u", "d", "t", "r", "e", "s"]
    table: str | None = None
    key: msgspec.Raw = ABSENT
    before: msgspec.Raw = ABSENT
    after: msgspec.Raw = ABSENT
    unchanged: tuple[str, ...] = ()
    txn: str | int | _Transaction | None = None
    columns: tuple[_Column, ...] | None = None

    def is_bare(self) -> bool:
        return self.key == self.before == self.after == ABSENT and not self.unchanged

    def membership(self) -> Membership:
        txn = self.txn
        if txn is None or self.op == _END:
            return OUTSIDE
        if isinstance(txn, _Transaction):
            return OUTSIDE if txn.last else Membership(str(txn.id), marked=True)
        return Membership(str(txn))


_decode = msgspec.json.Decoder(_Envelope).decode


@dataclass(frozen=True, slots=True)
class EnvelopeDecoder:
    """Decodes the envelope; see the module for its fields."""

    key_fields: tuple[str, ...]
    mismatch: str = STOP
    #: The only table to decode, of records that name theirs; None for all.
    table: str | None = None

    kind = "envelope"

    def decode(self, records: pa.RecordBatch | pa.Table, schema: TableSchema | None) -> Decoded:
        intake = RecordIntake.of(records)
        indices, found = intake.parsed(_decode)
        tail = tail_of(_backwards(intake, indices, found, self.table))
        positions = SourcePositions.of(intake.headers)
        if self.table is not None and any(m.table not in (None, self.table) for m in found):
            indices, found = _only_of(self.table, intake, indices, found)
            positions = positions and positions.only(np.array(indices, np.int64))
        ops = [m.op for m in found]
        hints: dict[str, Hint] = {}
        if _END in ops or _SCHEMA in ops:
            indices, found = _without_marks(intake, indices, found, hints)
            ops = [m.op for m in found]
        changes = RawChanges(
            indices,
            [OP_OF_LETTER[op] for op in ops],
            [m.key for m in found],
            [m.before for m in found],
            [m.after for m in found],
            [m.unchanged for m in found],
            [_id_of(m.txn) for m in found],
        )
        assembly = Assembly(self.key_fields, RowReading(hints=hints), self.mismatch)
        decoded = assembly.decoded(intake, changes, schema)
        return replace(decoded, tail=tail, positions=positions, declares=bool(hints))


def _id_of(txn: str | int | _Transaction | None) -> str | None:
    if txn is None:
        return None
    return str(txn.id if isinstance(txn, _Transaction) else txn)


def _only_of(
    table: str, intake: RecordIntake, indices: Sequence[int], found: Sequence[_Envelope]
) -> tuple[list[int], list[_Envelope]]:
    """Return the records of a table, and ignore those of others."""
    kept = [(i, m) for i, m in zip(indices, found, strict=True) if m.table in (None, table)]
    intake.ignored += len(found) - len(kept)
    return [index for index, _ in kept], [message for _, message in kept]


def _backwards(
    intake: RecordIntake, indices: Sequence[int], found: Sequence[_Envelope], table: str | None
) -> Iterator[tuple[int, Membership]]:
    """Yield what records, last one first, say about transactions.

    Rows of a first copy say nothing, and its other records nothing about other tables: it may stand in
    the middle of a transaction. Changes of other tables belong to the transaction.
    """
    for index, message in zip(reversed(indices), reversed(found), strict=True):
        silent = message.txn is None and message.op in ("r", _SCHEMA)
        if table is not None and message.table not in (None, table):
            silent = message.txn is None or message.op == _END
        if not silent:
            yield int(intake.seq_nums[index]), message.membership()


def _without_marks(
    intake: RecordIntake,
    indices: Sequence[int],
    found: Sequence[_Envelope],
    hints: dict[str, Hint],
) -> tuple[list[int], list[_Envelope]]:
    """Return only changes, and add declared columns to the hints.

    An end without a transaction or with a row, and columns that cannot be read, are dead letters.
    """
    kept = []
    for index, message in zip(indices, found, strict=True):
        if message.op not in (_END, _SCHEMA):
            kept.append((index, message))
        elif problem := _end_problem(message) if message.op == _END else _declare(message, hints):
            intake.refuse(index, problem)
        else:
            intake.ignored += 1
    return [index for index, _ in kept], [message for _, message in kept]


def _end_problem(message: _Envelope) -> str:
    if message.txn is None or not message.is_bare():
        return "the end of a transaction must name it as txn, and no row"
    return ""


def _declare(message: _Envelope, hints: dict[str, Hint]) -> str:
    """Add the declared columns to the hints; returns what is wrong with them."""
    if message.columns is None or message.before != ABSENT or message.after != ABSENT:
        return "a declaration must have columns, and no row"
    try:
        declared = {c.name: Hint(_type_of(c.name, c.type)) for c in message.columns}
    except InvalidError as error:
        return error.message
    hints.update(declared)
    return ""


@lru_cache(maxsize=256)
def _type_of(name: str, kind: str) -> pa.DataType:
    quoted = name.replace("`", "``")
    return parse_ddl(f"`{quoted}` {kind}").arrow.field(0).type


class EnvelopeOptions(DecoderOptions, frozen=True, kw_only=True):
    table: Annotated[
        str | None,
        msgspec.Meta(
            description="the table to publish, in a stream of several: the name in its records; "
            "`<schema>.<table>` of the source by default, with the schema `public`"
        ),
    ] = None


ENVELOPE = DecoderType(
    id=EnvelopeDecoder.kind,
    summary="Streamfold's own change records",
    options=EnvelopeOptions,
    open=lambda keys, options: EnvelopeDecoder(keys, options.mismatch, options.table),
)
