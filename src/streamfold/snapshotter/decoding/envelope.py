"""Streamfold's own change records, one JSON object each:

    {"op": "c", "after": {"id": 7, "name": "Ada"}}
    {"op": "u", "key": {"id": 7}, "before": {…}, "after": {…}, "unchanged": ["photo"], "txn": "91"}
    {"op": "d", "key": {"id": 7}}
    {"op": "t"}
    {"op": "e", "txn": "91"}
    {"op": "s", "key": ["id"], "columns": [{"name": "id", "type": "BIGINT", "nullable": false}, …]}

- `op`: c insert, u update, d delete, t truncate, r a row of the first copy. Two are not changes: e ends
  the transaction, s declares the columns of the following records.
- `columns`: only for s, with types as in a configured `schema`. Known columns keep their types.
  `source` beside a type is the source's own, for people.
- `key`: key of the row *before* the change, optional where `before` or `after` shows it. It supplies
  key fields that `after` omits; where they differ, the row's key changed.
- `after`: the whole row, required for c, u and r. A column that it omits is null, or has its old value
  if `unchanged` names it.
- `before`: the old row, or parts of it. Always optional.
- `table`: the table, in a stream of several; a decoder for one ignores the others.
- `txn`: the change's transaction, as text or number; or an object with `id` and, true for the last
  change, `last`. An object promises an end, by `last` or e. See `streamfold.snapshotter.transactions`.

Other fields are rejected, since a misspelt one would lose data. Put anything else into headers.
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


#: Not changes: the end of a transaction, and columns of a table.
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
    """Decodes change records, see the module."""

    key_fields: tuple[str, ...]
    mismatch: str = STOP
    #: The table to decode, of records that name theirs; None for all.
    table: str | None = None

    kind = "envelope"

    def decode(self, records: pa.RecordBatch | pa.Table, schema: TableSchema | None) -> Decoded:
        intake = RecordIntake.of(records)
        indices, messages = intake.parsed(_decode)
        tail = tail_of(_backwards(intake, indices, messages, self.table))
        positions = SourcePositions.of(intake.headers)
        if self.table is not None and any(m.table not in (None, self.table) for m in messages):
            indices, messages = _only_of(self.table, intake, indices, messages)
            positions = positions and positions.only(np.array(indices, np.int64))
        ops = [m.op for m in messages]
        hints: dict[str, Hint] = {}
        if _END in ops or _SCHEMA in ops:
            indices, messages = _without_marks(intake, indices, messages, hints)
            ops = [m.op for m in messages]
        changes = RawChanges(
            indices,
            [OP_OF_LETTER[op] for op in ops],
            [m.key for m in messages],
            [m.before for m in messages],
            [m.after for m in messages],
            [m.unchanged for m in messages],
            [_id_of(m.txn) for m in messages],
        )
        assembly = Assembly(self.key_fields, RowReading(hints=hints), self.mismatch)
        decoded = assembly.decoded(intake, changes, schema)
        return replace(decoded, tail=tail, positions=positions, declares=bool(hints))


def _id_of(txn: str | int | _Transaction | None) -> str | None:
    if txn is None:
        return None
    return str(txn.id if isinstance(txn, _Transaction) else txn)


def _only_of(
    table: str, intake: RecordIntake, indices: Sequence[int], messages: Sequence[_Envelope]
) -> tuple[list[int], list[_Envelope]]:
    """Return the records of one table, and ignore those of others."""
    own = [(i, m) for i, m in zip(indices, messages, strict=True) if m.table in (None, table)]
    intake.ignored += len(messages) - len(own)
    return [index for index, _ in own], [message for _, message in own]


def _backwards(
    intake: RecordIntake, indices: Sequence[int], messages: Sequence[_Envelope], table: str | None
) -> Iterator[tuple[int, Membership]]:
    """Yield the transaction after each record, last one first.

    Rows of a first copy say nothing, since the copy may stand in the middle of a transaction. Changes
    of other tables belong to the transaction.
    """
    for index, message in zip(reversed(indices), reversed(messages), strict=True):
        silent = message.txn is None and message.op in ("r", _SCHEMA)
        if table is not None and message.table not in (None, table):
            silent = message.txn is None or message.op == _END
        if not silent:
            yield int(intake.seq_nums[index]), message.membership()


def _without_marks(
    intake: RecordIntake,
    indices: Sequence[int],
    messages: Sequence[_Envelope],
    hints: dict[str, Hint],
) -> tuple[list[int], list[_Envelope]]:
    """Return only changes, and add declared columns to the hints; malformed marks are dead letters."""
    changes = []
    for index, message in zip(indices, messages, strict=True):
        if message.op not in (_END, _SCHEMA):
            changes.append((index, message))
        elif problem := _end_problem(message) if message.op == _END else _declare(message, hints):
            intake.refuse(index, problem)
        else:
            intake.ignored += 1
    return [index for index, _ in changes], [message for _, message in changes]


def _end_problem(message: _Envelope) -> str:
    if message.txn is None or not message.is_bare():
        return "the end of a transaction must name it as txn, and no row"
    return ""


def _declare(message: _Envelope, hints: dict[str, Hint]) -> str:
    """Add declared columns to the hints; returns what is wrong with them."""
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
