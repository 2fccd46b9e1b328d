"""Streams of a store in the same process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Protocol, TypeVar

from streamfold.errors import PositionUnwrittenError
from streamfold.follow.clients.client import Appended, StreamRecord
from streamfold.model.positions import StreamPosition
from streamfold.model.records import Record, SequencedRecord

R = TypeVar("R", contravariant=True)
Q = TypeVar("Q")


class Batch(Protocol):
    """What a read of the store returns; one without records is a heartbeat."""

    def records(self) -> list[SequencedRecord]: ...


class Session(Protocol):
    async def next(self) -> Batch | None: ...


class Ack(Protocol):
    @property
    def start(self) -> StreamPosition: ...

    @property
    def end(self) -> StreamPosition: ...


class EmbeddedStore(Protocol[R]):
    """The part of `streamfold.store.StreamStore` in use, so that this package need not import it."""

    async def append(
        self,
        basin: str,
        stream: str,
        records: Any,
        *,
        match_seq_num: int | None = None,
        fencing_token: str | None = None,
    ) -> Ack: ...

    async def check_tail(self, basin: str, stream: str) -> StreamPosition: ...

    async def read(self, basin: str, stream: str, request: R) -> Batch: ...

    def follow(
        self, basin: str, stream: str, request: R
    ) -> AbstractAsyncContextManager[Session]: ...


class EmbeddedClient(Generic[Q]):
    """A `StreamClient` on a store that this process has open.

        EmbeddedClient(store, "basin", "stream", lambda at: ReadRequest(from_seq_num(at)))

    The last argument makes the store's request for reading from a seq_num.
    """

    def __init__(
        self, store: EmbeddedStore[Q], basin: str, stream: str, request: Callable[[int], Q]
    ) -> None:
        self._store = store
        self._ref = (basin, stream)
        self._request = request

    def __repr__(self) -> str:
        return f"<EmbeddedClient {'/'.join(self._ref)}>"

    @property
    def name(self) -> str:
        return self._ref[1]

    async def check_tail(self) -> StreamPosition:
        return await self._store.check_tail(*self._ref)

    async def peek(self, seq_num: int, count: int) -> Sequence[StreamRecord]:
        try:
            batch = await self._store.read(*self._ref, self._request(seq_num))
        except PositionUnwrittenError:
            return []
        return batch.records()[:count]

    async def read(self, seq_num: int) -> AsyncGenerator[Sequence[StreamRecord]]:
        async with self._store.follow(*self._ref, self._request(seq_num)) as session:
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
        ack = await self._store.append(
            *self._ref, records, match_seq_num=match_seq_num, fencing_token=fencing_token
        )
        return Appended(ack.start.seq_num, ack.end.seq_num)
