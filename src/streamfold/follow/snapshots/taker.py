"""Snapshot takers: take one snapshot, or keep taking them. Any number may run on one stream."""

from __future__ import annotations

import enum
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from streamfold.backoff import Backoff
from streamfold.errors import (
    BlobOutcomeUnknownError,
    InvalidError,
    OutcomeUnknownError,
    RetryLaterError,
)
from streamfold.follow.clients.client import StreamClient, StreamRecord
from streamfold.follow.clients.feed import retrying
from streamfold.follow.encoding.container import Description
from streamfold.follow.encoding.record_forms import HERE
from streamfold.follow.encoding.stream_writer import Attempt, Piece, Sizes, StreamWriter
from streamfold.follow.follower import Follower, as_client
from streamfold.follow.restore.progress import ProgressCallback
from streamfold.follow.restore.replay import FoldSpec, KnownSnapshot
from streamfold.follow.snapshots.policy import Policy, SinceSnapshot, due, prune, wait_for
from streamfold.follow.snapshots.snapshot_store import Placement, Snapshots, SnapshotStore, Writing

S = TypeVar("S")
logger = logging.getLogger(__name__)

#: Attempts to place a snapshot at the tail. After that, because others append to the stream all the
#: time, the snapshot goes wherever it lands.
_CLAIMS = 8
#: Attempts to write a snapshot anywhere while others keep trimming the stream underneath it.
_ATTEMPTS = 3
#: Seconds without a new frame before another taker's framed snapshot counts as abandoned.
_ABANDONED = 30.0
#: Seconds to wait for another snapshot taker before checking again.
_OTHERS_PAUSE = 1.0


class Outcome(enum.StrEnum):
    """How an attempt to take a snapshot ended."""

    TAKEN = "taken"
    #: A snapshot, this taker's or another's, already covers everything.
    NOTHING_NEW = "nothing-new"
    #: Another snapshot taker has just saved a snapshot at this cursor, or is writing one.
    ANOTHERS = "anothers"


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of taking a snapshot."""

    outcome: Outcome
    cursor: int
    placement: Placement | None = None

    @property
    def reason(self) -> str:
        """One sentence that says why a snapshot was or was not taken."""
        match self.outcome:
            case Outcome.TAKEN:
                return f"the state before {self.cursor} is saved"
            case Outcome.NOTHING_NEW:
                return f"a snapshot covers everything before {self.cursor} already"
            case Outcome.ANOTHERS:
                return (
                    f"another process has just taken a snapshot at {self.cursor}, or is taking one"
                )


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """How a snapshot taker trims, prunes and fences."""

    #: Trim the stream to each external snapshot's cursor. For snapshots in the stream, see `in_stream`.
    trim: bool = False
    #: External snapshots to keep, by number and by age in seconds. None keeps all.
    keep: int | None = None
    max_age: float | None = None
    #: Sent with every append.
    fencing_token: str | None = None
    #: Whether to set that token first. From then on, clients with another token are rejected.
    fence: bool = False

    def __post_init__(self) -> None:
        if self.fence and not self.fencing_token:
            raise InvalidError("to fence the stream a fencing_token is needed: choose one")
        if self.keep is not None and self.keep < 1:
            raise InvalidError(f"keep {self.keep} must be at least 1: the newest one always stays")


class SnapshotTaker(Generic[S]):
    """Follows a stream with its own state, and saves that state as snapshots.

        async with SnapshotTaker(stream, fold=apply, initial=dict, snapshots=in_stream()) as taker:
            await taker.run()     # or take(), once

    Several may run on one stream: one wins at each cursor, and the others notice and continue.

    `stream`, `fold`, `initial`, `fold_batch`, `fold_name`, `progress` and `backoff` are those of
    `follow`, and `snapshots` says where snapshots are stored. `policy` decides when `run` takes one,
    and `keeping` which old ones are deleted and whether the stream is trimmed. `sizes` limits the
    records of a snapshot in the stream. `on_taken` is called with each result of `run`.
    """

    def __init__(
        self,
        stream: StreamClient | Any,
        *,
        fold: Callable[[S, StreamRecord], S],
        initial: Callable[[], S],
        snapshots: Snapshots[S],
        fold_batch: Callable[[S, Sequence[StreamRecord]], S] | None = None,
        fold_name: str | None = None,
        policy: Policy | None = None,
        keeping: RetentionRules | None = None,
        backoff: Backoff | None = None,
        progress: ProgressCallback | None = None,
        sizes: Sizes | None = None,
        on_taken: Callable[[Taken], None] = lambda _: None,
        now: Callable[[], int] = lambda: int(time.time() * 1000),
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._client = as_client(stream)
        self._snapshots = snapshots
        self._policy = policy or Policy()
        self._keeping = keeping or RetentionRules()
        pruning = self._keeping.keep is not None or self._keeping.max_age is not None
        if pruning and snapshots.store is not None and not snapshots.store.prunable:
            raise InvalidError(
                "snapshots on a server cannot be deleted, it drops old ones itself: leave out keep "
                "and max_age"
            )
        self._backoff = backoff or Backoff()
        self._now = now
        self._new_id = new_id
        self._on_taken = on_taken
        self._began = now()
        self._follower = Follower(
            self._client,
            FoldSpec(fold, initial, fold_batch, fold_name),
            snapshots,
            backoff=self._backoff,
            progress=progress,
        )
        token = self._keeping.fencing_token
        self._writer = StreamWriter(
            self._client, self._backoff, token, sizes, snapshots.form, trims=snapshots.trim
        )
        #: Whether the state was too large for one record when last encoded.
        self._outgrown = False
        #: The newest known snapshot that this taker wrote or that another saved outside the stream.
        self._saved: KnownSnapshot | None = None
        self._last_id = ""

    @property
    def state(self) -> Follower[S]:
        """The followed state, which snapshots save."""
        return self._follower

    async def __aenter__(self) -> Self:
        if self._keeping.fence and self._keeping.fencing_token:
            await self._writer.fence(self._keeping.fencing_token)
        await self._follower.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._follower.__aexit__(kind, error, trace)

    async def run(self) -> None:
        """Take a snapshot whenever the policy says so, until cancelled or fenced off."""
        failures, look_again = 0, 0.0
        while True:
            rest = max(0.0, look_again - time.monotonic())
            reason = None if rest else await self._reason()
            wait = rest or wait_for(self._policy, self.since())
            if reason is not None:
                try:
                    snapshot = await self.take()
                except (RetryLaterError, OutcomeUnknownError) as error:
                    failures += 1
                    await self._backoff.wait(failures, RetryLaterError(error.message))
                    continue
                failures = 0
                logger.info("snapshot at %d: %s (%s)", snapshot.cursor, snapshot.outcome, reason)
                self._on_taken(snapshot)
                wait = None
                if snapshot.outcome is Outcome.ANOTHERS:
                    wait, look_again = _OTHERS_PAUSE, time.monotonic() + _OTHERS_PAUSE
            await self._follower.advance(wait)

    async def _reason(self) -> str | None:
        """Return why a snapshot is due, taking into account snapshots that others saved outside."""
        if due(self._policy, self.since()) is None:
            return None
        await self._look_outside()
        return due(self._policy, self.since())

    def since(self) -> SinceSnapshot:
        """Return the deltas since the newest known snapshot."""
        replay = self._follower.replay
        mark = replay.mark
        if self._saved is not None and self._saved.cursor > mark.cursor:
            mark = self._saved
        taken_at = self._began if mark.taken_at is None else mark.taken_at
        return SinceSnapshot(
            max(0, replay.records - mark.records),
            max(0, replay.bytes - mark.bytes),
            (self._now() - taken_at) / 1000,
            self._follower.speed,
        )

    async def take(self) -> Taken:
        """Save the state at the tail.

        A snapshot in the stream puts its first record at the tail, where the state ends. If others
        append there first, the taker catches up and tries again. On a stream that is never idle, the
        first record goes wherever it lands, and the state is advanced to that position. Both ways
        work at any append rate that this follower keeps up with.
        """
        for _ in range(_CLAIMS):
            await self._follower.catch_up()
            cursor = self._follower.cursor
            if self.since().records == 0:
                return Taken(Outcome.NOTHING_NEW, cursor)
            if self._snapshots.writing is not Writing.EXTERNAL and self._should_leave_to_another():
                return Taken(Outcome.ANOTHERS, cursor)
            snapshot = await self._write(cursor)
            if snapshot is not None:
                return snapshot
        for _ in range(_ATTEMPTS):
            snapshot = await self._write_anywhere()
            if snapshot is not None:
                return snapshot
        raise RetryLaterError(
            f"others trimmed the stream during each of {_ATTEMPTS} attempts to write a snapshot, the "
            f"last at {self._follower.cursor}: try again, or let only one snapshot taker trim the "
            "stream",
            code="snapshot_outrun",
        )

    async def _write(self, cursor: int) -> Taken | None:
        """Save the state in its placement. Returns None if the tail had moved past the cursor."""
        snapshots, store = self._snapshots, self._snapshots.store
        attempt = self._attempt(cursor)
        if snapshots.writing is Writing.EXTERNAL and store is not None:
            return await self._save_outside(store, attempt, self._encoded())
        if snapshots.writing is Writing.AUTO and store is not None:
            whole, rest = self._writer.split(self._encoded())
            if whole is None:
                return await self._save_outside(store, attempt, rest)
            return await self._write_record(attempt, whole)
        if not self._outgrown:
            whole, _ = self._writer.split(self._encoded())
            if whole is not None:
                return await self._write_record(attempt, whole)
            self._outgrown = True
        # Claim first: encoding takes time, during which others would move the tail.
        if not await self._writer.claim(attempt):
            return None
        return await self._write_frames(attempt)

    async def _write_record(self, attempt: Attempt, state: bytes) -> Taken | None:
        if not await self._writer.write_record(attempt, state):
            return None
        self._remember(attempt.cursor)
        return Taken(Outcome.TAKEN, attempt.cursor, Placement.RECORD)

    async def _write_anywhere(self) -> Taken | None:
        """Open a framed snapshot at any position and save the state up to it.

        Returns None if others trimmed the stream before the state reached that position.
        """
        attempt = self._attempt(HERE)
        at_most = await self._writer.open_anywhere(attempt)
        parts = await self._follower.advance_to(attempt.snapshot, at_most)
        if parts is None:
            await self._follower.catch_up()
            return None
        return await self._write_frames(replace(attempt, cursor=parts.began_at))

    async def _write_frames(self, attempt: Attempt) -> Taken:
        """Append the state up to the cursor as frames. The first frame is already stored."""
        whole, rest = self._writer.split(self._encoded())
        self._outgrown = whole is None
        await self._follower.pause()  # else the frames come back through it and delay the next ones
        await self._writer.write_frames(attempt, rest if whole is None else [whole])
        self._remember(attempt.cursor)
        return Taken(Outcome.TAKEN, attempt.cursor, Placement.FRAMED)

    def _attempt(self, cursor: int) -> Attempt:
        self._last_id = self._new_id()
        fold = self._follower.replay.fold_name
        return Attempt(self._last_id, cursor, self._snapshots.codec.name, fold)

    def _encoded(self) -> Iterable[Piece]:
        return self._snapshots.codec.encode(self._follower.value)

    async def _save_outside(
        self, store: SnapshotStore, attempt: Attempt, pieces: Iterable[Piece]
    ) -> Taken:
        described = Description.of(
            attempt.snapshot, attempt.cursor, attempt.codec, self._now(), attempt.fold
        )
        blob = store.naming.pack(pieces, described)
        saved = await self._put(store, attempt, blob)
        self._remember(attempt.cursor)
        if not saved:
            return Taken(Outcome.ANOTHERS, attempt.cursor, Placement.EXTERNAL)
        keeping = self._keeping
        if keeping.trim:
            await self._writer.trim(attempt.cursor)
        if keeping.keep is not None or keeping.max_age is not None:
            await prune(store, keep=keeping.keep, max_age=keeping.max_age, now=self._now())
        return Taken(Outcome.TAKEN, attempt.cursor, Placement.EXTERNAL)

    async def _put(self, store: SnapshotStore, attempt: Attempt, blob: bytes) -> bool:
        """Save the blob unless this cursor has one. After a lost response, checks if it was saved."""
        failures = 0
        while True:
            try:
                return await retrying(
                    self._backoff, partial(store.save, attempt.cursor, attempt.codec, blob)
                )
            except BlobOutcomeUnknownError as error:
                failures += 1
                infos = await retrying(self._backoff, store.list)
                if any(
                    (info.cursor, info.codec) == (attempt.cursor, attempt.codec) for info in infos
                ):
                    return True
                await self._backoff.wait(failures, RetryLaterError(error.message))

    async def _look_outside(self) -> None:
        """Record a newer snapshot saved outside by another process, estimating the deltas since."""
        store, replay = self._snapshots.store, self._follower.replay
        newest = await retrying(self._backoff, store.newest) if store else None
        saved = self._saved.cursor if self._saved else replay.mark.cursor
        if newest is None or newest.cursor <= saved or newest.cursor > replay.position:
            return
        since = min(replay.position - newest.cursor, replay.records)
        share = since / replay.records if replay.records else 0.0
        self._saved = KnownSnapshot(
            newest.cursor,
            replay.records - since,
            replay.bytes - round(replay.bytes * share),
            newest.created_at,
        )

    def _remember(self, cursor: int) -> None:
        replay = self._follower.replay
        self._saved = KnownSnapshot(cursor, replay.records, replay.bytes, self._now())

    def _should_leave_to_another(self) -> bool:
        """Return whether another snapshot taker is writing frames right now."""
        now = self._now()
        return any(
            parts.snapshot != self._last_id and 0 <= now - parts.timestamp < _ABANDONED * 1000
            for parts in self._follower.replay.frames.open.values()
        )
