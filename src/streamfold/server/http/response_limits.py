"""Bounds what the server holds for clients that do not read it: one budget for all answers.

- Memory is reserved before an answer is read from the store, in turn by connection (`answer_room`).
- An answer counts until its client has taken it. To watch every small answer would cost more than
  sending it; so a random sample of them is watched, and each stands for `SAMPLE` bytes. A client cannot
  know which ones are, so the sum is right whatever it does.
- While connections wait for memory, clients must take their answers at a pace that rises with the
  time for which they wait. The slowest are cut off first.
- A client that takes nothing at all is cut off in any case after the write deadline.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from streamfold.server.http.problems import ClientHangupError
from streamfold.server.http.response_shares import Reservation, Room

#: Bytes of all answers that are held for clients.
UNREAD_BYTES_MAX: Final = 256 << 20
#: Seconds after which a client that takes nothing is cut off.
WRITE_DEADLINE: Final = 60.0
#: While answers wait for memory: seconds that a client gets, and bytes per second that it must take
#: after them. Each second for which a first answer waits, and each four for which the next one in turn
#: does, halves the former and doubles the latter, six times at most: to 30 ms and 8 MiB/s.
GRACE: Final = 2.0
PACE_MIN: Final = 128 << 10
_DOUBLINGS_MAX: Final = 6
_FIRST_DOUBLES_AFTER: Final = 1.0
#: The kernel takes some MiB of an answer at once, whether its client reads or not: at a constant pace
#: those would count for half a minute, and some rounds of silent clients could come before a reader.
_NEXT_DOUBLES_AFTER: Final = 4.0
#: Bytes of small answers for one that is watched: rare enough to cost nothing that can be measured, and
#: a five-hundredth of the budget, so that the sum is right within a few percent when it matters.
SAMPLE: Final = 512 << 10
#: Bytes that the door holds for an answer over HTTP/2 beside its body.
ANSWER_COST: Final = 5 << 10
#: Seconds between two checks of answers that wait for their clients.
_LOOK_INTERVAL: Final = 0.5


class PendingResponse(Protocol):
    """An answer that is being sent."""

    #: Times of the event loop: when the current wait began, and when something was last seen taken.
    since: float
    moved: float
    #: Bytes that were taken since the wait began.
    delivered: int
    cut_off: bool

    def look(self, now: float) -> None:
        """Bring `moved` and `delivered` up to date."""

    @property
    def task(self) -> asyncio.Task[Any]:
        """The task that sends it."""

    @property
    def connection(self) -> Hashable:
        """The connection that it is sent on."""

    def disconnect(self) -> None:
        """Close that connection: the client does not take the answer."""


@dataclass(slots=True, eq=False)
class _Shared:
    """Memory for one encoding that several answers send."""

    #: Its result is the memory, once there is some; None if the first answer gave up before.
    reserved: asyncio.Future[Reservation | None]
    answers: int = 0


class ResponseBudget:
    """Bounds the memory of all answers, and cuts off the slowest clients."""

    def __init__(
        self,
        capacity: int = UNREAD_BYTES_MAX,
        deadline: float = WRITE_DEADLINE,
    ) -> None:
        self.deadline = deadline
        self.room = Room(capacity)
        #: Clients that were cut off.
        self.cut_off = 0
        self._sending: dict[PendingResponse, None] = {}
        self._shared: dict[Hashable, _Shared] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.seed(random.Random())  # noqa: S311 - seeded by the system

    def seed(self, chance: random.Random) -> None:
        """Draw samples by `chance` from now on; tests give one with a fixed seed."""
        self._random = chance
        self._until_sample = chance.expovariate(1 / SAMPLE)

    def is_sample(self, size: int) -> bool:
        """Whether to watch this small answer for all that are not: every byte has the same chance."""
        self._until_sample -= size
        if self._until_sample > 0:
            return False
        self._until_sample = self._random.expovariate(1 / SAMPLE)
        return True

    def reserve(
        self,
        owner: Hashable,
        size: int,
        *,
        first: bool = False,
        gone: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> Awaitable[Reservation]:
        """Wait until there is memory for an answer of `size` bytes; see `Room.reserve`."""
        if self.room.pressed:
            self._look_soon()
        return self.room.reserve(owner, size, first=first, gone=gone)

    @asynccontextmanager
    async def sharing(self, key: Hashable, size: int) -> AsyncIterator[None]:
        """Hold memory for an encoding; once for all answers that send it at the same time."""
        shared = self._shared.get(key)
        first = shared is None
        if shared is None:
            shared = self._shared[key] = _Shared(asyncio.get_running_loop().create_future())
        shared.answers += 1
        try:
            if first:
                await self._reserve_shared(key, shared, size)
            elif not shared.reserved.done():
                await asyncio.shield(shared.reserved)
            yield
        finally:
            shared.answers -= 1
            if not shared.answers:
                del self._shared[key]
                if reservation := shared.reserved.result():
                    reservation.release()

    async def _reserve_shared(self, key: Hashable, shared: _Shared, size: int) -> None:
        reservation = None
        try:
            reservation = await self.reserve(key, size)
        finally:
            # When the first is cancelled, the others continue without: at most one encoding too much.
            shared.reserved.set_result(reservation)

    def begin(self, answer: PendingResponse) -> None:
        """An answer begins to wait for its client; `end` it whatever happens."""
        self._sending[answer] = None
        if self._timer is None:
            self._look_soon()

    def end(self, answer: PendingResponse) -> None:
        self._sending.pop(answer, None)

    def _look_soon(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_LOOK_INTERVAL, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now, room = loop.time(), self.room
        for answer in tuple(self._sending):
            answer.look(now)
            if now - answer.moved > self.deadline:
                self._cut(answer)
        if room.pressed:
            self._relieve(now)
        if self._sending or room.pressed:
            self._look_soon()

    def _relieve(self, now: float) -> None:
        """Cut off the slowest clients until the requested memory fits."""
        room, missing = self.room, self.room.missing
        haste = self._haste(now)
        late = [
            (lateness, answer)
            for answer in self._sending
            if (lateness := (now - answer.since) * haste - answer.delivered / PACE_MIN) > GRACE
        ]
        late.sort(key=lambda entry: entry[0], reverse=True)
        cut = set[Hashable]()
        for _, answer in late:
            if missing <= 0:
                return
            if answer.connection not in cut:
                cut.add(answer.connection)
                missing -= room.held_by(answer.connection)
                self._cut(answer)

    def _haste(self, now: float) -> float:
        """The factor by which waiting answers shorten the time of those being sent."""
        doublings = 0.0
        for since, seconds in (
            (self.room.first_waits_since, _FIRST_DOUBLES_AFTER),
            (self.room.next_waits_since, _NEXT_DOUBLES_AFTER),
        ):
            if since is not None:
                doublings = max(doublings, (now - since) / seconds)
        return float(2.0 ** min(doublings, _DOUBLINGS_MAX))

    def _cut(self, answer: PendingResponse) -> None:
        self.cut_off += 1
        self.end(answer)
        answer.cut_off = True
        answer.task.cancel()
        self.room.refuse(
            answer.connection, ClientHangupError("the client does not read its answers")
        )
        answer.disconnect()
