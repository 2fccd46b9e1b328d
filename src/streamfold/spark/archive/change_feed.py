"""The change feed: one row per changed key of each diff, with the diff's position range.

Tasks read diff files unmodified. A TRUNCATE row has no key. If a diff has several files, only the
first yields its TRUNCATE row.
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

#: Approximate bytes of diff files per task: many diffs are tiny.
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
    """One diff file. `truncates` overrides whether it yields a TRUNCATE. None follows the file."""

    diff: ChosenFiles
    part: Part
    truncates: bool | None = None


def feed_columns(table: TableSchema, columns: Sequence[str]) -> pa.Schema:
    """Return the feed's columns: position range, key fields, and row images of `columns`."""
    keys = [table.arrow.field(name).with_nullable(True) for name in table.key_fields]
    reserved = {*(field.name for field in _RANGE), *_IMAGES}
    if clash := [field.name for field in keys if field.name in reserved]:
        raise InvalidError(
            f"key fields {clash} have the names of columns of the change feed: read the "
            "changes with streamfold.archive, or rename the fields"
        )
    chosen = table.select(columns)
    images = [_image(table, name, chosen) for name in _IMAGES]
    return pa.schema([*_RANGE, *keys, *images])


def _image(table: TableSchema, name: str, chosen: pa.Schema) -> pa.Field:
    kind = table.changes.field(name).type
    return pa.field(name, pa.struct([kind.field(column) for column in chosen.names]))


async def feed_parts(
    plan: ChangesPlan, decoding: Decoding, files: PartFiles
) -> list[tuple[FeedPart, ...]]:
    """Return all diff files in order, grouped into tasks of about `TASK_BYTES`."""
    keys = decoding.keys(plan.manifest)
    feed: list[FeedPart] = []
    for artifact in plan.diffs:
        diff = slim(decoding.choose(plan.manifest, artifact))
        several = len(diff.parts) > 1
        shows = await empties(diff, files, keys) if several else None
        own = ChosenFiles(diff.artifact, diff.form, diff.schema, ())
        for number, part in enumerate(diff.parts):
            feed.append(FeedPart(own, part, shows and number == 0))
    return list(_grouped(feed))


def _grouped(parts: Iterable[FeedPart]) -> Iterator[tuple[FeedPart, ...]]:
    group: list[FeedPart] = []
    size = 0
    for part in parts:
        group.append(part)
        size += part.part.size_bytes
        if size >= TASK_BYTES:
            yield tuple(group)
            group, size = [], 0
    if group:
        yield tuple(group)


async def read_feed(
    parts: Sequence[FeedPart], files: PartFiles, table: TableSchema, columns: pa.Schema
) -> AsyncGenerator[pa.RecordBatch]:
    """Yield the files' changes in order, in the feed's columns."""
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
    positions = (artifact.from_position, artifact.to_position, artifact.epoch)
    keys = columns_of(changes["key"], table.select(table.key_fields)).columns
    arrays = [
        changes["action"],
        *(
            pa.repeat(pa.scalar(v, f.type), count)
            for v, f in zip(positions, _RANGE[1:], strict=True)
        ),
        *keys,
        *(_narrowed(changes[name], columns.field(name).type) for name in _IMAGES),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


def _narrowed(images: pa.StructArray, kind: pa.DataType) -> pa.StructArray:
    """Return the images reduced to the fields of `kind`. Null images stay null."""
    if images.type == kind:
        return images
    children = dict(zip((f.name for f in images.type), images.flatten(), strict=True))
    return pa.StructArray.from_arrays(
        [children[field.name] for field in kind], fields=list(kind), mask=images.is_null()
    )
