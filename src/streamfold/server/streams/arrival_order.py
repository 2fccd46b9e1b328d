"""Keeps appends in the order in which they arrived, although large ones are parsed in threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class ArrivalOrder:
    """An append waits for those that arrived before it on its connection, for the same stream."""

    def __init__(self) -> None:
        #: The last append that is still being parsed.
        self._last: dict[Hashable, asyncio.Future[None]] = {}

    async def reached(self, key: Hashable) -> None:
        """Wait until all earlier appends have their slots; for appends that parse at once."""
        if self._last and (last := self._last.get(key)) is not None:
            await asyncio.shield(last)

    @asynccontextmanager
    async def turn(self, key: Hashable) -> AsyncIterator[ArrivalTurn]:
        """Hold back appends that arrive from now on, until the turn or the context ends."""
        before = self._last.get(key)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last[key] = done
        turn = ArrivalTurn(self._last, key, done)
        try:
            if before is not None:
                await asyncio.shield(before)
            yield turn
        finally:
            turn.end()


class ArrivalTurn:
    """The right to be submitted before everything that arrived later."""

    def __init__(
        self,
        last: dict[Hashable, asyncio.Future[None]],
        key: Hashable,
        done: asyncio.Future[None],
    ) -> None:
        self._last = last
        self._key = key
        self._done = done

    def end(self) -> None:
        """Let the next append run, as soon as this task awaits something."""
        if not self._done.done():
            self._done.set_result(None)
        if self._last.get(self._key) is self._done:
            del self._last[self._key]
