"""A table that is kept up to date: rows once, then changes as they are committed.

A follower goes from diff to diff, also across re-bases, whose closing diffs lead to the new base. Only
where no diffs continue (changes were lost, or epochs were pruned while it was away) does it get all
rows again, to replace what it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import pyarrow as pa

from streamfold.archive.errors import ChainGapError, PositionPrunedError
from streamfold.archive.read.change_feed import Changes
from streamfold.archive.read.part_files import PartGoneError
from streamfold.archive.read.rebuild import batches_of

if TYPE_CHECKING:
    from streamfold.archive.read.reader import Archive

#: Waits until there may be a new commit, for example with a subscription to the archive's events.
Wake = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the table at `position`: forget all others before the `first` batch of them.

    `reason` says why: `start`, `gap`, `pruned`, or `replaced` by another archive.
    The table is complete with the `last` batch. An empty table is one empty batch.
    """

    position: str
    epoch: int
    batch: pa.RecordBatch
    first: bool
    last: bool
    reason: str


Followed = Rows | Changes


class Follower:
    """What one consumer of an archive has seen, and what comes next for it."""

    def __init__(self, archive: Archive, since: str | None) -> None:
        self._archive = archive
        self._archive_id = archive.manifest.archive_id
        #: The table that the consumer has is the one at this position; None without a table.
        self.position = since

    async def run(self, poll: timedelta, wake: Wake | None) -> AsyncGenerator[Followed]:
        """Yield what brings the consumer up to date, without end; `wake` shortens the wait."""
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
        held: pa.RecordBatch | None = None
        first = True
        async with aclosing(self._archive.read(plan)) as pieces:
            async for piece in pieces:
                for batch in batches_of(piece, needed=held is None):
                    if held is not None and len(held):
                        yield Rows(plan.position, plan.base.epoch, held, first, False, reason)
                        first = False
                    held = batch
        if held is not None:
            yield Rows(plan.position, plan.base.epoch, held, first, True, reason)


def _reached(item: Followed) -> str:
    return item.position if isinstance(item, Rows) else item.to_position


async def _wait(poll: timedelta, wake: Wake | None) -> None:
    """Return when there may be a new commit, after `poll` at the latest."""
    if wake is None:
        await asyncio.sleep(poll.total_seconds())
        return
    try:
        async with asyncio.timeout(poll.total_seconds()) as limit:
            await wake()
    except TimeoutError:
        if not limit.expired():
            raise
