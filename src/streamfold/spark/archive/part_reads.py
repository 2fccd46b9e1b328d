"""The rows of one part of a table, in a task: its base streams by, its changes are folded in.

Memory holds the net changes of the part, and a batch of its base.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import BinaryIO, TypeVar

import pyarrow as pa

from streamfold.archive.manifest.model import Part
from streamfold.archive.read.decoding import ChosenFiles
from streamfold.archive.read.folding import Delta, fitted
from streamfold.archive.read.part_files import PartFiles
from streamfold.archive.read.rebuild import in_thread
from streamfold.archive.schema import TableSchema
from streamfold.blob.local.files import finish
from streamfold.spark.archive.filters import Condition
from streamfold.spark.archive.planning import TablePart
from streamfold.spark.archive.pruning import WHOLE, read_row_groups

T = TypeVar("T")


async def read_part(
    part: TablePart,
    files: PartFiles,
    schema: TableSchema,
    wanted: pa.Schema,
    conditions: Sequence[Condition],
) -> AsyncGenerator[pa.Table]:
    """Yield the rows of a part; of those that do not pass the conditions, some may be left out."""
    delta = Delta(wanted, schema.select(part.keys) if part.diffs else pa.schema([]))
    await _gather(part, files, delta)
    if not (delta.clears or part.clears):
        needed = {*wanted.names, *(part.keys if part.diffs else ())}
        fields = pa.schema([field for field in schema.arrow if field.name in needed])
        async with aclosing(files.open_all(part.base.parts)) as opened:
            async for file, source in opened:
                rows = _rows(part, file, source, fields, conditions)
                async for piece in in_thread(delta.untouched(fitted(b, fields) for b in rows)):
                    yield piece
    if part.diffs:
        yield await finish(asyncio.to_thread(delta.rows))


async def _gather(part: TablePart, files: PartFiles, delta: Delta) -> None:
    for number, diff in enumerate(part.diffs):
        delta.begin(clears=part.clears and number == 0)
        async with aclosing(files.open_all(diff.parts)) as opened:
            async for file, source in opened:
                changes = diff.changes(file, source, part.keys)
                await finish(asyncio.to_thread(_add_all, delta, changes))


def _add_all(delta: Delta, changes: Iterable[pa.RecordBatch]) -> None:
    for batch in changes:
        delta.add(batch)


def _rows(
    part: TablePart,
    file: Part,
    source: BinaryIO,
    fields: pa.Schema,
    conditions: Sequence[Condition],
) -> Iterator[pa.RecordBatch]:
    base: ChosenFiles = part.base
    written = base.schema.arrow if base.schema else fields
    own = pa.schema([field for field in written if field.name in fields.names])
    if base.form.reads_row_groups and (conditions or part.share != WHOLE):
        return read_row_groups(file, source, own, conditions, part.share)
    return base.rows(file, source, None if own.names == written.names else own.names)


def iterate(make: Callable[[], AsyncGenerator[T]]) -> Iterator[T]:
    """What an asynchronous generator yields, one by one, on an event loop of its own."""
    with asyncio.Runner() as runner:
        items, nothing = make(), object()

        async def step() -> T | object:
            return await anext(items, nothing)

        try:
            while (item := runner.run(step())) is not nothing:
                yield item  # type: ignore[misc]  # not the object that says that there is none
        finally:
            runner.run(items.aclose())
