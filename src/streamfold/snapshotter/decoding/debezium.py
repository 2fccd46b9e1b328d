"""Changes as Debezium writes them in JSON, with and without the schema beside the payload.

`before`, `after` and `op` are used, and the transaction where there is one; positions and times of the
source are not: the stream's own order counts. Tombstones, transaction markers and messages are no
changes. A value that Debezium could not send, because the database did not, leaves its column as it is.

Transactions are those of `provide.transaction.metadata`: the `transaction` beside a change says which
one it belongs to, BEGIN and END records in the stream where it begins and ends. Their counts are not
used: they are about all tables. `source.txId` alone says nothing of where a transaction ends.

Without a schema beside the payload, times without zone are whole numbers in `time_unit`, days for
dates. With one, it tells the types of columns, and what their numbers mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa

from streamfold.archive.schema.table_schema import TableSchema
from streamfold.snapshotter.decoding.arrow_rows import ABSENT, RowReading
from streamfold.snapshotter.decoding.assembly import STOP, Assembly
from streamfold.snapshotter.decoding.connect_types import hints_of
from streamfold.snapshotter.decoding.decoder import Decoded, under_schema
from streamfold.snapshotter.decoding.envelope import OP_OF_LETTER
from streamfold.snapshotter.decoding.json_values import Hint
from streamfold.snapshotter.decoding.raw_changes import RawChanges
from streamfold.snapshotter.decoding.records import RecordIntake
from streamfold.snapshotter.pipeline.transactions import OUTSIDE, Membership, tail_of

#: What Debezium writes by default for a value that it did not get.
UNAVAILABLE = "__debezium_unavailable_value"
#: In what most databases count times: microseconds.
TIME_UNIT = "us"
#: A message written into the log by hand: it is about no row.
_MESSAGE = "m"
_MARKERS = ("BEGIN", "END")
#: Records that come between those of a transaction without ending it.
_OF_NONE = ("r", _MESSAGE)


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
    #: BEGIN or END of a transaction, in place of an op, and its id.
    status: str | None = None
    id: str | None = None

    def membership(self) -> Membership | None:
        """What the record says of transactions; None for nothing, as of a first copy's rows."""
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
    """A payload, or one with its schema."""

    schema: msgspec.Raw = ABSENT
    payload: _Payload | msgspec.UnsetType | None = msgspec.UNSET

    def told(self) -> _Payload | None:
        return self if self.payload is msgspec.UNSET else self.payload


_decode = msgspec.json.Decoder(_Message).decode


@dataclass(frozen=True, slots=True)
class DebeziumDecoder:
    """Decodes Debezium's JSON."""

    key_fields: tuple[str, ...]
    mismatch: str = STOP
    #: Unit of times without zone, where no schema tells it: ms, us or ns.
    time_unit: str = TIME_UNIT
    unavailable: str = UNAVAILABLE

    kind = "debezium"

    def decode(self, records: pa.RecordBatch | pa.Table, schema: TableSchema | None) -> Decoded:
        intake = RecordIntake.of(records)
        intake.ignore(_is_tombstone)
        places, messages = intake.parsed(_decode)
        tail = tail_of(_backwards(intake, places, messages))
        runs: list[_Run] = []
        for place, message in zip(places, messages, strict=True):
            payload = message.told()
            if _is_nothing(payload):
                intake.ignored += 1
            elif payload is None or payload.op not in OP_OF_LETTER:
                intake.refuse(place, _reason(payload))
            else:
                schema_raw = None if message.schema == ABSENT else bytes(message.schema)
                # What numbers mean may change in the middle of a batch, with the source's schema.
                if not runs or runs[-1].schema_raw != schema_raw:
                    runs.append(_Run(schema_raw))
                runs[-1].places.append(place)
                runs[-1].payloads.append(payload)
        found = self._joined(intake, runs or [_Run(None)], schema)
        return dataclasses.replace(found, tail=tail)

    def _joined(
        self, intake: RecordIntake, runs: list[_Run], schema: TableSchema | None
    ) -> Decoded:
        tables = []
        for run in runs:
            hints = {} if run.schema_raw is None else _hints(run.schema_raw)
            reading = RowReading(self.unavailable, self.time_unit, hints)
            how = Assembly(self.key_fields, reading, self.mismatch)
            decoded = how.decoded(intake, run.told(), schema)
            schema = decoded.schema
            tables.append(decoded.changes)
        if schema is not None:
            tables = [under_schema(table, schema) for table in tables]
        return dataclasses.replace(decoded, changes=pa.concat_tables(tables))


@dataclass(frozen=True, slots=True)
class _Run:
    """Records after each other that come with the same schema."""

    schema_raw: bytes | None
    places: list[int] = field(default_factory=list)
    payloads: list[_Payload] = field(default_factory=list)

    def told(self) -> RawChanges:
        return RawChanges(
            self.places,
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
    intake: RecordIntake, places: Sequence[int], messages: Sequence[_Message]
) -> Iterator[tuple[int, Membership]]:
    """What records say of transactions, the last one first."""
    for place, message in zip(reversed(places), reversed(messages), strict=True):
        payload = message.told()
        membership = payload.membership() if payload is not None else None
        if membership is not None:
            yield int(intake.seq_nums[place]), membership


def _is_nothing(payload: _Payload | None) -> bool:
    """A tombstone with a schema around it, a marker of a transaction, or a message."""
    if payload is None:
        return True
    return payload.op == _MESSAGE or (payload.op is None and payload.status in _MARKERS)


def _reason(payload: _Payload | None) -> str:
    if payload is None or payload.op is None:
        return "the record has no op: it is no change of Debezium's"
    return f"op {payload.op!r} is not known: there are {', '.join([*OP_OF_LETTER, _MESSAGE])}"


@lru_cache(maxsize=64)
def _hints(raw: bytes) -> dict[str, Hint]:
    # One schema comes with every record until the table changes.
    found: Any = msgspec.json.decode(raw)
    return hints_of(found)
