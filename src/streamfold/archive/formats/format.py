"""The interface between an archive and its files: formats, compression, the registry.

A format turns batches into bytes and back, for bases (rows) and diffs (changes). It is synchronous
and independent of storage: it runs in a service's thread as well as in a Spark executor.

Whole files are compressed and decompressed as streams. The same input gives the same bytes: gzip
has no time and no name in its header. Both compressions carry a checksum of the content.
"""

from __future__ import annotations

import enum
import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Protocol, cast, runtime_checkable

import pyarrow as pa

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.schema import TableSchema
from streamfold.errors import InvalidError
from streamfold.extensions import Extension, Registry

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

#: zlib level: 1 is five times as fast as 9 and gives a tenth more bytes for JSON rows.
GZIP_LEVEL = 1
#: zstd's own default.
ZSTD_LEVEL = 3
#: log2 of the maximum history, in bytes, that a decoder retains: 128 MiB. Level 3 needs 2 MiB.
ZSTD_WINDOW_LOG_MAX = 27
#: Bytes of compressed input per zstd call.
ZSTD_STEP = 16 << 10


class FileCompression(enum.StrEnum):
    """How a whole file is compressed. The value is the manifest's."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"

    @property
    def extension(self) -> str:
        return {"none": "", "gzip": ".gz", "zstd": ".zst"}[self.value]


@contextmanager
def compress_stream(sink: BinaryIO, compression: FileCompression) -> Iterator[BinaryIO]:
    """Yield a sink whose bytes arrive compressed in `sink`. They are complete if the block succeeds."""
    match compression:
        case FileCompression.NONE:
            yield sink
        case FileCompression.GZIP:
            with gzip.GzipFile("", "wb", GZIP_LEVEL, sink, mtime=0) as file:
                yield cast("BinaryIO", file)
        case FileCompression.ZSTD:
            parameter = zstd.CompressionParameter
            options: dict[int, int] = {
                parameter.compression_level: ZSTD_LEVEL,
                parameter.checksum_flag: 1,
            }
            with zstd.ZstdFile(sink, "wb", options=options) as file:
                file.write(b"")  # a file without content is a frame, too
                yield cast("BinaryIO", file)


def decompress_stream(source: BinaryIO, compression: FileCompression, size: int) -> Iterator[bytes]:
    """Yield the content in blocks of at most `size` bytes. Rejects truncated or changed input."""
    match compression:
        case FileCompression.NONE:
            yield from iter(lambda: source.read(size), b"")
        case FileCompression.GZIP:
            yield from _unpacked_gzip(source, size)
        case FileCompression.ZSTD:
            yield from _unpacked_zstd(source, size)


def _unpacked_gzip(source: BinaryIO, size: int) -> Iterator[bytes]:
    file = gzip.GzipFile(fileobj=source, mode="rb")
    while True:
        try:
            block = file.read(size)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ArtifactCorruptError(f"the gzip data is cut or changed: {error}") from None
        if not block:
            break
        yield block
    if not source.tell():
        raise ArtifactCorruptError("the file is empty: even an empty table has a gzip header")


def _unpacked_zstd(source: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield one whole frame. The library's own reader would silently accept truncated input."""
    window: dict[int, int] = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG_MAX}
    decoder = zstd.ZstdDecompressor(options=window)
    content = io.BytesIO()
    try:
        while not decoder.eof:
            packed = source.read(ZSTD_STEP) if decoder.needs_input else b""
            if not packed and decoder.needs_input:
                break
            content.write(decoder.decompress(packed, size - content.tell()))
            if content.tell() >= size:
                yield content.getvalue()
                content = io.BytesIO()
    except zstd.ZstdError as error:
        raise ArtifactCorruptError(f"the zstd data is changed: {error}") from None
    if not decoder.eof or decoder.unused_data or source.read(1):
        raise ArtifactCorruptError("the zstd data is cut, or other bytes follow it")
    if content.tell():
        yield content.getvalue()


#: Maximum rows and bytes of Arrow data in a batch, which bound a reader's and a writer's memory.
BATCH_ROWS_MAX = 1 << 16
BATCH_BYTES_MAX = 16 << 20


@runtime_checkable
class Format(Protocol):
    """One way to write a table as a file. Stateless, picklable, and safe to share between threads.

    The same rows in the same order give the same bytes. Row batches have `schema.arrow`, change
    batches `schema.changes`. Batches that do not fit the schema raise InvalidError, and nothing is
    left out. Undecodable bytes raise ArtifactCorruptError.

    Subclass it: optional features have defaults here.
    """

    @property
    def id(self) -> str:
        """The format's name in manifests, the same whatever the compression."""
        ...

    @property
    def compression(self) -> str:
        """The compression of the whole file, as the manifest records it: none, gzip or zstd."""
        ...

    @property
    def extension(self) -> str:
        """The end of an object key, with the dot."""
        ...

    @property
    def reads_row_groups(self) -> bool:
        """Whether files are Parquet, so that readers may read single row groups and columns."""
        return False

    def for_hashed_file(self) -> Format:
        """Return the format for a file whose hash was checked, which need not be checked again."""
        return self

    def for_published_readers(self) -> Format | None:
        """Return the format as Laredo's reader decodes it, including keys, or None if it cannot."""
        return None

    def write_rows(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        """Write a base to a sink that need not be seekable, and return the number of rows."""
        ...

    def write_changes(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        """Write a diff to a sink that need not be seekable, and return the number of changes."""
        ...

    def read_rows(
        self, source: BinaryIO, schema: TableSchema | None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield a base in batches, from a seekable source. `columns` selects and orders columns.

        `schema` is the one that the manifest names for the artifact. Without one, the file's own is
        used, or types are inferred if the format has none.
        """
        ...

    def read_changes(
        self, source: BinaryIO, schema: TableSchema | None
    ) -> Iterator[pa.RecordBatch]:
        """Yield a diff in batches, from a seekable source.

        If neither the caller nor the file has a schema, key is struct<key: string>, the published
        text form of a key.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatType(Extension):
    """Declares a format. Its id is used in manifests and in `formats` in configurations."""

    open: Callable[[FileCompression], Format]
    #: How whole files may be compressed: `<id>.gz` and `<id>.zst` in configurations.
    compressions: tuple[FileCompression, ...] = (FileCompression.NONE,)
    #: Relative cost of reading. Readers choose the cheapest format in which an artifact exists.
    read_cost: int = 50


_FORMATS = "streamfold.archive.formats"

#: Every format that `format_of` knows.
FORMATS = Registry(
    "streamfold.formats",
    "format",
    FormatType,
    {
        "jsonl": f"{_FORMATS}.jsonl.jsonl:JSONL",
        "parquet": f"{_FORMATS}.parquet:PARQUET",
        "protobuf": f"{_FORMATS}.protobuf.published:PROTOBUF",
        "protobuf-typed": f"{_FORMATS}.protobuf.typed:TYPED_PROTOBUF",
    },
)


def format_of(format_id: str, compression: str = "none") -> Format:
    """Return the format with this id. Raises InvalidError if it or the compression is not supported."""
    if format_id in FORMATS:
        kind = FORMATS.get(format_id)
        if compression in kind.compressions:
            return kind.open(FileCompression(compression))
    raise InvalidError(
        f"format {format_id!r} with compression {compression!r} is unknown: formats are "
        f"{', '.join(format_names())}"
    )


def format_names() -> Iterator[str]:
    """Yield the formats' names in configurations: their ids, then the compressed variants."""
    yield from FORMATS.ids()
    for kind in FORMATS:
        yield from (
            kind.id + c.extension for c in kind.compressions if c is not FileCompression.NONE
        )


def parse_format_name(name: str) -> tuple[str, str]:
    """Return the id and compression in a name such as `jsonl.gz`. Any other name is an id."""
    for compression in FileCompression:
        format_id = name.removesuffix(compression.extension)
        if compression.extension and format_id != name and format_id in FORMATS:
            return format_id, compression.value
    return name, FileCompression.NONE.value
