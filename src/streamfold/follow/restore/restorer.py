"""Restores state: plan, load, replay. Repeats these if the snapshot or the records are gone."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Generic, TypeVar

from streamfold.backoff import Backoff
from streamfold.errors import BlobNotFoundError, StreamfoldError
from streamfold.follow.clients.client import StreamClient
from streamfold.follow.clients.feed import SILENCE, Feed, is_empty_from, retrying
from streamfold.follow.encoding.codecs import check_fold
from streamfold.follow.encoding.container import UnpackedBlob
from streamfold.follow.errors import (
    HistoryTrimmedError,
    SnapshotCorruptError,
    SnapshotUnsupportedError,
)
from streamfold.follow.restore.plan import RestorePlan, SkippedSnapshot, make_plan
from streamfold.follow.restore.progress import Progress, ProgressCallback
from streamfold.follow.restore.replay import Replay
from streamfold.follow.snapshots.snapshot_store import (
    Placement,
    SnapshotInfo,
    Snapshots,
    SnapshotStore,
)

S = TypeVar("S")
logger = logging.getLogger(__name__)

#: Maximum rounds of a restore while the stream is trimmed underneath it. No reader can catch up
#: with a stream that is trimmed more often than this.
_ROUNDS = 20
#: Minimum number of replayed records for a meaningful speed.
_MEASURABLE = 1000


class Restorer(Generic[S]):
    """Restores a replay's state up to the tail."""

    def __init__(
        self,
        client: StreamClient,
        snapshots: Snapshots[S],
        replay: Replay[S],
        report: ProgressCallback,
    ) -> None:
        self._client = client
        self._snapshots = snapshots
        self._replay = replay
        self._backoff = Backoff()
        self._report = report
        self._skipped: list[SkippedSnapshot] = []
        #: Records per second in the last replay that was long enough to measure.
        self.speed: float | None = None

    async def restore(self, backoff: Backoff) -> tuple[RestorePlan, Feed]:
        """Restore up to the current tail. Returns the plan and a feed that continues from there."""
        self._backoff = backoff
        self._skipped.clear()
        first = 0
        for _ in range(_ROUNDS):
            plan = await make_plan(self._client, self._snapshots, self._backoff, self._skipped)
            first = plan.first
            if await self._prepare(plan):
                feed = await self._replay_records(plan)
                if feed is not None:
                    self._report(Progress("done", plan.records, plan.records))
                    return plan, feed
        raise HistoryTrimmedError(first, ["the stream is trimmed faster than it can be read"])

    async def _prepare(self, plan: RestorePlan) -> bool:
        """Start the replay as planned. Returns False if the snapshot proved unusable."""
        info, store = plan.snapshot, self._snapshots.store
        if plan.searching:
            self._replay.search_from(plan.read_from)
        elif info is None or store is None:
            self._replay.start_at(self._replay.fresh(), 0)
        else:
            return await self._load(store, info)
        return True

    async def _load(self, store: SnapshotStore, info: SnapshotInfo) -> bool:
        try:
            unpacked = await retrying(self._backoff, partial(self._fetch, store, info))
            if unpacked.description.cursor != info.cursor:
                raise SnapshotCorruptError(
                    info.name, f"it says that its cursor is {unpacked.description.cursor}"
                )
            check_fold(info.name, unpacked.description.fold, self._replay.fold_name)
            value = unpacked.decode(self._snapshots.codec)
        except (SnapshotCorruptError, SnapshotUnsupportedError, BlobNotFoundError) as error:
            self._skip(info.name, error)
            return False
        self._replay.start_at(value, info.cursor, unpacked.description.created_at)
        return True

    async def _fetch(self, store: SnapshotStore, info: SnapshotInfo) -> UnpackedBlob:
        return await store.unpack(
            info, lambda size: self._report(Progress("load", size, info.size))
        )

    async def _replay_records(self, plan: RestorePlan) -> Feed | None:
        """Replay to the tail and return the feed there, or None if the restore needs a new plan.

        It does if the stream was trimmed underneath, or the planned snapshot was not in it.
        """
        feed = Feed(self._client, self._replay.position, self._backoff)
        try:
            if await self._run(feed, plan):
                return feed
        except BaseException:
            await feed.close()
            raise
        await feed.close()
        return None

    async def _run(self, feed: Feed, plan: RestorePlan) -> bool:
        replay, began = self._replay, time.perf_counter()
        while not replay.has_state or replay.position < plan.tail:
            if replay.position >= plan.tail:
                self._give_up(plan)
                return False
            batch = await feed.next(SILENCE)
            if batch is None:
                if await is_empty_from(self._client, replay.position, self._backoff):
                    return False
                continue
            if replay.has_state and replay.is_gap(batch):
                return False
            replay.absorb(batch)
            if replay.position != batch[-1].seq_num + 1:
                await feed.seek(replay.position)
            self._report(Progress("replay", replay.position - plan.read_from, plan.records))
        if plan.records >= _MEASURABLE:
            self.speed = plan.records / max(1e-6, time.perf_counter() - began)
        return True

    def _give_up(self, plan: RestorePlan) -> None:
        """Skip the planned snapshot, which the search did not find. Raises if it searched for any."""
        for problem in self._replay.problems:
            self._skipped.append(SkippedSnapshot("in the stream", problem))
        info = plan.snapshot
        if info is not None and info.placement is not Placement.EXTERNAL:
            error = self._replay.problems[-1] if self._replay.problems else None
            self._skip(info.name, error or SnapshotCorruptError(info.name, "it has no end"))
            return
        if self._skipped:
            raise self._skipped[0].error
        raise HistoryTrimmedError(plan.first, ())

    def _skip(self, name: str, error: StreamfoldError) -> None:
        logger.warning("restore continues without a snapshot: %s", error)
        self._skipped.append(SkippedSnapshot(name, error))
