"""A fold that notices everything: order, loss, repetition. And streams to try it on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from streamfold.follow import Appended, Backoff, MemoryStream, Snapshots, StreamClient, follow
from streamfold.follow.clients.client import StreamRecord
from streamfold.follow.encoding.stream_writer import Sizes
from streamfold.follow.snapshots.taker import RetentionRules, SnapshotTaker
from streamfold.model.records import BATCH_RECORDS_MAX, Record

State = dict[str, Any]

#: Small, so that states of a few deltas are framed.
SMALL = Sizes(record=64, frame=40)


def fold(state: State, record: StreamRecord) -> State:
    """Keep every body, in order."""
    state["seen"].append(record.body.decode())
    return state


def initial() -> State:
    return {"seen": []}


#: Gives up in the end, so that a test that would never end fails.
EAGER = Backoff(first=1e-6, longest=1e-6, attempts=20)


class KilledError(Exception):
    """The process is gone: nothing after this happens."""


class Watched:
    """A stream that runs a hook before and after every append that goes through it."""

    def __init__(self, inner: StreamClient) -> None:
        self.inner = inner
        self.appends = 0
        self.before: Callable[[int], Awaitable[None]] | None = None
        self.after: Callable[[int], Awaitable[None]] | None = None

    @property
    def name(self) -> str:
        return self.inner.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def check_tail(self) -> Any:
        return await self.inner.check_tail()

    async def peek(self, seq_num: int, count: int) -> Sequence[StreamRecord]:
        return await self.inner.peek(seq_num, count)

    def read(self, seq_num: int) -> Any:
        return self.inner.read(seq_num)

    async def append(
        self,
        records: Sequence[Record],
        *,
        match_seq_num: int | None = None,
        fencing_token: str | None = None,
    ) -> Appended:
        number, self.appends = self.appends, self.appends + 1
        if self.before:
            await self.before(number)
        done = await self.inner.append(
            records, match_seq_num=match_seq_num, fencing_token=fencing_token
        )
        if self.after:
            await self.after(number)
        return done


class Ledger:
    """A stream of numbered deltas, and what folding all of them from the start must give."""

    def __init__(self, stream: StreamClient | None = None) -> None:
        self.stream = stream or MemoryStream()
        self.expected: list[str] = []

    async def add(self, count: int = 1, stream: StreamClient | None = None) -> None:
        bodies = [str(len(self.expected) + number) for number in range(count)]
        for at in range(0, count, BATCH_RECORDS_MAX):
            batch = [Record(body.encode()) for body in bodies[at : at + BATCH_RECORDS_MAX]]
            await (stream or self.stream).append(batch)
        self.expected += bodies

    async def restored(
        self, snapshots: Snapshots[State] | None = None, stream: StreamClient | None = None
    ) -> list[str]:
        """What a new reader has when it has restored."""
        async with self.follow(snapshots, stream) as state:
            found: list[str] = state.value["seen"]
            return found

    def follow(
        self,
        snapshots: Snapshots[State] | None = None,
        stream: StreamClient | None = None,
        **others: Any,
    ) -> Any:
        return follow(
            stream or self.stream,
            fold=fold,
            initial=initial,
            snapshots=snapshots,
            backoff=EAGER,
            progress=lambda _: None,
            **others,
        )

    def taker(
        self,
        snapshots: Snapshots[State],
        stream: StreamClient | None = None,
        keeping: RetentionRules | None = None,
        sizes: Sizes | None = None,
        **others: Any,
    ) -> SnapshotTaker[State]:
        return SnapshotTaker(
            stream or self.stream,
            fold=fold,
            initial=initial,
            snapshots=snapshots,
            keeping=keeping,
            sizes=sizes,
            backoff=EAGER,
            progress=lambda _: None,
            **others,
        )
