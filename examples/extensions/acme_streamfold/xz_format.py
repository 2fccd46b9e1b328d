"""JSON Lines in xz: the smallest files, for archives that are kept long and read rarely."""

import io
import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import pyarrow as pa

from streamfold.archive import ArtifactCorruptError, TableSchema
from streamfold.archive.formats import Format, FormatType, JsonlFormat

LINES = JsonlFormat()
#: Bytes of the file that are read at once.
BLOCK = 64 << 10


@dataclass(frozen=True)
class XzFormat(Format):
    id = "jsonl-xz"
    compression = "none"
    extension = ".jsonl.xz"

    def write_rows(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        with lzma.open(sink, "wb", preset=0) as file:
            return LINES.write_rows(cast("BinaryIO", file), schema, batches)

    def write_changes(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        with lzma.open(sink, "wb", preset=0) as file:
            return LINES.write_changes(cast("BinaryIO", file), schema, batches)

    def read_rows(
        self, source: BinaryIO, schema: TableSchema | None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        return LINES.read_rows(cast("BinaryIO", Unpacked(source)), schema, columns)

    def read_changes(
        self, source: BinaryIO, schema: TableSchema | None
    ) -> Iterator[pa.RecordBatch]:
        return LINES.read_changes(cast("BinaryIO", Unpacked(source)), schema)


class Unpacked(io.RawIOBase):
    """The lines of a file; Python's own LZMAFile does not notice bytes after the end."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._xz = lzma.LZMADecompressor()
        return self._source.seek(offset, whence)  # readers of lines seek to the start alone

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = b""
        while not found and not self._xz.eof:
            block = self._source.read(BLOCK) if self._xz.needs_input else b""
            if self._xz.needs_input and not block:
                raise ArtifactCorruptError("the xz data is cut")
            try:
                found = self._xz.decompress(block, len(buffer))
            except lzma.LZMAError as error:
                raise ArtifactCorruptError(f"the xz data is changed: {error}") from None
        if self._xz.eof and (self._xz.unused_data or self._source.read(1)):
            raise ArtifactCorruptError("other bytes follow the xz data")
        buffer[: len(found)] = found
        return len(found)


XZ = FormatType(
    id="jsonl-xz",
    summary="a JSON object per line, in xz",
    open=lambda compression: XzFormat(),
    read_cost=60,  # slower to read than all that ship
)
