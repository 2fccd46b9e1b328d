"""Bounds what the server holds for clients that do not read it: one budget for all answers.

Memory is reserved before an answer is read from the store. When there is none left, answers wait for
it, and clients that take theirs too slowly are cut off, the slowest first. A client that takes nothing
at all is cut off in any case after the write deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from streamfold.store.admission import Admission

#: Bytes of all answers that are held for clients.
UNREAD_MAX: Final = 256 << 20
#: Seconds after which a client that takes nothing is cut off.
WRITE_DEADLINE: Final = 60.0
#: While answers wait for memory: seconds that a client gets, and bytes per second that it must take
#: after them.
GRACE: Final = 2.0
PACE_MIN: Final = 128 << 10
#: Bytes that one answer without a reservation has below us while its client does not read: five pieces
#: wait in granian, one for its turn, and hyper buffers 32 KiB and the piece that exceeds them.
IN_FLIGHT: Final = 6 * (16 << 10) + (48 << 10)
#: Seconds between two looks at answers that wait for their clients.
_LOOK_INTERVAL: Final = 0.5


class Answer(Protocol):
    """An answer that is being sent."""

    #: Times of the event loop: when the current message was begun, and when some of it was last taken.
    since: float
    moved: float
    #: Bytes of the current message that were taken.
    taken: int
    cut_off: bool

    @property
    def task(self) -> asyncio.Task[Any]:
        """That sends it."""

    @property
    def held(self) -> int:
        """Bytes of memory that are reserved for it."""


@dataclass(slots=True, eq=False)
class _Shared:
    """Memory for one encoding that several answers send."""

    size: int
    answers: int = 0
    #: Done when the memory is reserved.
    reserved: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Unread:
    """The budget, and who is over it."""

    def __init__(
        self,
        capacity: int = UNREAD_MAX,
        deadline: float = WRITE_DEADLINE,
    ) -> None:
        self.deadline = deadline
        self.capacity = capacity
        #: Clients that were cut off.
        self.cut_off = 0
        self._room = Admission(capacity)
        #: Called with each answer whose client is cut off.
        self.on_cut_off: Callable[[Any], None] = lambda answer: None
        self._sending: dict[Answer, None] = {}
        self._stalled = 0
        self._shared: dict[Hashable, _Shared] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held(self) -> int:
        """Bytes that are held for clients now, an estimate for what is below us."""
        return self._room.used + self._stalled * IN_FLIGHT

    async def reserve(self, size: int) -> int:
        """Wait until there is memory for an answer of `size` bytes; returns what to give back."""
        size = min(size, self.capacity)
        if not self._room.acquire_at_once(size):
            self._look_soon()
            await self._room.acquire(size)
        return size

    def overdraw(self, size: int) -> None:
        """Take memory whether there is any or not, for an answer that has some."""
        self._room.overdraw(size)

    def release(self, size: int) -> None:
        self._room.release(size)

    @asynccontextmanager
    async def sharing(self, key: Hashable, size: int) -> AsyncIterator[None]:
        """Hold memory for an encoding; once for all answers that send it at the same time."""
        shared = self._shared.get(key)
        first = shared is None
        if shared is None:
            shared = self._shared[key] = _Shared(min(size, self.capacity))
        shared.answers += 1
        try:
            if first:
                await self._reserve_shared(shared)
            elif not shared.reserved.done():
                await asyncio.shield(shared.reserved)
            yield
        finally:
            shared.answers -= 1
            if not shared.answers:
                del self._shared[key]
                if shared.size:
                    self._room.release(shared.size)

    async def _reserve_shared(self, shared: _Shared) -> None:
        size, shared.size = shared.size, 0
        try:
            await self.reserve(size)
            shared.size = size
        finally:
            # When the first is cancelled, the others go on without: at most one encoding too much.
            shared.reserved.set_result(None)

    def begin(self, answer: Answer) -> None:
        """An answer begins to wait for its client; `end` it whatever happens."""
        self._sending[answer] = None
        if self._timer is None:
            self._look_soon()

    def end(self, answer: Answer) -> None:
        self._sending.pop(answer, None)

    def _look_soon(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_LOOK_INTERVAL, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        late: list[tuple[float, Answer]] = []
        for answer in tuple(self._sending):
            if now - answer.moved > self.deadline:
                self._cut(answer)
            elif (lateness := now - answer.since - answer.taken / PACE_MIN) > GRACE:
                late.append((lateness, answer))
        self._stalled = len(late)
        self._relieve(late)
        if self._sending or self._room.waiting:
            self._look_soon()

    def _relieve(self, late: list[tuple[float, Answer]]) -> None:
        """Cut off the slowest clients until what is wanted fits."""
        missing = self.held + self._room.wanted - self.capacity
        late.sort(key=lambda entry: entry[0], reverse=True)
        for _, answer in late:
            if missing <= 0:
                return
            missing -= answer.held + IN_FLIGHT
            self._cut(answer)

    def _cut(self, answer: Answer) -> None:
        self.cut_off += 1
        self.end(answer)
        answer.cut_off = True
        answer.task.cancel()
        self.on_cut_off(answer)
