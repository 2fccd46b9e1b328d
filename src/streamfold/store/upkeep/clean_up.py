"""Deletes trimmed records and the remains of deleted streams, as listed in clean-up rows.

A clean-up row stays until its work is done, so a stop or crash at any point loses no work.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Final

from streamfold.errors import (
    BlobOutcomeUnknownError,
    BlobUnavailableError,
    DataCorruptError,
    StreamNotFoundError,
)
from streamfold.model.names import BasinName, StreamName, StreamRef
from streamfold.store import keys, rows
from streamfold.store.catalog.catalog import Catalog
from streamfold.store.catalog.snapshots import StreamSnapshots
from streamfold.store.damage import StreamDamagedError
from streamfold.store.engine.engine import Op, TableDamagedError, first_row, readable_pages
from streamfold.store.log.chunk_files import has_files
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.mount import Mount
from streamfold.store.rows import CleanupRow, ForkRow, StateRow
from streamfold.store.usage.recorder import UsageKeeper

logger = logging.getLogger(__name__)

#: Storage failures of files beside the database.
FILES_FAILED: Final = (BlobUnavailableError, BlobOutcomeUnknownError)


class CleanUp:
    """The deletions in one mount."""

    def __init__(
        self,
        mount: Mount,
        catalog: Catalog,
        usage: UsageKeeper,
        snapshots: StreamSnapshots,
        *,
        request_pass: Callable[[], None],
        check_at: Callable[[StreamRef, int], None],
        on_deleted: Callable[[StreamLog], None],
    ) -> None:
        """`request_pass` starts another pass, and `check_at` schedules a visit to a stream.

        `on_deleted` receives the log of a stream after its trimmed records were deleted.
        """
        self._mount = mount
        self._catalog = catalog
        self._usage = usage
        self._snapshots = snapshots
        self._request_pass = request_pass
        self._check_at = check_at
        self._on_deleted = on_deleted

    async def run(self) -> None:
        """Delete trimmed chunks and purge deleted streams, as listed in the clean-up rows."""
        span = keys.CLEANUPS_START, keys.CLEANUPS_END
        async with aclosing(readable_pages(self._mount.engine, *span, first=100)) as pages:
            async for page in pages:
                for key, value in page:
                    row = rows.decode(value, CleanupRow)
                    ref = stored_ref(row.basin, row.stream)
                    with skipping(ref):
                        if row.purge:
                            await self._purge(ref, keys.cleanup_stream_id(key), row.ancestors)
                        else:
                            await self._delete_trimmed(ref)

    async def _purge(self, ref: StreamRef, stream_id: int, ancestors: Sequence[int]) -> None:
        """Remove the rest of a deleted stream, its name last.

        Does nothing while forks need the stream.
        """
        if await first_row(self._mount.engine, *keys.forks_span(stream_id)) is not None:
            return
        # Reads show commits that the disk may not have yet. Without this commit, a power cut could
        # bring the stream, or a fork of it, back without its files.
        await self._mount.committer.write([])
        if not await self._delete_chunks(ref.basin, stream_id, keys.chunks_end(stream_id)):
            return
        await self._snapshots.forget(stream_id)
        await self._catalog.finish(self._remove(ref, stream_id, ancestors))
        self._request_pass()  # its basin or its ancestors may be removable now

    async def _remove(self, ref: StreamRef, stream_id: int, ancestors: Sequence[int]) -> None:
        """Remove the last rows of a stream, and free its name if the stream still has it."""
        async with self._catalog.locks.hold(*ref):
            row = await self._mount.stream(ref)
            ops: list[Op] = [
                (keys.state(stream_id), None),
                (keys.cleanup(stream_id), None),
                *[(keys.fork(ancestor, stream_id), None) for ancestor in ancestors],
                *await self._producers_of(stream_id),
                *await self._usage.forget_stream(stream_id),
            ]
            if row is not None and row.id == stream_id:
                await self._mount.put_stream(ref, None, *ops)
            else:  # another stream has the name by now
                await self._mount.committer.write(ops)

    async def _producers_of(self, stream_id: int) -> list[Op]:
        ops: list[Op] = []
        span = keys.producers_span(stream_id)
        async with aclosing(self._mount.engine.scan(*span, first=100)) as pages:
            async for page in pages:
                ops += [(key, None) for key, _ in page]
        return ops

    async def _needed_from(self, stream_id: int, trim_point: int) -> int | None:
        """Return the first record below `trim_point` that a fork still needs, or else `trim_point`.

        Returns None while that is unknown, because a fork of a fork may be in progress. That fork
        inherits what its source had when it was created, so the source's state, which may be
        trimmed meanwhile, does not tell what the fork needs. A fork created after its source's
        state was read needs no more than that state contains.
        """
        forks: dict[int, ForkRow] = {}
        while True:
            needed = trim_point
            for fork_id, row in forks.items():
                needed = min(needed, await self._trimmed_to(fork_id, row))
            if self._mount.is_forking(stream_id):
                return None
            former, forks = forks, await self._forks_of(stream_id)
            if forks.keys() <= former.keys():
                return needed

    async def _forks_of(self, stream_id: int) -> dict[int, ForkRow]:
        forks: dict[int, ForkRow] = {}
        async with aclosing(
            self._mount.engine.scan(*keys.forks_span(stream_id), first=100)
        ) as pages:
            async for page in pages:
                for key, value in page:
                    forks[keys.fork_id(key)] = rows.decode(value, ForkRow)
        return forks

    async def _trimmed_to(self, fork_id: int, fork: ForkRow) -> int:
        """Return how far the fork is trimmed, for storage and for its readers."""
        value = await self._mount.engine.get(keys.state(fork_id))
        state = rows.decode(value, StateRow) if value else StateRow()
        trims = self._mount.trims_in_memory(stored_ref(fork.basin, fork.stream), fork_id)
        # Readers of the fork still get the records of its latest trims for a while.
        return state.trim_point if trims is None else min(state.trim_point, trims.effective)

    async def _delete_trimmed(self, ref: StreamRef) -> None:
        """Delete the chunks entirely below the trim point, after storing the tail."""
        async with exclusive(self._mount, self._catalog, ref) as log:
            if log.deleting:
                return  # a purge has replaced this row
            trims = log.trims
            effective, due_at = trims.effective, trims.due_at
            if due_at is not None:  # readers still get the records of later trims
                self._check_at(ref, due_at)
                if effective <= trims.collected:
                    return
            needed = await self._needed_from(log.id, effective)
            if needed is None:
                return  # the clean-up row stays, so the next pass retries
            log.store_tail()
            await self._mount.committer.write_with(log)
            if not await self._delete_chunks(ref.basin, log.id, keys.chunk(log.id, needed)):
                return
            await self._snapshots.prune(log)
            trims.collected = effective
            if needed == trims.accepted:
                log.clean_up_done()
                await self._mount.committer.write_with(log)
            self._on_deleted(log)

    async def _delete_chunks(self, basin: str, stream_id: int, end: bytes) -> bool:
        """Delete the chunks below `end`, which no durable state needs.

        Returns False if a freeze keeps some of their files. Then the clean-up row stays and a later
        pass retries.
        """
        await self._usage.held_bytes.settle(basin, stream_id)
        span = keys.chunks_start(stream_id), end
        asked = False
        async with aclosing(self._mount.engine.scan(*span)) as pages:
            async for page in pages:
                if not asked and has_files(page):
                    asked = True
                    if await self._mount.engine.frozen():
                        return False
                # Files first: after a crash in between, a later pass finds the rows again.
                await self._mount.files.delete(page)
                await self._usage.held_bytes.delete(basin, stream_id, page)
        return True


@asynccontextmanager
async def exclusive(mount: Mount, catalog: Catalog, ref: StreamRef) -> AsyncIterator[StreamLog]:
    """Yield the stream's log while excluding all other changes to the stream."""
    async with catalog.locks.hold(*ref):
        with await mount.lease(ref) as log:
            yield log


@contextmanager
def skipping(ref: StreamRef) -> Iterator[None]:
    """Skip a stream that was deleted meanwhile or cannot be read, and continue with the next.

    Also skips a stream whose files cannot be deleted. Its clean-up row stays, so the next pass
    retries.
    """
    try:
        yield
    except StreamNotFoundError:
        logger.debug("stream %r in basin %r was deleted meanwhile", ref.stream, ref.basin)
    except (StreamDamagedError, TableDamagedError) as error:  # logged when first found
        logger.debug("upkeep skips stream %r in basin %r: %s", ref.stream, ref.basin, error)
    except (DataCorruptError, *FILES_FAILED) as error:
        logger.error("upkeep skips stream %r in basin %r: %s", ref.stream, ref.basin, error)


def stored_ref(basin: str, stream: str) -> StreamRef:
    """Return a ref whose names come from storage and therefore need no validation."""
    return StreamRef(BasinName(basin), StreamName(stream))
