"""Follower: restores the state, then keeps it current, change by change."""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec

from streamfold.backoff import Backoff
from streamfold.errors import InvalidError
from streamfold.follow.clients.client import StreamClient, StreamRecord
from streamfold.follow.clients.feed import SILENCE, Feed, is_empty_from, retrying
from streamfold.follow.encoding.assembly import PartialSnapshot
from streamfold.follow.restore.plan import RestorePlan
from streamfold.follow.restore.progress import ProgressCallback, TerminalBar
from streamfold.follow.restore.replay import BUFFER_BYTES, FoldSpec, Replay
from streamfold.follow.restore.restorer import Restorer
from streamfold.follow.snapshots.placement import in_stream
from streamfold.follow.snapshots.snapshot_store import Snapshots
from streamfold.notebook import html_table

S = TypeVar("S")

#: Consecutive failures after which the first restore gives up, unless its backoff sets a limit. A
#: server that has never answered is more likely a mistake than an outage. Once following, the
#: follower keeps retrying.
_FIRST_ATTEMPTS = 6


class Change(msgspec.Struct, frozen=True, gc=False):
    """A delta already applied to the state or, if `restored` is set, a replacement of the state.

    The state is replaced if records were trimmed before they could be read. It then comes from a
    snapshot, and the changes in between are not reported one by one.
    """

    seq_num: int
    timestamp: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    restored: bool = False


class Follower(Generic[S]):
    """State that follows its stream. Not for concurrent use by several tasks."""

    def __init__(
        self,
        client: StreamClient,
        folding: FoldSpec[S],
        snapshots: Snapshots[S],
        *,
        backoff: Backoff | None = None,
        progress: ProgressCallback | None = None,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self._client = client
        self._backoff = backoff or Backoff()
        self._replay = Replay(folding, snapshots.codec, client.name, buffer_bytes=buffer_bytes)
        self._restorer = Restorer(client, snapshots, self._replay, progress or TerminalBar())
        self._ready: deque[StreamRecord] = deque()
        #: Whether records were trimmed before they were read, so that the state must be restored
        #: again.
        self._overtaken = False
        #: Whether the state was restored since the last change.
        self._jumped = False
        self._feed: Feed | None = None
        self._plan: RestorePlan | None = None

    def __repr__(self) -> str:
        if self._plan is None:
            return "<Follower, not entered>"
        return f"<Follower of {self._plan.stream} at {self.cursor}>"

    def _repr_html_(self) -> str:
        if self._plan is None:
            return html_table("Follower, not entered", (), ())
        return html_table(
            f"Follower of {self._plan.stream} at {self.cursor}",
            ("step", ""),
            [*self._plan.steps(), ("state", reprlib.repr(self.value))],
        )

    @property
    def value(self) -> S:
        """The state, with every record before `cursor` applied."""
        return self._replay.value

    @property
    def cursor(self) -> int:
        """First seq_num not yet applied to the state."""
        return self._ready[0].seq_num if self._ready else self._replay.position

    @property
    def plan(self) -> RestorePlan:
        """How the state was last restored."""
        if self._plan is None:
            raise InvalidError("the state is not restored yet: enter it with `async with` first")
        return self._plan

    @property
    def replay(self) -> Replay[S]:
        """The state and the known facts about its snapshots, for snapshot takers."""
        return self._replay

    @property
    def speed(self) -> float | None:
        """Records per second in the last long replay."""
        return self._restorer.speed

    async def __aenter__(self) -> Self:
        limit = self._backoff.attempts or _FIRST_ATTEMPTS
        self._plan, self._feed = await self._restorer.restore(
            replace(self._backoff, attempts=limit)
        )
        self._feed.backoff = self._backoff
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            await feed.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        while True:
            if self._jumped:
                self._jumped = False
                return Change(self.cursor, 0, (), b"", restored=True)
            if self._ready:
                record = self._apply_first()
                return Change(record.seq_num, record.timestamp, record.headers, record.body)
            await self._fill()

    async def advance(self, max_wait: float | None = None) -> bool:
        """Apply the next records all at once. Returns False if none come within `max_wait` seconds."""
        if not self._ready and not await self._fill(max_wait):
            return False
        if self._replay.folds_batches:
            self._replay.apply(list(self._ready))
            self._ready.clear()
        while self._ready:
            self._apply_first()
        return True

    async def catch_up(self) -> None:
        """Apply everything now in the stream. Iteration does not yield those changes."""
        tail = (await retrying(self._backoff, self._client.check_tail)).seq_num
        while self.cursor < tail or self._ready or self._overtaken:
            if not await self.advance(SILENCE):
                position = self._replay.position
                self._overtaken = await is_empty_from(self._client, position, self._backoff)

    async def advance_to(self, snapshot: str, at_most: int) -> PartialSnapshot | None:
        """Apply every record before the first one of `snapshot`, and none after it.

        The snapshot's first record is at `at_most` or earlier. Returns None if it can no longer be
        reached because the stream was trimmed and the state restored from another snapshot.
        """
        plan, parts = self._plan, None
        while parts is None:
            if self._replay.position > at_most:
                return None
            await self._fill()
            if self._plan is not plan:
                return None  # the state may already include records after the snapshot's first one
            parts = self._replay.frames.open.get(snapshot)
        while self._ready and self._ready[0].seq_num < parts.began_at:
            self._apply_first()
        return parts

    async def pause(self) -> None:
        """Close the read session until the next change is requested. No record is lost.

        For callers that append a lot while following: unread records fill the connection, and the
        same client's acknowledgements queue up behind them.
        """
        if self._feed is not None:
            await self._feed.seek(self._replay.position)

    def _apply_first(self) -> StreamRecord:
        """Fold the first queued delta. If the fold fails, it stays queued: no snapshot may skip it."""
        record = self._ready[0]
        self._replay.apply_one(record)
        self._ready.popleft()
        return record

    async def _fill(self, max_wait: float | None = None) -> bool:
        if self._feed is None:
            raise InvalidError("the state is no longer followed: its `async with` block is over")
        if not self._overtaken:
            batch = await self._feed.next(max_wait)
            if batch is None:
                return False
            if not self._replay.is_gap(batch):
                self._ready.extend(self._replay.sift(batch))
                return True
        # Set until the restore has succeeded: if it fails or is cancelled, the state is unusable.
        self._overtaken = True
        self._ready.clear()  # the restored state includes them
        await self._feed.close()
        self._plan, self._feed = await self._restorer.restore(self._backoff)
        self._overtaken, self._jumped = False, True
        return True


def follow(
    stream: StreamClient | Any,
    *,
    fold: Callable[[S, StreamRecord], S],
    initial: Callable[[], S],
    snapshots: Snapshots[S] | None = None,
    fold_batch: Callable[[S, Sequence[StreamRecord]], S] | None = None,
    fold_name: str | None = None,
    progress: ProgressCallback | None = None,
    backoff: Backoff | None = None,
) -> Follower[S]:
    """Restore state in bounded time, then follow its stream live.

        async with follow(stream, fold=apply, initial=dict, snapshots=external("s3://…")) as state:
            print(state.plan, state.value, state.cursor)
            async for change in state:
                ...

    Entering the context loads the newest snapshot and replays the records after it. Lost
    connections are reopened. Leaving it ends the read session.

    `stream` is a `StreamClient` or an S2 SDK stream. `fold` takes the state and a record and
    returns the new state; it may modify the state in place. Its exceptions get a note that names
    the stream and the seq_num. Returning None is an error unless `initial` also returns None. A
    snapshot made under another `fold_name` is rejected. `fold_batch` takes a state and a list of
    records, and replaces `fold` wherever several records are available. `progress` is called with a
    `Progress` while state is restored. `backoff` sets the pauses between attempts to reach the
    stream.
    """
    return Follower(
        as_client(stream),
        FoldSpec(fold, initial, fold_batch, fold_name),
        snapshots or in_stream(),
        progress=progress,
        backoff=backoff,
    )


def as_client(stream: StreamClient | Any) -> StreamClient:
    """Return `stream` if it is a client already, else a client for the S2 SDK stream."""
    if isinstance(stream, StreamClient):
        return stream
    from streamfold.follow.clients.s2 import S2Client

    return S2Client(stream)
