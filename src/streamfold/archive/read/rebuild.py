"""Rebuilds a table from a plan: streams the base, holds the changes and folds them in.

If base and diffs have parts by key bucket, one bucket is folded after another, and memory holds the
changes of one bucket. Otherwise it holds the net changes of the plan. Archives by other writers
without a schema are held in full, because their types are known only once everything is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO, TypeVar

import pyarrow as pa

from streamfold.archive.manifest.model import Part
from streamfold.archive.read.decoding import ChosenFiles, Decoding
from streamfold.archive.read.folding import Delta, fitted
from streamfold.archive.read.part_files import PartFiles
from streamfold.archive.read.plan import TablePlan
from streamfold.archive.read.untyped import fold_untyped
from streamfold.archive.schema import TableSchema
from streamfold.blob.local_files import finish
from streamfold.errors import InvalidError

T = TypeVar("T")
#: Files opened one after another, each until the next is requested.
Opened = AsyncGenerator[tuple[Part, BinaryIO]]


@dataclass(frozen=True)
class Rebuild:
    """The rows of one plan, as Arrow tables. Their order has no meaning."""

    plan: TablePlan
    files: PartFiles
    decoding: Decoding
    columns: tuple[str, ...] | None = None

    @cached_property
    def keys(self) -> tuple[str, ...]:
        return self.decoding.keys(self.plan.manifest)

    @cached_property
    def base(self) -> ChosenFiles:
        return self.decoding.choose(self.plan.manifest, self.plan.base)

    @cached_property
    def diffs(self) -> list[ChosenFiles]:
        return [self.decoding.choose(self.plan.manifest, diff) for diff in self.plan.diffs]

    async def pieces(self) -> AsyncGenerator[pa.Table]:
        """Yield the table in pieces: at least one, which may be empty."""
        schema = self.decoding.schema_of(self.plan.manifest, self.plan.last)
        if schema is None:
            yield await self._untyped()
            return
        columns = schema.arrow if self.columns is None else schema.select(self.columns)
        yield columns.empty_table()
        buckets = self._buckets()
        clearing = await self._clearing() if buckets != [None] else set()
        async with aclosing(self.files.open_all(self._parts(buckets, clearing))) as opened:
            for bucket in buckets:
                delta = Delta(columns, schema.select(self.keys) if self.diffs else pa.schema([]))
                await self._gather(delta, bucket, clearing, opened)
                if not delta.clears:
                    async with aclosing(self._untouched(delta, bucket, schema, opened)) as pieces:
                        async for piece in pieces:
                            yield piece
                yield await finish(asyncio.to_thread(delta.rows))

    def _buckets(self) -> Sequence[int | None]:
        """Return the buckets that can be folded one by one, or a single None for all together."""
        numbers = {part.bucket for chosen in (self.base, *self.diffs) for part in chosen.parts}
        buckets = sorted(bucket for bucket in numbers if bucket is not None)
        return [None] if None in numbers or not self.diffs else buckets

    async def _clearing(self) -> set[str]:
        """Return the end positions of diffs that truncate the table, as any of their parts may show."""
        ends = set()
        for diff in self.diffs:
            if await truncates(diff, self.files, self.keys):
                ends.add(diff.artifact.to_position)
        return ends

    def _parts(self, buckets: Sequence[int | None], clearing: set[str]) -> Iterator[Part]:
        """Yield every file in the order of use, so that files can be fetched ahead."""
        for bucket in buckets:
            for diff in self.diffs:
                yield from _of(diff, bucket)
            if not clearing:
                yield from _of(self.base, bucket)

    async def _gather(
        self, delta: Delta, bucket: int | None, clearing: set[str], opened: Opened
    ) -> None:
        """Add all changes of the plan, or those of one bucket, to `delta`."""
        for diff in self.diffs:
            delta.begin(clears=diff.artifact.to_position in clearing)
            for _ in _of(diff, bucket):
                part, source = await anext(opened)
                changes = diff.changes(part, source, self.keys)
                await finish(asyncio.to_thread(_add_all, delta, changes))

    async def _untouched(
        self, delta: Delta, bucket: int | None, schema: TableSchema, opened: Opened
    ) -> AsyncGenerator[pa.Table]:
        """Yield the base's remaining rows, decoding each piece while the previous one is folded."""
        needed = {*delta.columns.names, *(self.keys if self.diffs else ())}
        fields = pa.schema([f for f in schema.arrow if f.name in needed])
        written = self.base.schema or schema
        names = [name for name in written.names if name in needed]
        columns = None if names == written.names else names
        for _ in _of(self.base, bucket):
            part, source = await anext(opened)
            rows = prefetch(self.base.rows(part, source, columns))
            untouched = delta.untouched(fitted(batch, fields) for batch in rows)
            async with aclosing(in_thread(untouched)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _untyped(self) -> pa.Table:
        """Return the whole table, with columns that fit all values."""
        rows: list[pa.RecordBatch] = []
        async with aclosing(self.files.open_all(self.base.parts)) as opened:
            async for part, source in opened:
                rows += [batch async for batch in in_thread(self.base.rows(part, source))]
        diffs: list[list[pa.RecordBatch]] = []
        for diff in self.diffs:
            async with aclosing(self.files.open_all(diff.parts)) as opened:
                async for part, source in opened:
                    changes = diff.changes(part, source, self.keys)
                    diffs.append([batch async for batch in in_thread(changes)])
        table = await finish(asyncio.to_thread(fold_untyped, rows, diffs, self.keys))
        return table if self.columns is None else _selected(table, self.columns)


async def truncates(diff: ChosenFiles, files: PartFiles, keys: Sequence[str]) -> bool:
    """Return whether any part of the diff begins with a TRUNCATE, which then applies to all parts."""
    async with aclosing(files.open_all(diff.parts)) as opened:
        async for part, source in opened:
            first = await finish(asyncio.to_thread(next, diff.changes(part, source, keys), None))
            if first is not None and len(first) and first["action"][0].as_py() == "TRUNCATE":
                return True
    return False


async def in_thread(items: Iterator[T]) -> AsyncGenerator[T]:
    """Yield the iterator's items, each made in another thread, where a generator is closed too."""
    nothing = object()
    try:
        while (item := await finish(asyncio.to_thread(next, items, nothing))) is not nothing:
            yield item  # type: ignore[misc]  # not the sentinel
    finally:
        if isinstance(items, Generator):
            await finish(asyncio.to_thread(items.close))


def batches_of(piece: pa.Table, *, needed: bool) -> list[pa.RecordBatch]:
    """Return the nonempty batches, or one empty batch if there is none and one is needed."""
    batches: list[pa.RecordBatch] = [batch for batch in piece.to_batches() if len(batch)]
    if batches or not needed:
        return batches
    return [pa.RecordBatch.from_pylist([], schema=piece.schema)]


async def in_batches(pieces: AsyncGenerator[pa.Table]) -> AsyncGenerator[pa.RecordBatch]:
    """Yield the rows in batches. The first may be empty but always has the columns."""
    needed = True
    async with aclosing(pieces):
        async for piece in pieces:
            for batch in batches_of(piece, needed=needed):
                needed = False
                yield batch


def _of(chosen: ChosenFiles, bucket: int | None) -> list[Part]:
    return [part for part in chosen.parts if bucket in (None, part.bucket)]


def _add_all(delta: Delta, changes: Iterable[pa.RecordBatch]) -> None:
    for batch in changes:
        delta.add(batch)


def _selected(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    if unknown := [name for name in columns if name not in table.column_names]:
        raise InvalidError(f"columns {unknown} do not exist: name some of {table.column_names}")
    return table.select(list(columns))


def prefetch(items: Iterator[T]) -> Generator[T]:
    """Yield the same items, each made in another thread while the previous one is in use.

    If closed early, waits for the item in progress, so nothing is read after the caller has closed
    it.
    """
    nothing = object()
    with ThreadPoolExecutor(1, "archive-ahead") as maker:
        coming = maker.submit(next, items, nothing)
        while (item := coming.result()) is not nothing:
            coming = maker.submit(next, items, nothing)
            yield item  # type: ignore[misc]  # not the sentinel
