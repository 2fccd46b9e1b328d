"""Artifact files, written once in every format, hashed while written, sent to every destination.

A table's only writer makes a plan and may send it to executors, which write the parts of different
buckets. The writer commits the parts that they report.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import msgspec
import pyarrow as pa

from streamfold.archive.destinations.mirrors import Mirrors
from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.conforming import conform
from streamfold.archive.formats.format import Format
from streamfold.archive.manifest.model import Artifact, FormatFiles, Manifest, Part, SourceRange
from streamfold.archive.manifest.positions import PositionOrder
from streamfold.archive.manifest.updates import TableShape
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.layout import STREAMFOLD, Layout
from streamfold.blob.local_files import finish
from streamfold.errors import InvalidError

#: Bytes of a file kept in memory. A larger file goes to a temporary file.
SPOOL_MEMORY = 8 * 1024 * 1024
#: Bytes per piece of an upload.
PIECE = 1024 * 1024

Batches = Iterable[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Settings that all parts of one artifact share. `attempt` is never reused."""

    epoch: int
    from_position: str | None
    to_position: str
    attempt: str
    schema: TableSchema
    formats: tuple[Format, ...]
    order: PositionOrder
    source_range: SourceRange | None = None
    incomplete_before: str | None = None
    layout: Layout = STREAMFOLD

    @property
    def is_base(self) -> bool:
        return self.from_position is None

    def path(self, form: Format, bucket: int | None) -> str:
        """Return the name of one file."""
        return self.layout.path(
            form,
            self.order,
            epoch=self.epoch,
            from_position=self.from_position,
            to_position=self.to_position,
            attempt=self.attempt,
            bucket=bucket,
        )


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """One bucket of an artifact, by format: durable, but not yet committed."""

    files: dict[str, Part]
    #: URIs of destinations that lack some of the files. Each file is in another destination.
    lacking: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class WrittenDiff:
    """All parts of a diff, to be committed together with the base that it leads to."""

    plan: PartPlan
    parts: Sequence[WrittenPart]
    record_count: int | None = None


async def write_part(
    plan: PartPlan,
    batches: Batches,
    mirrors: Mirrors,
    *,
    bucket: int | None = None,
    marks: Mapping[str, object] | None = None,
    spool: Path | None = None,
) -> WrittenPart:
    """Write the rows or changes of one bucket in every format of the plan.

    `marks` are further fields of the parts in the manifest: see `streamfold.archive.buckets`.
    `batches` is read once, in another thread. Memory holds one batch and a few pieces. Larger data
    stays in `spool`, or in the folder for temporary files, until it is sent.
    """
    files: dict[str, Part] = {}
    lacking: frozenset[str] = frozenset()
    with _several_passes(batches, plan, spool) as passes:
        for form in plan.formats:
            file, failed = await _write_file(plan, form, passes, mirrors, bucket, spool)
            files[form.id] = msgspec.structs.replace(file, extra=dict(marks)) if marks else file
            lacking |= failed
    return WrittenPart(files, lacking)


async def _write_file(
    plan: PartPlan,
    form: Format,
    batches: Batches,
    mirrors: Mirrors,
    bucket: int | None,
    spool: Path | None,
) -> tuple[Part, frozenset[str]]:
    path = plan.path(form, bucket)
    write = form.write_rows if plan.is_base else form.write_changes
    with tempfile.SpooledTemporaryFile(SPOOL_MEMORY, dir=str(spool) if spool else None) as file:
        sink = HashingSink(cast("IO[bytes]", file))
        rows = await finish(asyncio.to_thread(write, cast("BinaryIO", sink), plan.schema, batches))
        lacking = await mirrors.put(path, lambda: _pieces(file, sink.size))
    part = Part(
        path=path,
        uri=mirrors.primary.uri + path,
        size_bytes=sink.size,
        sha256=sink.digest(),
        rows=rows,
        bucket=bucket,
    )
    return part, lacking


class HashingSink(io.RawIOBase):
    """A file that is written sequentially and hashed while written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]  # any buffer
        self._file.write(view)
        self._hash.update(view)
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size

    def digest(self) -> str:
        """Return the SHA-256 of everything written, in hexadecimal."""
        return self._hash.hexdigest()


async def _pieces(file: tempfile.SpooledTemporaryFile[bytes], size: int) -> AsyncIterator[bytes]:
    # Several destinations read at once, so none may move the file's own position.
    if size <= SPOOL_MEMORY:
        file.seek(0)
        yield file.read()
        return
    file.flush()
    descriptor = file.fileno()
    for start in range(0, size, PIECE):
        yield await finish(asyncio.to_thread(os.pread, descriptor, PIECE, start))


@contextmanager
def _several_passes(batches: Batches, plan: PartPlan, spool: Path | None) -> Iterator[Batches]:
    """Yield the batches in a form that can be read once for each format."""
    if len(plan.formats) == 1 or isinstance(batches, Sequence):
        yield batches
        return
    schema = plan.schema.arrow if plan.is_base else plan.schema.changes
    with tempfile.NamedTemporaryFile(dir=spool, suffix=".arrow") as file:
        yield _Replay(batches, schema, file.name)


class _Replay:
    """Stores batches on the first pass and reads them from the file afterwards."""

    def __init__(self, batches: Batches, schema: pa.Schema, path: str) -> None:
        self._batches: Batches | None = batches
        self._schema = schema
        self._path = path

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        if self._batches is None:
            with pa.memory_map(self._path) as file:
                yield from pa.ipc.open_stream(file)
            return
        first, self._batches = self._batches, None
        with pa.OSFile(self._path, "wb") as file, pa.ipc.new_stream(file, self._schema) as stored:
            for batch in first:
                fitting = conform(batch, self._schema)
                stored.write_batch(fitting)
                yield fitting


def build_artifact(
    plan: PartPlan,
    parts: Sequence[WrittenPart],
    *,
    created_at: str,
    reason: str | None = None,
    record_count: int | None = None,
) -> Artifact:
    """Return the artifact made of these parts. All formats must have the same number of rows."""
    if not parts:
        raise InvalidError("an artifact has at least one part: write an empty one if it is empty")
    if plan.layout.is_published and len(parts) > 1:
        raise InvalidError(
            f"an artifact has one part in layout {plan.layout.name}, and {len(parts)} were given: "
            "write all rows as one"
        )
    formats = {form.id: _files(form, parts) for form in plan.formats}
    counts = {name: sum(p.rows or 0 for p in files.parts) for name, files in formats.items()}
    if len(set(counts.values())) > 1:
        raise ArtifactCorruptError(f"formats hold different numbers of rows: {counts}")
    [count] = set(counts.values())
    return Artifact(
        kind="snapshot" if plan.is_base else "diff",
        epoch=plan.epoch,
        from_position=plan.from_position,
        to_position=plan.to_position,
        created_at=created_at,
        row_count=count if plan.is_base else None,
        change_count=None if plan.is_base else count,
        record_count=record_count,
        formats=formats,
        schema_id=plan.schema.id,
        rebase_reason=reason,
        source_range=plan.source_range,
        incomplete_before=plan.incomplete_before,
    )


def reused_parts(
    manifest: Manifest | None, plan: PartPlan, buckets: Iterable[int]
) -> list[WrittenPart]:
    """Return the last base's parts for `buckets`, which have not changed since."""
    numbers = sorted(set(buckets))
    if not numbers:
        return []
    if plan.layout.is_published:
        raise InvalidError(
            f"buckets {numbers} cannot be reused in layout {plan.layout.name}, where every epoch has "
            "files of its own: write them all"
        )
    if manifest is None or manifest.base.schema_id != plan.schema.id:
        raise InvalidError(
            f"buckets {numbers} cannot be reused: no base has schema {plan.schema.id}; "
            "write them all"
        )
    return [_reused_part(manifest.base, plan, bucket) for bucket in numbers]


def _reused_part(base: Artifact, plan: PartPlan, bucket: int) -> WrittenPart:
    files = {}
    for form in plan.formats:
        base_files = base.formats.get(form.id)
        parts = [part for part in base_files.parts if part.bucket == bucket] if base_files else []
        if len(parts) != 1 or base_files is None or base_files.compression != form.compression:
            raise InvalidError(
                f"bucket {bucket} cannot be reused: the last base does not have it as "
                f"{form.id}{form.extension}; write it"
            )
        files[form.id] = parts[0]
    return WrittenPart(files)


def table_shape(schema: TableSchema) -> TableShape:
    """Return the schema in the form that the manifest stores."""
    return TableShape(schema.id, schema.to_json(), schema.key_fields, _columns(schema))


def _columns(schema: TableSchema) -> list[dict[str, Any]]:
    # The published names of these fields are capitalised.
    keys = schema.key_fields
    return [
        {
            "Name": field.name,
            "Type": str(field.type),
            "Nullable": field.nullable,
            "PrimaryKey": field.name in keys,
            "OrdinalPosition": number,
            "PrimaryKeyOrdinal": keys.index(field.name) + 1 if field.name in keys else 0,
        }
        for number, field in enumerate(schema.arrow, 1)
    ]


def _files(form: Format, parts: Sequence[WrittenPart]) -> FormatFiles:
    files = tuple(part.files[form.id] for part in parts)
    return FormatFiles(
        uri=files[0].uri,
        size_bytes=sum(part.size_bytes for part in files),
        compression=form.compression,
        parts=files,
    )
