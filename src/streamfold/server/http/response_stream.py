"""A response that is being written: hands it to the door, and waits for its client."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Final

from streamfold.server.http.exchange import Buffer, Exchange
from streamfold.server.http.problems import ClientHangupError
from streamfold.server.http.response_limits import SAMPLE, ResponseBudget

if TYPE_CHECKING:
    from streamfold.server.http.connections import Connection
    from streamfold.server.http.request import Request

#: Bytes that a response may be ahead of its client, if memory is reserved for it.
AHEAD: Final = 512 << 10
#: The same of other responses, which are batches that many followers get, in the same memory: what is
#: larger is waited for.
SHARED_AHEAD: Final = 16 << 10
#: Bytes that are reserved for one of those while its client does not take it.
SHARED_ROOM: Final = 128 << 10


class ResponseStream:
    """A response that is being written; without `close` the client sees it break off."""

    __slots__ = (
        "_exchange",
        "_request",
        "_taken_before",
        "_unread",
        "cut_off",
        "delivered",
        "moved",
        "since",
    )

    def __init__(
        self, request: Request, exchange: Exchange, response_budget: ResponseBudget
    ) -> None:
        self._request = request
        self._exchange = exchange
        self._unread = response_budget
        #: Bytes that the client had taken when that was last asked for, at the latest when the current
        #: wait began.
        self._taken_before = 0
        # As `PendingResponse` has them.
        self.cut_off = False
        self.since = self.moved = 0.0
        self.delivered = 0

    @property
    def hidden_prefix(self) -> str:
        """The prefix of stream names that the client must not see."""
        return self._request.hidden_prefix

    @property
    def task(self) -> asyncio.Task[None]:
        return self._request.task

    @property
    def connection(self) -> Connection:
        return self._request.connection

    @property
    def reserved(self) -> int:
        return self._request.reserved

    def sharing(self, key: Hashable, size: int) -> AbstractAsyncContextManager[None]:
        """Hold memory for an encoding of about `size` bytes, once for all that send it now."""
        return self._unread.sharing(key, size)

    async def send(self, *parts: Buffer) -> None:
        """Hand over `parts`; returns when the client has taken all that it got, but a little.

        Where memory is reserved for the response, that little is counted until `settle` or `close`.
        Otherwise it is counted here, if it is much.

        Does not raise if the client has hung up. ClientHangupError if it takes nothing for too long.
        """
        size = sum(map(len, parts))
        if self._request.reserved:
            self._hand_over(parts, size)
            await self._wait_for_client(AHEAD)
        elif size > SHARED_AHEAD or self._unread.is_sample(size):
            await self._send_watched(parts, size)
        else:
            self._hand_over(parts, size)
            # Asked only when it matters: the door has to look up what the client has taken.
            if self._request.sent - self._taken_before > SHARED_AHEAD:
                await self._wait_for_client(SHARED_AHEAD)

    async def _send_watched(self, parts: tuple[Buffer, ...], size: int) -> None:
        """Hand over `parts`, and count them until the client has taken all."""
        response_budget = self._unread
        if size > SHARED_AHEAD:
            room = min(size, SHARED_ROOM)
            reservation = await response_budget.reserve(self.connection, room, first=True)
        else:
            reservation = response_budget.room.reserve_at_once(self.connection, SAMPLE)
        try:
            self._hand_over(parts, size)
            await self._wait_for_client(0)
        finally:
            reservation.release()

    async def settle(self) -> None:
        """Wait until the client has taken everything, and give back the memory for the response."""
        if self._request.reserved:
            await self._wait_for_client(0)
            self._request.release_answer()

    async def close(self) -> None:
        """End the response properly, and settle it."""
        self._exchange.end()
        await self.settle()

    def _hand_over(self, parts: tuple[Buffer, ...], size: int) -> None:
        self._request.sent += size
        if size <= SHARED_AHEAD:
            self._exchange.send(b"".join(parts))
            return
        for part in parts:
            self._exchange.send(part)

    async def _wait_for_client(self, at_most: int) -> None:
        """Return when the client has not taken this many bytes at most."""
        response_budget, request = self._unread, self._request
        self._taken_before = self._exchange.delivered
        if request.sent - self._taken_before <= at_most:
            return
        self.since = self.moved = _now()
        self.delivered = 0
        response_budget.begin(self)
        try:
            await self._exchange.unread(at_most)
        except asyncio.CancelledError:
            if self.cut_off:
                request.task.uncancel()
                raise ClientHangupError(
                    f"the client read nothing of its answer for {_now() - self.moved:.0f} seconds"
                ) from None
            raise
        finally:
            response_budget.end(self)

    def disconnect(self) -> None:
        self._request.connection.cut()

    def look(self, now: float) -> None:
        delivered = self._exchange.delivered - self._taken_before
        if delivered != self.delivered:
            self.delivered = delivered
            self.moved = now


def _now() -> float:
    return asyncio.get_running_loop().time()
