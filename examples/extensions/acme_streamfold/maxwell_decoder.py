"""Changes as Maxwell's daemon writes them.

{"database": "shop", "table": "orders", "type": "update", "data": {…}, "old": {…}, "xid": 91}
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import pyarrow as pa

from streamfold.archive import TableSchema
from streamfold.snapshotter import decoding

OPS = {"insert": "insert", "update": "update", "delete": "delete", "bootstrap-insert": "read"}


class MaxwellOptions(decoding.DecoderOptions, frozen=True, kw_only=True):
    table: Annotated[
        str | None, msgspec.Meta(description="table whose changes count; those of all if not given")
    ] = None


class Message(msgspec.Struct, frozen=True):
    table: str
    type: Literal["insert", "update", "delete", "bootstrap-insert"]
    data: msgspec.Raw
    old: msgspec.Raw = decoding.ABSENT
    xid: int | None = None


@dataclass(frozen=True)
class MaxwellDecoder:
    key_fields: tuple[str, ...]
    options: MaxwellOptions
    kind = "maxwell"

    def decode(
        self, records: pa.RecordBatch | pa.Table, schema: TableSchema | None
    ) -> decoding.Decoded:
        intake = decoding.RecordIntake.of(records)
        found = list(zip(*intake.parsed(msgspec.json.Decoder(Message).decode), strict=True))
        wanted = [pair for pair in found if self.options.table in (None, pair[1].table)]
        intake.ignored += len(found) - len(wanted)
        messages = [message for _, message in wanted]
        changes = decoding.RawChanges(
            indices=[index for index, _ in wanted],
            ops=[OPS[m.type] for m in messages],
            keys=[decoding.ABSENT for m in messages],
            befores=[m.data if m.type == "delete" else m.old for m in messages],
            afters=[decoding.ABSENT if m.type == "delete" else m.data for m in messages],
            unchanged=[() for m in messages],
            txns=[None if m.xid is None else str(m.xid) for m in messages],
        )
        assembly = decoding.Assembly(self.key_fields, decoding.RowReading(), self.options.mismatch)
        return assembly.decoded(intake, changes, schema)


MAXWELL = decoding.DecoderType(
    id="maxwell",
    summary="JSON of Maxwell's daemon",
    options=MaxwellOptions,
    open=MaxwellDecoder,
)
