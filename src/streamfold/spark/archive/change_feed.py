"""The change feed: one row per changed key of each diff, with the range of the diff.

Tasks read diff files as they are. A TRUNCATE has no key; if a diff has several files, only the first
shows it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.manifest.model import Part
from streamfold.archive.read.decoding import ChosenFiles, Decoding
from streamfold.archive.read.folding import columns_of, fitted
from streamfold.archive.read.part_files import PartFiles
from streamfold.archive.read.plan import ChangesPlan
from streamfold.archive.read.rebuild import in_thread
from streamfold.archive.schema import TableSchema
from streamfold.errors import InvalidError
from streamfold.spark.archive.planning import empties, slim

#: About how many bytes of diff files one task reads: many diffs are tiny.
TASK_BYTES = 32 << 20

_RANGE = (
    pa.field("_action", pa.string(), nullable=False),
    pa.field("_from_position", pa.string(), nullable=False),
    pa.field("_to_position", pa.string(), nullable=False),
    pa.field("_epoch", pa.int64(), nullable=False),
)
_IMAGES = ("before", "after")


@dataclass(frozen=True, slots=True)
class FeedPart:
    """One file of a diff. `truncates` says whether it shows a TRUNCATE; None: as the file does."""

    diff: ChosenFiles
    part: Part
    truncates: bool | None = None


def feed_columns(table: TableSchema, columns: Sequence[str]) -> pa.Schema:
    """Return the columns of the feed: the range, the key fields, and images of `columns`."""
    keys = [table.arrow.field(name).with_nullable(True) for name in table.key_fields]
    taken = {*(field.name for field in _RANGE), *_IMAGES}
    if clash := [field.name for field in keys if field.name in taken]:
        raise InvalidError(
            f"key fields {clash} have the names of columns of the change feed: read the "
            "changes with streamfold.archive, or rename the fields"
        )
    wanted = table.select(columns)
    images = [_image(table, name, wanted) for name in _IMAGES]
    return pa.schema([*_RANGE, *keys, *images])


def _image(table: TableSchema, name: str, wanted: pa.Schema) -> pa.Field:
    kind = table.changes.field(name).type
    return pa.field(name, pa.struct([kind.field(column) for column in wanted.names]))


async def feed_parts(
    plan: ChangesPlan, decoding: Decoding, files: PartFiles
) -> list[tuple[FeedPart, ...]]:
    """Return the files of all diffs, in order, in groups of about `TASK_BYTES`."""
    keys = decoding.keys(plan.manifest)
    found: list[FeedPart] = []
    for artifact in plan.diffs:
        diff = slim(decoding.choose(plan.manifest, artifact))
        several = len(diff.parts) > 1
        shows = await empties(diff, files, keys) if several else None
        own = ChosenFiles(diff.artifact, diff.form, diff.schema, ())
        for number, part in enumerate(diff.parts):
            found.append(FeedPart(own, part, shows and number == 0))
    return list(_grouped(found))


def _grouped(parts: Iterable[FeedPart]) -> Iterator[tuple[FeedPart, ...]]:
    held: list[FeedPart] = []
    size = 0
    for part in parts:
        held.append(part)
        size += part.part.size_bytes
        if size >= TASK_BYTES:
            yield tuple(held)
            held, size = [], 0
    if held:
        yield tuple(held)


async def read_feed(
    parts: Sequence[FeedPart], files: PartFiles, table: TableSchema, columns: pa.Schema
) -> AsyncGenerator[pa.RecordBatch]:
    """Yield the changes of some files, in order, in the columns of the feed."""
    rest = iter(parts)
    async with aclosing(files.open_all([part.part for part in parts])) as opened:
        async for file, source in opened:
            own = next(rest)
            if own.truncates:
                yield _rows(_truncate(table), own.diff, table, columns)
            async for batch in in_thread(own.diff.changes(file, source, table.key_fields)):
                changes = fitted(batch, table.changes)
                if own.truncates is not None:
                    changes = changes.filter(pc.not_equal(changes["action"], "TRUNCATE"))
                if len(changes):
                    yield _rows(changes, own.diff, table, columns)


def _truncate(table: TableSchema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"action": "TRUNCATE"}], schema=table.changes)


def _rows(
    changes: pa.RecordBatch, diff: ChosenFiles, table: TableSchema, columns: pa.Schema
) -> pa.RecordBatch:
    artifact, count = diff.artifact, len(changes)
    found = (artifact.from_position, artifact.to_position, artifact.epoch)
    keys = columns_of(changes["key"], table.select(table.key_fields)).columns
    arrays = [
        changes["action"],
        *(pa.repeat(pa.scalar(v, f.type), count) for v, f in zip(found, _RANGE[1:], strict=True)),
        *keys,
        *(_narrowed(changes[name], columns.field(name).type) for name in _IMAGES),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


def _narrowed(images: pa.StructArray, kind: pa.DataType) -> pa.StructArray:
    """Return the images with only the wanted columns; null images stay null."""
    if images.type == kind:
        return images
    children = dict(zip((f.name for f in images.type), images.flatten(), strict=True))
    return pa.StructArray.from_arrays(
        [children[field.name] for field in kind], fields=list(kind), mask=images.is_null()
    )
