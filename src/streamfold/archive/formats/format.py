"""The seam between an archive and the files it consists of: formats, compression, the registry.

A format turns batches into bytes and back, for bases (rows) and diffs (changes). It is synchronous
and knows no storage: it runs in a thread of a service as well as in a Spark executor.

Whole files are compressed and decompressed as streams. The same input gives the same bytes: gzip has
no time and no name in its header. Both kinds carry a checksum of the content.
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

#: zlib level: 1 is five times as fast as 9 and a tenth larger on rows of JSON.
GZIP_LEVEL = 1
#: zstd's own default.
ZSTD_LEVEL = 3
#: Binary logarithm of the bytes of history that a decoder keeps at most, 128 MiB; level 3 needs 2 MiB.
ZSTD_WINDOW_LOG_MAX = 27
#: Bytes of zstd taken at once.
ZSTD_STEP = 16 << 10


class FileCompression(enum.StrEnum):
    """How a whole file is compressed; the value is what the manifest says."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"

    @property
    def extension(self) -> str:
        return {"none": "", "gzip": ".gz", "zstd": ".zst"}[self.value]


@contextmanager
def compress_stream(sink: BinaryIO, compression: FileCompression) -> Iterator[BinaryIO]:
    """A sink whose bytes arrive compressed in `sink`, complete when the block ends well."""
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
                file.write(b"")  # a file without content is a frame too
                yield cast("BinaryIO", file)


def decompress_stream(source: BinaryIO, compression: FileCompression, size: int) -> Iterator[bytes]:
    """The content in blocks of at most `size` bytes; cut or changed input is refused."""
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
    """One frame to its end; the library's own reader would silently accept truncated input."""
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


#: Rows and bytes of Arrow data in a batch at most: what a reader and a writer hold in memory.
BATCH_ROWS_MAX = 1 << 16
BATCH_BYTES_MAX = 16 << 20


@runtime_checkable
class Format(Protocol):
    """One way to write a table as a file; stateless, picklable, safe to share between threads.

    The same rows in the same order give the same bytes. Row batches have `schema.arrow`, change
    batches `schema.changes`. Batches that do not fit the schema are refused with InvalidError and
    nothing is left out; bytes that cannot be understood raise ArtifactCorruptError.

    Subclass it: what a format can do besides has a default here.
    """

    @property
    def id(self) -> str:
        """What the manifest calls it, the same whatever the compression."""
        ...

    @property
    def compression(self) -> str:
        """none | gzip | zstd: whether the whole file is compressed, as the manifest records it."""
        ...

    @property
    def extension(self) -> str:
        """End of an object key, with the dot."""
        ...

    @property
    def reads_row_groups(self) -> bool:
        """Whether files are Parquet ones, of which readers may take row groups and columns."""
        return False

    def for_hashed_file(self) -> Format:
        """The format for a file whose hash was checked: it need not check the file once more."""
        return self

    def for_published_readers(self) -> Format | None:
        """The format as Laredo's reader decodes it, keys included; None if it cannot."""
        return None

    def write_rows(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        """Write a base to a sink that need not seek; return the number of rows."""
        ...

    def write_changes(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        """Write a diff to a sink that need not seek; return the number of changes."""
        ...

    def read_rows(
        self, source: BinaryIO, schema: TableSchema | None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """A base in batches, of `columns` in that order where given, from a source that can seek.

        `schema` is the one that the manifest names for the artifact. Without one, the file's own is
        used, or types are inferred where the format has none.
        """
        ...

    def read_changes(
        self, source: BinaryIO, schema: TableSchema | None
    ) -> Iterator[pa.RecordBatch]:
        """A diff in batches, from a source that can seek.

        Where neither the caller nor the file has a schema, key is struct<key: string>, the
        published text form of a key.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatType(Extension):
    """Declares a format; the id is that of manifests and of `formats` in configurations."""

    open: Callable[[FileCompression], Format]
    #: How whole files may be compressed; `<id>.gz` and `<id>.zst` in configurations.
    compressions: tuple[FileCompression, ...] = (FileCompression.NONE,)
    #: Readers take the format with the lowest of those that an artifact exists in.
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
    """The format of this id; InvalidError when it is unknown, or cannot be compressed that way."""
    if format_id in FORMATS:
        kind = FORMATS.get(format_id)
        if compression in kind.compressions:
            return kind.open(FileCompression(compression))
    raise InvalidError(
        f"format {format_id!r} with compression {compression!r} is unknown: formats are "
        f"{', '.join(format_names())}"
    )


def format_names() -> Iterator[str]:
    """What configurations call formats: their ids, then those that are compressed as a whole."""
    yield from FORMATS.ids()
    for kind in FORMATS:
        yield from (
            kind.id + c.extension for c in kind.compressions if c is not FileCompression.NONE
        )


def parse_format_name(name: str) -> tuple[str, str]:
    """The id and the compression of `jsonl.gz` and the like; any other name is an id."""
    for compression in FileCompression:
        format_id = name.removesuffix(compression.extension)
        if compression.extension and format_id != name and format_id in FORMATS:
            return format_id, compression.value
    return name, FileCompression.NONE.value
