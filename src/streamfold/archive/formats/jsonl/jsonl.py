"""JSON Lines: text that people can read and any language can parse.

A base has one row object per line, with columns in schema order. A diff has
`{"action","key","old","new"}` per line. Readers must not rely on the order of names.

Arrow's reader is several times faster, but gives up on forms that it does not support: maps, NaN as
text, integers written as doubles. These blocks are decoded again, value by value, so results and
errors are always those of the slower way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.admission import (
    admitted_changes,
    admitted_rows,
    published_schema,
    verified_changes,
    verified_rows,
)
from streamfold.archive.formats.conforming import has_map, values_of
from streamfold.archive.formats.format import (
    FileCompression,
    Format,
    FormatType,
    compress_stream,
    decompress_stream,
)
from streamfold.archive.formats.jsonl.json_text import (
    begin_as_objects,
    join,
    key_text,
    object_text,
    value_text,
)
from streamfold.archive.formats.jsonl.json_values import (
    UnreadableError,
    columns_of,
    readable_field,
    restored_batch,
)
from streamfold.archive.formats.published_rows import (
    check_published_rows,
    check_published_size,
    inferred_batch,
    inferred_changes,
    inferred_schema,
    published_key_text,
    selected,
)
from streamfold.archive.schema import TableSchema
from streamfold.undecodable import UNDECODABLE

#: Bytes of a line from which on Laredo's reader rejects it.
PUBLISHED_LINE_MAX = 16 << 20
#: Bytes of lines to decode at once: enough to keep Arrow's threads busy, and few to hold.
BLOCK_BYTES = 4 << 20
#: Maximum bytes of a line: 16 times Laredo's limit, and far more than a stream's rows have.
LINE_BYTES_MAX = 256 << 20
_decode: Callable[[bytes], Any] = msgspec.json.Decoder().decode


def whole_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes, cut only after a line. The last line may lack its line feed.

    Raises ArtifactCorruptError for a line too long for any row: a few bytes may inflate to very
    many.
    """
    rest: list[bytes] = []
    size = 0
    for block in blocks:
        cut = block.rfind(b"\n") + 1
        if not cut:
            rest.append(block)
            size += len(block)
            if size > LINE_BYTES_MAX:
                raise ArtifactCorruptError(
                    f"a line has more than {LINE_BYTES_MAX} bytes, the most that one is read with: "
                    "write the file again with fewer bytes in a row"
                )
            continue
        yield b"".join([*rest, block[:cut]])
        rest, size = [block[cut:]], len(block) - cut
    if last := b"".join(rest):
        yield last


class LineDecoder:
    """Turns blocks of lines into columns of `schema`. Counts rows, which lets errors say where."""

    def __init__(self, schema: pa.Schema, others_ignored: bool) -> None:
        """`others_ignored`: whether to ignore fields that are not in the schema."""
        self._schema = schema
        self._others_ignored = others_ignored
        self._rows = 0
        # Arrow's reader cannot read objects whose keys are not known in advance.
        self._by_arrow = not any(has_map(field.type) for field in schema)
        self._parse = pj.ParseOptions(
            explicit_schema=pa.schema([readable_field(field) for field in schema]),
            unexpected_field_behavior="ignore" if others_ignored else "error",
        )

    def decode(self, block: bytes) -> pa.RecordBatch:
        """Return the columns of the block's lines. Raises ArtifactCorruptError for unreadable lines."""
        try:
            batch = self._columns(block)
        except (pa.ArrowInvalid, ValueError) as error:
            raise ArtifactCorruptError(f"after row {self._rows}: {error}") from None
        self._rows += len(batch)
        return batch

    def _columns(self, block: bytes) -> pa.RecordBatch:
        if self._by_arrow and not block.isspace():
            try:
                return restored_batch(self.arrow_columns(block), self._schema)
            except (pa.ArrowInvalid, ValueError):
                pass  # the slower way names the error, or finds none
        return columns_of(decode_objects(block), self._schema, self._others_ignored)

    def arrow_columns(self, block: bytes) -> list[pa.Array]:
        """Return columns of readable types by Arrow's reader. Raises ArrowInvalid if it gives up."""
        if not begin_as_objects(block):
            raise pa.ArrowInvalid("a line is not a JSON object")
        options = pj.ReadOptions(block_size=max(len(block) // 2, len(block) - BLOCK_BYTES) + 1)
        table = pj.read_json(pa.BufferReader(block), options, self._parse)
        table.validate(full=True)  # Arrow's reader accepts text that is not UTF-8
        names = self._schema.names
        return [_one_chunk(table.column(name)) for name in names]


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def decode_objects(block: bytes) -> list[dict[str, Any]]:
    """Return every line as an object, with exact integers. Skips blank lines."""
    rows = []
    for number, line in enumerate(block.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = _decode(line)
        except UNDECODABLE as error:
            raise UnreadableError(f"line {number} from there is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise UnreadableError(f"line {number} from there is not a JSON object")
        rows.append(row)
    return rows


@dataclass(frozen=True, slots=True)
class JsonlFormat(Format):
    """Exact for every type if there is a schema. Without one, integers stay integers."""

    packing: FileCompression = FileCompression.NONE
    #: Whether to write keys so that Laredo's reader can distinguish them.
    published: bool = False

    id = "jsonl"

    @property
    def compression(self) -> str:
        return self.packing.value

    @property
    def extension(self) -> str:
        return f".jsonl{self.packing.extension}"

    def for_published_readers(self) -> JsonlFormat | None:
        return replace(self, published=True) if self.packing is FileCompression.NONE else None

    def write_rows(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        admitted = admitted_rows(schema, batches)
        return self._write(sink, ((self._row_text(schema, b), len(b)) for b in admitted))

    def _row_text(self, schema: TableSchema, rows: pa.RecordBatch) -> pa.Array:
        if self.published:
            check_published_rows(schema, rows, exact=False)
        return object_text(list(schema.arrow), rows.columns)

    def write_changes(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        admitted = admitted_changes(schema, batches)
        return self._write(sink, ((self._change_text(batch), len(batch)) for batch in admitted))

    def _change_text(self, changes: pa.RecordBatch) -> pa.Array:
        """Return each change as JSON, without absent images. A TRUNCATE has only its action."""
        key = changes["key"]
        text = published_key_text(key, exact=False) if self.published else key_text(key)
        return join(
            '{"action":"',
            changes["action"],
            '"',
            _optional(',"key":', key, value_text(text)),
            _optional(',"old":', changes["before"], value_text(changes["before"])),
            _optional(',"new":', changes["after"], value_text(changes["after"])),
            "}",
        )

    def _write(self, sink: BinaryIO, texts: Iterable[tuple[pa.Array, int]]) -> int:
        count = 0
        with compress_stream(sink, self.packing) as out:
            for text, rows in texts:
                if self.published:
                    check_published_size(text, PUBLISHED_LINE_MAX, self.id)
                lines = join(text, "\n")
                out.write(values_of(lines)[0].data)
                count += rows
        return count

    def read_rows(
        self, source: BinaryIO, schema: TableSchema | None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        if schema is None:
            inferred = selected(inferred_schema(self._objects(source)), columns)
            for rows in self._objects(source):
                yield inferred_batch(rows, inferred)
            return
        arrow = schema.arrow if columns is None else schema.select(columns)
        decoder = LineDecoder(arrow, others_ignored=columns is not None)
        for block in self._blocks(source):
            yield from verified_rows(decoder.decode(block), arrow)

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


def _optional(name: str, column: pa.Array, text: pa.Array) -> pa.Array:
    return pc.if_else(column.is_valid(), join(name, text), "")


JSONL = FormatType(
    id="jsonl",
    summary="a JSON object per line",
    open=JsonlFormat,
    compressions=tuple(FileCompression),
    read_cost=30,
)
