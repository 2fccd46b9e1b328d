"""Published changes, diff by diff, and tables kept up to date with them.

A diff comes as one or more batches. A consumer that has applied all of them, including the `last`
one, has the table at `to_position`. Changes are keyed, so applying some of them again is harmless.

A follower goes from diff to diff, even across re-bases, whose closing diffs lead to the new base.
Only if no diff continues, because changes were lost or epochs were pruned while it was away, does
it get all rows again, as a replacement.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.errors import ChainGapError, PositionPrunedError
from streamfold.archive.read.decoding import ChosenFiles, Decoding
from streamfold.archive.read.folding import fitted
from streamfold.archive.read.part_files import PartFiles, PartGoneError
from streamfold.archive.read.plan import ChangesPlan
from streamfold.archive.read.rebuild import batches_of, in_thread, truncates
from streamfold.archive.schema import TableSchema

if TYPE_CHECKING:
    from streamfold.archive.read.reader import Archive

#: Waits until there may be a new commit, for example through a subscription to the archive's
#: events.
Wake = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of one diff, `(from_position, to_position]`.

    `batch` has the columns action, key, before and after. A TRUNCATE is the first change of its
    diff. An empty diff is one empty batch.
    """

    from_position: str
    to_position: str
    epoch: int
    batch: pa.RecordBatch
    last: bool


@dataclass(frozen=True, slots=True)
class ChangeFeed:
    """Reads the changes of one plan, under the newest schema of its diffs."""

    plan: ChangesPlan
    files: PartFiles
    decoding: Decoding

    async def read(self) -> AsyncGenerator[Changes]:
        """Yield the changes in order."""
        schema = self._schema()
        for artifact in self.plan.diffs:
            diff = self.decoding.choose(self.plan.manifest, artifact)
            previous: pa.RecordBatch | None = None
            async with aclosing(self._batches(diff, schema)) as batches:
                async for batch in batches:
                    if previous is not None:
                        yield _changes(diff, previous, last=False)
                    previous = batch
            yield _changes(diff, _empty(schema) if previous is None else previous, last=True)

    def _schema(self) -> TableSchema | None:
        if not self.plan.diffs:
            return None
        return self.decoding.schema_of(self.plan.manifest, self.plan.diffs[-1])

    async def _batches(
        self, diff: ChosenFiles, schema: TableSchema | None
    ) -> AsyncGenerator[pa.RecordBatch]:
        keys = self.decoding.keys(self.plan.manifest)
        # Any part may hold the TRUNCATE, which must precede all other changes.
        several = len(diff.parts) > 1
        if several and schema and await truncates(diff, self.files, keys):
            yield _truncate(schema)
        async with aclosing(self.files.open_all(diff.parts)) as opened:
            async for part, source in opened:
                async for batch in in_thread(diff.changes(part, source, keys)):
                    fitting = fitted(batch, schema.changes) if schema else batch
                    yield _without_truncate(fitting) if several else fitting


def _changes(diff: ChosenFiles, batch: pa.RecordBatch, *, last: bool) -> Changes:
    artifact = diff.artifact
    return Changes(str(artifact.from_position), artifact.to_position, artifact.epoch, batch, last)


def _empty(schema: TableSchema | None) -> pa.RecordBatch:
    columns = schema.changes if schema else pa.schema([("action", pa.string())])
    return pa.RecordBatch.from_pylist([], schema=columns)


def _truncate(schema: TableSchema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"action": "TRUNCATE"}], schema=schema.changes)


def _without_truncate(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.filter(pc.not_equal(batch["action"], "TRUNCATE"))


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the table at `position`. Drop all earlier rows before the `first` batch.

    `reason` says why they are sent: `start`, `gap`, `pruned`, or `replaced` by another archive.
    The table is complete after the `last` batch. An empty table is one empty batch.
    """

    position: str
    epoch: int
    batch: pa.RecordBatch
    first: bool
    last: bool
    reason: str


Followed = Rows | Changes


class ArchiveFollower:
    """Follows an archive for one consumer."""

    def __init__(self, archive: Archive, since: str | None) -> None:
        self._archive = archive
        self._archive_id = archive.manifest.archive_id
        #: The position of the consumer's table, or None if it has no table.
        self.position = since

    async def run(self, poll: timedelta, wake: Wake | None) -> AsyncGenerator[Followed]:
        """Yield updates for the consumer indefinitely. `wake` shortens the wait."""
        reason = "start"
        while True:
            if self._archive.manifest.archive_id != self._archive_id:
                self._archive_id = self._archive.manifest.archive_id
                self.position, reason = None, "replaced"
            try:
                async with aclosing(self._next(reason)) as news:
                    async for item in news:
                        yield item
                        if item.last:
                            self.position = _reached(item)
            except PartGoneError as error:
                await self._archive.plan_anew(error)
                continue
            except (ChainGapError, PositionPrunedError) as error:
                # No diffs continue from here, so the next round loads the rows.
                reason = "gap" if isinstance(error, ChainGapError) else "pruned"
                self.position = None
                continue
            await _wait(poll, wake)
            await self._archive.refresh()

    async def _next(self, reason: str) -> AsyncGenerator[Followed]:
        if self.position is not None:
            plan = self._archive.plan_changes(self.position)
            async with aclosing(self._archive.read_changes(plan)) as changes:
                async for item in changes:
                    yield item
            return
        async with aclosing(self._rows(reason)) as rows:
            async for batch in rows:
                yield batch

    async def _rows(self, reason: str) -> AsyncGenerator[Rows]:
        plan = self._archive.plan()
        previous: pa.RecordBatch | None = None
        first = True
        async with aclosing(self._archive.read(plan)) as pieces:
            async for piece in pieces:
                for batch in batches_of(piece, needed=previous is None):
                    if previous is not None and len(previous):
                        yield Rows(plan.position, plan.base.epoch, previous, first, False, reason)
                        first = False
                    previous = batch
        if previous is not None:
            yield Rows(plan.position, plan.base.epoch, previous, first, True, reason)


def _reached(item: Followed) -> str:
    return item.position if isinstance(item, Rows) else item.to_position


async def _wait(poll: timedelta, wake: Wake | None) -> None:
    """Wait until there may be a new commit, for at most `poll`."""
    if wake is None:
        await asyncio.sleep(poll.total_seconds())
        return
    try:
        async with asyncio.timeout(poll.total_seconds()) as limit:
            await wake()
    except TimeoutError:
        if not limit.expired():
            raise
