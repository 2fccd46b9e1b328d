"""Those who wait at the tail of a stream for more, and how they are told that there is more."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from streamfold.errors import StreamfoldError

#: Followers that are told in one turn of the event loop: to serve them takes half a millisecond, after
#: which others, above all appends, have their turn.
WAKES_PER_STEP: Final = 32
#: Seconds from one round to the next for each follower. To serve one over HTTP takes about 20 us of the
#: event loop; so followers of one stream keep it busy for less than half of the time, and 1000 of them
#: get what was appended in the last 50 ms at once.
PAUSE_PER_WAITER: Final = 50e-6
#: Seconds by which a timer may be early: those of uvloop count whole milliseconds.
_TICK: Final = 1e-3


class TailWaiters:
    """Everybody who waits at the tail of one stream.

    They are told in rounds. To serve a follower costs the same however many records it gets, so a pause
    before the next round makes that one worth more; and all who are told together get the same bytes,
    which are made once. A few hardly notice: the pause is about as long as it takes to serve them. What
    comes after a longer silence is told at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        #: In the order in which they came; waiters come and go by themselves.
        self.waiting: dict[Waiter, None] = {}
        #: Those of a round who have not been told yet.
        self._called: deque[Waiter] = deque()
        self._began = float("-inf")
        self._next_round: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self.waiting) + len(self._called)

    def wake(self) -> None:
        """Let everybody know that there is more, now or in the next round."""
        if self._next_round is not None or not self.waiting:
            return
        pause = self._began + len(self) * PAUSE_PER_WAITER - self._loop.time()
        if pause <= 0:
            self._begin_round()
        else:
            self._next_round = self._loop.call_later(pause, self._begin_round)

    def fail_all(self, error: StreamfoldError) -> None:
        """Raise `error` wherever somebody waits: nothing more will come."""
        if self._next_round is not None:
            self._next_round.cancel()
            self._next_round = None
        everybody = (*self.waiting, *self._called)
        self.waiting.clear()
        self._called.clear()
        for waiter in everybody:
            waiter.fail(error)

    def _begin_round(self) -> None:
        self._next_round = None
        self._began = self._loop.time()
        under_way = bool(self._called)
        self._called.extend(self.waiting)
        self.waiting.clear()
        if not under_way:
            self._wake_some()

    def _wake_some(self) -> None:
        for _ in range(min(WAKES_PER_STEP, len(self._called))):
            self._called.popleft().wake(True)
        if self._called:
            self._loop.call_soon(self._wake_some)


class Waiter:
    """One follower's seat in an audience, for all its waits; close it at their end.

    A follower waits again and again, and hardly ever until its patience is over. So its timer is not
    set anew for every wait: when it is due, it looks whether the wait of that moment is over.
    """

    __slots__ = ("_deadline", "_due", "_loop", "_ready", "_timer", "_waiting")

    def __init__(self, waiters: TailWaiters, loop: asyncio.AbstractEventLoop) -> None:
        self._waiting = waiters.waiting
        self._loop = loop
        self._ready: asyncio.Future[bool] | None = None
        #: Of the current wait, if its patience is limited.
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: When the timer looks.
        self._due = 0.0

    def wait(self, max_wait: float | None) -> asyncio.Future[bool]:
        """True once there is more; False when `patience` seconds have passed without.

        Leave the seat after each wait, however it ends.
        """
        ready: asyncio.Future[bool] = self._loop.create_future()
        self._ready = ready
        if max_wait is not None:
            self._deadline = self._loop.time() + max_wait
            if self._timer is None or self._due > self._deadline:
                self._set_timer(self._deadline)
        self._waiting[self] = None
        return ready

    def stop_waiting(self) -> None:
        self._waiting.pop(self, None)
        self._ready = self._deadline = None

    def wake(self, more: bool) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(more)

    def fail(self, error: StreamfoldError) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # marks it as seen: whoever waits may be about to go

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, due: float) -> None:
        self.close()
        self._due = due
        self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._deadline is None:
            return  # whoever waits next sets it again
        if self._deadline - self._loop.time() > _TICK:
            self._set_timer(self._deadline)
        else:
            self.wake(False)
