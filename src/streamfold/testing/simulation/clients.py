"""Clients of one server: each makes the calls of its plan, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from streamfold.errors import NotFoundError, StreamfoldError
from streamfold.store import StreamStore
from streamfold.testing.simulation.books import Books
from streamfold.testing.simulation.ledger import StreamLedger, ViolationError
from streamfold.testing.simulation.loop import chance, roll_with
from streamfold.testing.simulation.plan import Operation
from streamfold.testing.simulation.store_calls import StoreCalls


class FaceCalls(Protocol):
    """What one client does through the faces."""

    by_kind: dict[str, Callable[[int], Awaitable[None]]]

    async def create_stream(self, number: int) -> None: ...

    async def check(self, ledger: StreamLedger) -> None: ...


class FaceOpener(Protocol):
    """The faces of a running server."""

    def calls(self, client: int) -> FaceCalls: ...


class Clients:
    """All clients of one life of a server."""

    def __init__(self, books: Books, store: StreamStore, faces: FaceOpener | None) -> None:
        self._books = books
        self._store = store
        self._faces = faces

    async def create_stream(self, number: int) -> None:
        """Create one of the first streams."""
        if self._faces is not None and chance().random() < 0.5:
            await self._faces.calls(0).create_stream(number)
        else:
            await StoreCalls(self._books, self._store, 0).new_stream()

    async def run(self, client: int, operations: Sequence[Operation]) -> None:
        """Make the calls of one client."""
        calls = dict(StoreCalls(self._books, self._store, client).by_kind)
        if self._faces is not None:
            calls |= self._faces.calls(client).by_kind
        for operation in operations:
            roll_with(operation.seed)
            await asyncio.sleep(operation.pause)
            if self._books.closing:
                return
            self._books.report.calls += 1
            await calls[operation.kind](operation.number)

    async def check_all(self) -> None:
        """Read every stream to its end, and compare it with what clients were told."""
        store_calls = StoreCalls(self._books, self._store, 0)
        books = self._books
        for ledger in books.streams.values():
            ledger.lazy = ledger.lazy and not ledger.tail
        for ledger in [ledger for ledger in books.streams.values() if books.exists(ledger)]:
            if not books.exists(ledger):
                continue
            try:
                await store_calls.check(ledger)
            except StreamfoldError as error:  # storage is calm now
                if isinstance(error, NotFoundError) and not books.exists(ledger):
                    continue  # its ttl has passed meanwhile
                raise ViolationError(f"{ledger.name}: cannot be read: {error}") from error
            if self._faces is not None:
                await self._faces.calls(0).check(ledger)
