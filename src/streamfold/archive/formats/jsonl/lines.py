"""Lines of JSON as columns: by Arrow's reader where it can, by msgspec where it cannot.

Arrow's reader is several times faster, and gives up on what it does not know: maps, NaN as text,
integers written as doubles. What it refuses is decoded again, value by value, so that results and
errors are those of the slower way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.json as pj

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.conforming import has_map
from streamfold.archive.formats.jsonl.json_values import (
    UnreadableError,
    columns_of,
    readable_field,
    restored_batch,
)

#: Bytes of lines that are decoded at once: enough to keep Arrow's threads busy, few to hold.
BLOCK_BYTES = 4 << 20


def whole_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes, cut only after a line; the last line may lack its end."""
    rest: list[bytes] = []
    for block in blocks:
        cut = block.rfind(b"\n") + 1
        if not cut:
            rest.append(block)
            continue
        yield b"".join([*rest, block[:cut]])
        rest = [block[cut:]]
    if last := b"".join(rest):
        yield last


class LineDecoder:
    """Turns blocks of lines into columns of `schema`; counts rows, so that errors say where."""

    def __init__(self, schema: pa.Schema, others_ignored: bool) -> None:
        """`others_ignored`: fields that the schema does not have are ignored."""
        self._schema = schema
        self._others_ignored = others_ignored
        self._rows = 0
        # Arrow's reader cannot read objects whose keys are not known beforehand.
        self._by_arrow = not any(has_map(field.type) for field in schema)
        self._parse = pj.ParseOptions(
            explicit_schema=pa.schema([readable_field(field) for field in schema]),
            unexpected_field_behavior="ignore" if others_ignored else "error",
        )

    def decode(self, block: bytes) -> pa.RecordBatch:
        """The columns of the block's lines; ArtifactCorruptError when a line is not readable."""
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
        """The columns in readable types by Arrow's reader; ArrowInvalid for what it does not know."""
        options = pj.ReadOptions(block_size=max(len(block) // 2, len(block) - BLOCK_BYTES) + 1)
        table = pj.read_json(pa.BufferReader(block), options, self._parse)
        table.validate(full=True)  # Arrow's reader takes text that is not UTF-8
        names = self._schema.names
        return [_one_chunk(table.column(name)) for name in names]


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


_decode: Callable[[bytes], Any] = msgspec.json.Decoder().decode


def decode_objects(block: bytes) -> list[dict[str, Any]]:
    """Every line as an object, integers exact; blank lines are left out."""
    rows = []
    for number, line in enumerate(block.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnreadableError(f"line {number} of the next is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise UnreadableError(f"line {number} of the next is not a JSON object")
        rows.append(row)
    return rows
