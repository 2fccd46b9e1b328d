"""A response that is being written: hands it to granian as the client takes it.

granian does not report when a client has taken something (upstream defect 10), only when it takes the
next message itself. So the last bytes of what must be known to have arrived are sent as messages of one
byte. Events are not: some clients parse an event before all of it has arrived. So the end of a stream
of events, at most `MESSAGES_BELOW` small messages, is not counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    MutableMapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from streamfold.server.http.problems import ClientHangupError
from streamfold.server.http.response_limits import SAMPLE, ResponseBudget

if TYPE_CHECKING:
    from streamfold.server.http.request import Request

Message: TypeAlias = MutableMapping[str, Any]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Buffer: TypeAlias = bytes | memoryview

#: The type of the message that has status and headers, and of those that have a part of the body.
START: Final = "http.response.start"
BODY: Final = "http.response.body"
#: Bytes handed over at once, of an answer for which memory is reserved.
PIECE: Final = 64 << 10
#: Bytes handed over at once of other answers, which are batches that many followers get: smaller, since
#: each of them has several in granian's queue.
SHARED_PIECE: Final = 16 << 10
#: Messages of one response that are below us at most: four in granian's queue and one that waits to
#: enter it, and three in hyper and h2, which are read, buffered (`listener.SEND_BUFFER`) and written.
#: Over HTTP/1 the last three are `connections.BUFFER_MAX` and the message that exceeds it.
MESSAGES_BELOW: Final = 8
#: Messages that follow the last one of which it must be known that it was written: granian takes the
#: last of these only then.
SETTLING: Final = MESSAGES_BELOW - 1


class ResponseStream:
    """A response that is being written; without `close` the client sees it break off."""

    __slots__ = (
        "_events",
        "_kept_back",
        "_request",
        "_send",
        "_unread",
        "cut_off",
        "moved",
        "since",
        "taken",
    )

    def __init__(
        self, request: Request, send: Send, response_budget: ResponseBudget, *, events: bool
    ) -> None:
        self._request = request
        #: Whether the body is a stream of events, which are sent whole.
        self._events = events
        self._send = send
        self._unread = response_budget
        #: The last bytes of what was sent, until more is sent or it is settled.
        self._kept_back = b""
        # As `unread.Answer` has them.
        self.cut_off = False
        self.since = self.moved = 0.0
        self.taken = 0

    @property
    def hidden_prefix(self) -> str:
        """The prefix of stream names that the client must not see."""
        return self._request.hidden_prefix

    @property
    def task(self) -> asyncio.Task[None]:
        return self._request.task

    @property
    def request(self) -> Request:
        return self._request

    @property
    def connection(self) -> Hashable:
        return self._request.connection

    @property
    def held(self) -> int:
        return self._request.held

    def sharing(self, key: Hashable, size: int) -> AbstractAsyncContextManager[None]:
        """Hold memory for an encoding of about `size` bytes, once for all that send it now."""
        return self._unread.sharing(key, size)

    async def send(self, *parts: Buffer) -> None:
        """Hand over `parts`; returns when the client has taken all of it but a little.

        Where memory is reserved for the response, that little is counted until `settle` or `close`,
        and the last bytes are kept back until then. Otherwise it is counted here, if it is much.

        Does not raise if the client has hung up. ClientHangupError if it takes nothing for too long.
        """
        size = sum(map(len, parts))
        if self._request.held and self._events:
            await self._hand_over(_pieces(parts, SHARED_PIECE, 0))
        elif self._request.held:
            parts = (self._kept_back, *parts)
            self._kept_back = _end_of(parts)
            await self._hand_over(_pieces(parts, PIECE, SETTLING))
        elif size > SHARED_PIECE or self._unread.is_sample(size):
            await self._send_watched(parts, size)
        else:
            await self._hand_over((b"".join(parts),))

    async def _send_watched(self, parts: Sequence[Buffer], size: int) -> None:
        """Hand over `parts`, and count what is below us until the client has taken all of it."""
        response_budget = self._unread
        if size > SHARED_PIECE:
            below = min(size, MESSAGES_BELOW * SHARED_PIECE)
            reservation = await response_budget.reserve(self.connection, below, first=True)
        else:
            reservation = response_budget.room.reserve_at_once(self.connection, SAMPLE)
        try:
            end = b"" if self._events else _end_of(parts)
            await self._hand_over(chain(_pieces(parts, SHARED_PIECE, len(end)), _single(end)))
        finally:
            reservation.release()

    async def settle(self) -> None:
        """Wait until the client has taken everything, and give back the memory for the response."""
        if self._kept_back:
            await self._hand_over(_single(self._kept_back))
            self._kept_back = b""
        self._request.release_answer()

    async def close(self) -> None:
        """Settle the response, and end it properly."""
        await self.settle()
        await self._send({"type": BODY, "body": b"", "more_body": False})

    async def _hand_over(self, messages: Iterable[bytes]) -> None:
        """Give messages to granian, as it takes them."""
        response_budget, request = self._unread, self._request
        self.since = self.moved = _now()
        self.taken = 0
        response_budget.begin(self)
        try:
            for message in messages:
                request.sent += len(message)
                await self._send({"type": BODY, "body": message, "more_body": True})
                self.taken += len(message)
                self.moved = _now()
        except asyncio.CancelledError:
            if self.cut_off:
                request.task.uncancel()
                raise ClientHangupError(
                    f"the client read nothing of its answer for {_now() - self.moved:.0f} seconds"
                ) from None
            raise
        finally:
            response_budget.end(self)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _end_of(parts: Sequence[Buffer]) -> bytes:
    """The last bytes of `parts`, which go one by one.

    When granian has taken them all, everything before them has left granian, and the client has
    taken it. Nothing else shows that.
    """
    return b"".join([part[-SETTLING:] for part in parts])[-SETTLING:]


def _pieces(parts: Sequence[Buffer], size: int, kept: int) -> Iterator[bytes]:
    """`parts` without their last `kept` bytes, in pieces of `size` bytes; the last may have fewer.

    Views are copied once, and bytes that fit a piece not at all.
    """
    left = sum(map(len, parts)) - kept
    room = min(size, left)
    gathered: list[Buffer] = []
    for part in parts:
        at = 0
        while at < len(part) and room > 0:
            gathered.append(part[at : at + room])
            at += len(gathered[-1])
            room -= len(gathered[-1])
            if not room:
                yield b"".join(gathered)
                left -= min(size, left)
                room = min(size, left)
                gathered.clear()


def _single(data: bytes) -> Iterator[bytes]:
    for at in range(len(data)):
        yield data[at : at + 1]
