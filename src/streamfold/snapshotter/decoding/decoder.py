"""The interface and registry of decoders: records of a stream in, changes of a table out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import msgspec
import pyarrow as pa

from streamfold.archive.read.folding import fitted
from streamfold.archive.schema import TableSchema
from streamfold.extensions import Extension, Options, Registry
from streamfold.snapshotter.source_positions import SourcePositions
from streamfold.snapshotter.transactions import SILENT, Tail

#: What a record does to a table; a `read` is a row of the first copy.
OPS = ("insert", "update", "delete", "truncate", "read")

#: Undecodable records, as a repair needs them.
DEAD_LETTERS = pa.schema(
    [
        pa.field("seq_num", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("body", pa.binary(), nullable=False),
    ]
)

UNCHANGED = pa.list_(pa.field("item", pa.string(), nullable=False))


def decoded_schema(schema: TableSchema | None) -> pa.Schema:
    """Return the Arrow schema of decoded changes; images are null until columns are known.

    Columns of images are nullable even if the table's are not: `before` may be partial, and `after`
    omits what `unchanged` names.
    """
    key = image = pa.null()
    if schema is not None:
        fields = [f.with_nullable(True) for f in schema.arrow]
        key = pa.struct([schema.arrow.field(name) for name in schema.key_fields])
        image = pa.struct(fields)
    return pa.schema(
        [
            pa.field("seq_num", pa.int64(), nullable=False),
            pa.field("op", pa.string(), nullable=False),
            pa.field("key", key),
            pa.field("before", image),
            pa.field("after", image),
            pa.field("unchanged", UNCHANGED, nullable=False),
            pa.field("txn", pa.string()),
        ]
    )


def under_schema(changes: pa.Table, schema: TableSchema) -> pa.Table:
    """Return decoded changes under the same or a newer schema, in which missing columns are null."""
    target = decoded_schema(schema)
    if changes.schema.equals(target):
        return changes
    for index, field in enumerate(changes.schema):
        if pa.types.is_null(field.type):  # decoded before any column was known
            empty = pa.nulls(len(changes), target.field(field.name).type)
            changes = changes.set_column(index, field.name, empty)
    batches = [fitted(batch, target) for batch in changes.to_batches()]
    return pa.Table.from_batches(batches, schema=target)


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded batch: every record is a change, a dead letter, or ignored.

    `changes` are in stream order, under `decoded_schema(schema)`; a changed key is two rows with one
    `seq_num`, the delete first. `schema` fits every value; it is None until a record shows a column.
    """

    changes: pa.Table
    dead_letters: pa.Table
    schema: TableSchema | None
    #: Records that are not changes: tombstones, markers, stream commands.
    ignored: int
    #: The transaction in which the batch ends; silent for decoders without transactions.
    tail: Tail = SILENT
    #: Positions of the table's records in the log of their source; None if unknown.
    positions: SourcePositions | None = None
    #: Whether records of the batch declare columns of `schema`.
    declares: bool = False


@runtime_checkable
class ChangeDecoder(Protocol):
    """Decodes one form of records, in tasks; stateless and picklable.

    Loses no record. The same records and schema give the same result.
    """

    @property
    def kind(self) -> str:
        """The decoder's name in configurations."""
        ...

    @property
    def key_fields(self) -> tuple[str, ...]:
        """The columns that identify a row."""
        ...

    def decode(self, records: pa.RecordBatch | pa.Table, schema: TableSchema | None) -> Decoded:
        """Decode records of one stream: `seq_num`, `body` and, if present, `headers`.

        `schema` is the table's so far; None learns it from these records. Raises
        SchemaIncompatibleError when values do not fit it and cannot widen it, unless the decoder is
        configured to make dead letters of such records.
        """
        ...


class DecoderOptions(Options, frozen=True, kw_only=True):
    """Options of all decoders."""

    mismatch: Annotated[
        Literal["stop", "dead_letter"],
        msgspec.Meta(
            description="a value that does not fit the schema stops the table, or makes its record a "
            "dead letter: `stop`, `dead_letter`"
        ),
    ] = "stop"


O = TypeVar("O", bound=DecoderOptions)  # noqa: E741 - the options


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderType(Extension, Generic[O]):
    """Declares a decoder, which `kind = "<id>"` in `decoder` selects."""

    options: type[O]
    #: Returns the decoder for a table with these key fields.
    open: Callable[[tuple[str, ...], O], ChangeDecoder]


_DECODING = "streamfold.snapshotter.decoding"

#: Every kind of decoder that a configuration may name.
DECODERS: Registry[DecoderType[Any]] = Registry(
    "streamfold.decoders",
    "change decoder",
    DecoderType,
    {
        "envelope": f"{_DECODING}.envelope:ENVELOPE",
        "debezium": f"{_DECODING}.debezium:DEBEZIUM",
        "upserts": f"{_DECODING}.upserts:UPSERTS",
    },
)
