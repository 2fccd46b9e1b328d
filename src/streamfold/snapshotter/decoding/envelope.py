"""Streamfold's own form of a change, one JSON object per record:

    {"op": "c", "after": {"id": 7, "name": "Ada"}}
    {"op": "u", "key": {"id": 7}, "before": {…}, "after": {…}, "unchanged": ["photo"], "txn": "91"}
    {"op": "d", "key": {"id": 7}}
    {"op": "t"}

- `op`: c insert, u update, d delete, t truncate, r a row of the first copy.
- `key`: key of the row *before* the change; may be left out where `before` or `after` shows it. Key
  fields that `after` leaves out are taken from it; where they differ, the row's key changed.
- `after`: the whole row; needed for c, u and r. A column that is left out is null, unless `unchanged`
  names it: then its value is that of the row as it was.
- `before`: the row as it was, or parts of it. Never needed.
- `txn`: text or number of the transaction that the change belongs to.

Other fields are refused: a misspelt one would lose data. What else is to be said goes into headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import pyarrow as pa

from streamfold.archive.schema import TableSchema
from streamfold.snapshotter.decoding.assembly import STOP, Assembly
from streamfold.snapshotter.decoding.base import Decoded
from streamfold.snapshotter.decoding.images import ABSENT, Reading
from streamfold.snapshotter.decoding.intake import Intake
from streamfold.snapshotter.decoding.told import Told

OP_OF_LETTER = {"c": "insert", "u": "update", "d": "delete", "t": "truncate", "r": "read"}


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    op: Literal["c", "u", "d", "t", "r"]
    key: msgspec.Raw = ABSENT
    before: msgspec.Raw = ABSENT
    after: msgspec.Raw = ABSENT
    unchanged: tuple[str, ...] = ()
    txn: str | int | None = None


_decode = msgspec.json.Decoder(_Envelope).decode


@dataclass(frozen=True, slots=True)
class EnvelopeDecoder:
    """Decodes the envelope; see the module for its fields."""

    key_fields: tuple[str, ...]
    mismatch: str = STOP

    kind = "envelope"

    def decode(self, records: pa.RecordBatch | pa.Table, schema: TableSchema | None) -> Decoded:
        intake = Intake.of(records)
        places, found = intake.parsed(_decode)
        told = Told(
            places,
            [OP_OF_LETTER[m.op] for m in found],
            [m.key for m in found],
            [m.before for m in found],
            [m.after for m in found],
            [m.unchanged for m in found],
            [None if m.txn is None else str(m.txn) for m in found],
        )
        return Assembly(self.key_fields, Reading(), self.mismatch).decoded(intake, told, schema)
