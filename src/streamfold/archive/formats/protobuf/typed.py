"""Typed protobuf, id `protobuf-typed`: exact values in messages that any language can generate.

The messages are in streamfold_archive.proto, beside this module. The published messages know only
doubles and text; those have the id `protobuf`, and a file never mixes the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import msgspec
import pyarrow as pa

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.admission import admitted_changes, admitted_rows
from streamfold.archive.formats.format import Format, FormatType
from streamfold.archive.formats.protobuf.typed_columns import decode_column, encode_column, tagged
from streamfold.archive.formats.protobuf.typed_frames import (
    BATCH,
    END,
    HEADER,
    Frame,
    read_frames,
    write_frame,
)
from streamfold.archive.formats.published_changes import verified, verified_rows
from streamfold.archive.schema import TableSchema
from streamfold.errors import InvalidError, MalformedError
from streamfold.records.protobuf import DELIMITED, VARINT, fields, varint

VERSION = 1
ROWS, CHANGES = "rows", "changes"


@dataclass(frozen=True, slots=True)
class TypedProtobufFormat(Format):
    """Exact for every type; a file holds its own schema and marks its end."""

    id = "protobuf-typed"
    compression = "none"
    extension = ".typed.pb"

    def write_rows(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        return _write(sink, schema, ROWS, admitted_rows(schema, batches))

    def write_changes(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        return _write(sink, schema, CHANGES, admitted_changes(schema, batches))

    def read_rows(
        self, source: BinaryIO, schema: TableSchema | None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        stored, frames = _opened(source, ROWS)
        known = schema or stored
        wanted = known.arrow if columns is None else known.select(columns)
        names = [name for name in wanted.names if name in stored.names]
        if columns is None:
            names = stored.names
        for batch in _batches(frames, stored.arrow, names):
            yield from verified_rows(batch, wanted)

    def read_changes(
        self, source: BinaryIO, schema: TableSchema | None
    ) -> Iterator[pa.RecordBatch]:
        stored, frames = _opened(source, CHANGES)
        for batch in _batches(frames, stored.changes, stored.changes.names):
            yield from verified(batch, schema or stored)


def _write(
    sink: BinaryIO, schema: TableSchema, kind: str, batches: Iterable[pa.RecordBatch]
) -> int:
    header = (
        varint(1 << 3 | VARINT)
        + varint(VERSION)
        + tagged(2, kind.encode())
        + tagged(3, schema.canonical_json)
        + tagged(4, schema.id.encode())
    )
    write_frame(sink, HEADER, header)
    count = 0
    for batch in batches:
        columns = b"".join(tagged(2, encode_column(column)) for column in batch.columns)
        write_frame(sink, BATCH, _number(len(batch)) + columns)
        count += len(batch)
    write_frame(sink, END, _number(count))
    return count


def _number(value: int) -> bytes:
    return varint(1 << 3 | VARINT) + varint(value)


def _opened(source: BinaryIO, kind: str) -> tuple[TableSchema, Iterator[Frame]]:
    """The schema that the file says it has, and the frames after its header."""
    source.seek(0)
    frames = read_frames(source)
    header = next(frames)
    if header.number != HEADER:
        raise ArtifactCorruptError("the file does not begin with a header: it is of another format")
    try:
        return _schema_of(header.content, kind), frames
    except (MalformedError, InvalidError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArtifactCorruptError(f"the header cannot be used: {error}") from None


def _schema_of(header: bytes, kind: str) -> TableSchema:
    version, texts = 0, {2: b"", 3: b"", 4: b""}
    for tag, value, after in fields(header, 0, len(header)):
        if tag == 1 << 3 | VARINT:
            version = value
        elif tag & 7 == DELIMITED:
            texts[tag >> 3] = header[value:after]
    if version != VERSION:
        raise InvalidError(f"version {version} is not {VERSION}: read it with a newer Streamfold")
    if texts[2].decode() != kind:
        raise InvalidError(f"the file holds {texts[2]!r}, not {kind!r}")
    return TableSchema.from_json(msgspec.json.decode(texts[3]))


def _batches(
    frames: Iterator[Frame], schema: pa.Schema, names: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Only the named columns are decoded; the end frame must have their count."""
    count = 0
    for frame in frames:
        try:
            rows, spans = _batch_of(frame)
            if frame.number == END and rows != count:
                raise MalformedError(f"the file has {count} rows, its end says {rows}")
            if frame.number == END:
                continue  # the next read of a frame checks that nothing follows
            if len(spans) != len(schema):
                raise MalformedError(f"{len(spans)} columns, the schema has {len(schema)}")
            batch = _decoded(
                frame.content, dict(zip(schema.names, spans, strict=True)), schema, names, rows
            )
        except (MalformedError, pa.ArrowInvalid) as error:
            raise ArtifactCorruptError(f"after row {count}: {error}") from None
        yield batch
        count += rows


def _batch_of(frame: Frame) -> tuple[int, list[tuple[int, int]]]:
    """Rows and where the columns are; of an end frame the rows alone."""
    if frame.number == HEADER:
        raise MalformedError("a second header")
    rows, spans = 0, []
    for tag, value, after in fields(frame.content, 0, len(frame.content)):
        if tag == 1 << 3 | VARINT:
            rows = value
        elif tag == 2 << 3 | DELIMITED:
            spans.append((value, after))
    return rows, spans


def _decoded(
    raw: bytes,
    spans: dict[str, tuple[int, int]],
    schema: pa.Schema,
    names: Sequence[str],
    rows: int,
) -> pa.RecordBatch:
    # A batch needs a column to know its rows, even if a newer schema has none of them.
    wanted = pa.schema([schema.field(name) for name in names or schema.names[:1]])
    columns = [decode_column(raw, spans[field.name], field.type, rows) for field in wanted]
    return pa.RecordBatch.from_arrays(columns, schema=wanted).select(list(names))


TYPED_PROTOBUF = FormatType(
    id="protobuf-typed",
    summary="typed columns in messages of our own, with checksums",
    open=lambda _: TypedProtobufFormat(),
    read_cost=20,
)
