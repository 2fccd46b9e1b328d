"""JSON Lines: what a person can read and any language can parse.

A base has a row object per line, columns in the order of the schema; a diff has
`{"action","key","old","new"}` per line. Readers must not rely on the order of names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.admission import admitted_changes, admitted_rows
from streamfold.archive.formats.base64_column import values_of
from streamfold.archive.formats.compression import Compression, compress_stream, decompress_stream
from streamfold.archive.formats.format import Format, FormatType
from streamfold.archive.formats.inference import (
    inferred_batch,
    inferred_changes,
    inferred_schema,
    selected,
)
from streamfold.archive.formats.jsonl.json_text import join, key_text, object_text, value_text
from streamfold.archive.formats.jsonl.json_values import UnreadableError
from streamfold.archive.formats.jsonl.lines import (
    BLOCK_BYTES,
    LineDecoder,
    decode_objects,
    whole_lines,
)
from streamfold.archive.formats.published_changes import (
    published_schema,
    verified_changes,
    verified_rows,
)
from streamfold.archive.schema import TableSchema


@dataclass(frozen=True, slots=True)
class JsonlFormat(Format):
    """Exact for every type, given the schema; without one, integers stay integers."""

    packing: Compression = Compression.NONE

    id = "jsonl"

    @property
    def compression(self) -> str:
        return self.packing.value

    @property
    def extension(self) -> str:
        return f".jsonl{self.packing.extension}"

    def write_rows(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        fields = list(schema.arrow)
        admitted = admitted_rows(schema, batches)
        return self._write(sink, ((object_text(fields, b.columns), len(b)) for b in admitted))

    def write_changes(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        admitted = admitted_changes(schema, batches)
        return self._write(sink, ((_change_text(batch), len(batch)) for batch in admitted))

    def _write(self, sink: BinaryIO, texts: Iterable[tuple[pa.Array, int]]) -> int:
        count = 0
        with compress_stream(sink, self.packing) as out:
            for text, rows in texts:
                lines = join(text, "\n")
                out.write(values_of(lines)[0].data)
                count += rows
        return count

    def read_rows(
        self, source: BinaryIO, schema: TableSchema | None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        if schema is None:
            found = selected(inferred_schema(self._objects(source)), columns)
            for rows in self._objects(source):
                yield inferred_batch(rows, found)
            return
        wanted = schema.arrow if columns is None else schema.select(columns)
        decoder = LineDecoder(wanted, others_ignored=columns is not None)
        for block in self._blocks(source):
            yield from verified_rows(decoder.decode(block), wanted)

    def read_changes(
        self, source: BinaryIO, schema: TableSchema | None
    ) -> Iterator[pa.RecordBatch]:
        if schema is None:
            yield from inferred_changes(lambda: self._objects(source))
            return
        decoder = LineDecoder(published_schema(schema), others_ignored=False)
        for block in self._blocks(source):
            yield from verified_changes(decoder.decode(block), schema)

    def _blocks(self, source: BinaryIO) -> Iterator[bytes]:
        source.seek(0)
        return whole_lines(decompress_stream(source, self.packing, BLOCK_BYTES))

    def _objects(self, source: BinaryIO) -> Iterator[list[dict[str, Any]]]:
        for block in self._blocks(source):
            try:
                yield decode_objects(block)
            except UnreadableError as error:
                raise ArtifactCorruptError(str(error)) from None


def _change_text(changes: pa.RecordBatch) -> pa.Array:
    """Absent `old` and `new` are left out, and all but the action for a TRUNCATE."""
    return join(
        '{"action":"',
        changes["action"],
        '"',
        _optional(',"key":', changes["key"], value_text(key_text(changes["key"]))),
        _optional(',"old":', changes["before"], value_text(changes["before"])),
        _optional(',"new":', changes["after"], value_text(changes["after"])),
        "}",
    )


def _optional(name: str, column: pa.Array, text: pa.Array) -> pa.Array:
    return pc.if_else(column.is_valid(), join(name, text), "")


JSONL = FormatType(
    id="jsonl",
    summary="a JSON object per line",
    open=JsonlFormat,
    compressions=tuple(Compression),
    read_cost=30,
)
