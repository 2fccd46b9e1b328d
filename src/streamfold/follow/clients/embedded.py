"""Client for the streams of a store in the same process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Protocol, TypeVar

from streamfold.errors import PositionUnwrittenError
from streamfold.follow.clients.client import Appended, StreamRecord
from streamfold.model.positions import StreamPosition
from streamfold.model.records import Record, SequencedRecord

R = TypeVar("R", contravariant=True)
Q = TypeVar("Q")


class EmbeddedBatch(Protocol):
    """The result of a store read. An empty one is a heartbeat."""

    def records(self) -> list[SequencedRecord]: ...


class Session(Protocol):
    async def next(self) -> EmbeddedBatch | None: ...


class EmbeddedAck(Protocol):
    @property
    def start(self) -> StreamPosition: ...

    @property
    def end(self) -> StreamPosition: ...


class PendingAppend(Protocol):
    @property
    def ack(self) -> Awaitable[EmbeddedAck]: ...


class EmbeddedStream(Protocol[R]):
    """The part of `streamfold.store.StreamHandle` used here, which this package need not import."""

    @property
    def ref(self) -> tuple[str, str]: ...

    def append(
        self,
        records: Any,
        *,
        match_seq_num: int | None = None,
        fencing_token: str | None = None,
    ) -> PendingAppend: ...

    async def tail(self) -> StreamPosition: ...

    async def read(self, request: R) -> EmbeddedBatch: ...

    def follow(self, request: R) -> AbstractAsyncContextManager[Session]: ...


class EmbeddedClient(Generic[Q]):
    """A `StreamClient` for a stream of a store open in this process.

        EmbeddedClient(store.stream("basin", "stream"), lambda at: ReadRequest(from_seq_num(at)))

    The last argument returns the store's request to read from a seq_num.
    """

    def __init__(self, stream: EmbeddedStream[Q], request: Callable[[int], Q]) -> None:
        self._stream = stream
        self._request = request

    def __repr__(self) -> str:
        return f"<EmbeddedClient {'/'.join(self._stream.ref)}>"

    @property
    def name(self) -> str:
        return self._stream.ref[1]

    async def check_tail(self) -> StreamPosition:
        return await self._stream.tail()

    async def peek(self, seq_num: int, count: int) -> Sequence[StreamRecord]:
        try:
            batch = await self._stream.read(self._request(seq_num))
        except PositionUnwrittenError:
            return []
        return batch.records()[:count]

    async def read(self, seq_num: int) -> AsyncGenerator[Sequence[StreamRecord]]:
        async with self._stream.follow(self._request(seq_num)) as session:
            while (batch := await session.next()) is not None:
                records = batch.records()
                if records:
                    yield records

    async def append(
        self,
        records: Sequence[Record],
        *,
        match_seq_num: int | None = None,
        fencing_token: str | None = None,
    ) -> Appended:
        ack = await self._stream.append(
            records, match_seq_num=match_seq_num, fencing_token=fencing_token
        ).ack
        return Appended(ack.start.seq_num, ack.end.seq_num)
