"""The seam between an archive and the files it consists of.

A format turns batches into bytes and back, for bases (rows) and diffs (changes). It is synchronous
and knows no storage: it runs in a thread of a service as well as in a Spark executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol, runtime_checkable

import pyarrow as pa

from streamfold.archive.formats.compression import Compression
from streamfold.archive.schema import TableSchema
from streamfold.extensions import Extension

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

    open: Callable[[Compression], Format]
    #: How whole files may be compressed; `<id>.gz` and `<id>.zst` in configurations.
    compressions: tuple[Compression, ...] = (Compression.NONE,)
    #: Readers take the format with the lowest of those that an artifact exists in.
    read_cost: int = 50
