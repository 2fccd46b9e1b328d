"""Waiters at a stream's tail: followers, and callers that need it durable."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

from streamfold.errors import StreamfoldError

#: Followers woken per event loop iteration. Serving them takes a quarter of a millisecond. Then
#: other tasks run, above all appends.
WAKES_PER_STEP: Final = 32
#: Seconds between rounds, per follower. Serving a follower over HTTP takes about 7 us of event loop
#: time. So one stream's followers use less than half of that time, and 1000 of them get 15 ms of
#: appends at once.
PAUSE_PER_WAITER: Final = 15e-6
#: Seconds by which a timer may fire early, because uvloop counts whole milliseconds.
_TICK: Final = 1e-3


class TailWaiters:
    """Wakes the followers at the tail of one stream, in rounds.

    Serving a follower costs the same however many records it gets, so a pause between rounds saves
    work, and all followers in a round share bytes that are built once. A few followers hardly
    notice the pause, which is about as long as serving them takes. After a longer silence they wake
    at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        #: In arrival order. Waiters add and remove themselves.
        self.waiting: dict[Waiter, None] = {}
        #: Waiters of the current round that are yet to be woken.
        self._called: deque[Waiter] = deque()
        self._began = float("-inf")
        self._next_round: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self.waiting) + len(self._called)

    def wake(self) -> None:
        """Wake all waiters, now or in the next round, because there is more to read."""
        if self._next_round is not None or not self.waiting:
            return
        pause = self._began + len(self) * PAUSE_PER_WAITER - self._loop.time()
        if pause <= 0:
            self._begin_round()
        else:
            self._next_round = self._loop.call_later(pause, self._begin_round)

    def fail_all(self, error: StreamfoldError) -> None:
        """Raise `error` in all waiters, because nothing more will come."""
        if self._next_round is not None:
            self._next_round.cancel()
            self._next_round = None
        waiters = (*self.waiting, *self._called)
        self.waiting.clear()
        self._called.clear()
        for waiter in waiters:
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
    """One follower's waits at the tail. Close it after the last.

    A follower waits again and again, and rarely until the timeout. So one timer serves many waits:
    when it fires, it checks whether the current wait has timed out.
    """

    __slots__ = ("_deadline", "_due", "_loop", "_ready", "_timer", "_waiting")

    def __init__(self, waiters: TailWaiters, loop: asyncio.AbstractEventLoop) -> None:
        self._waiting = waiters.waiting
        self._loop = loop
        self._ready: asyncio.Future[bool] | None = None
        #: Deadline of the current wait; None without a timeout.
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: When the timer fires.
        self._due = 0.0

    def wait(self, max_wait: float | None) -> asyncio.Future[bool]:
        """Return a future: True when there is more to read, False after `max_wait` seconds.

        Call `stop_waiting` after each wait, however it ends.
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
            self._ready.exception()  # marks it as retrieved: the follower may be about to leave

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, due: float) -> None:
        self.close()
        self._due = due
        self._timer = self._loop.call_at(due, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if self._deadline is None:
            return  # the next wait sets the timer again
        if self._deadline - self._loop.time() > _TICK:
            self._set_timer(self._deadline)
        else:
            self.wake(False)


class DurableWaiters:
    """Callers that wait until the tail at the time of their call is durable."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        #: Tails and their futures, in order of the tails.
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def wait_for(self, tail: int) -> asyncio.Future[None]:
        """Return a future that resolves once `tail` is durable.

        Tails must not decrease between calls.
        """
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((tail, waiter))
        return waiter

    def wake(self, tail: int) -> bool:
        """Wake callers whose tail is now durable. Returns whether others are left."""
        while self._waiting and self._waiting[0][0] <= tail:
            waiter = self._waiting.popleft()[1]
            if not waiter.done():
                waiter.set_result(None)
        return bool(self._waiting)

    def fail(self, error: StreamfoldError) -> None:
        """Raise `error` in all waiters."""
        for _, waiter in self._waiting:
            reject(waiter, error)


def reject(waiter: asyncio.Future[Any], error: Exception) -> None:
    """Raise `error` in the waiter, if it is still waiting."""
    if not waiter.done():
        waiter.set_exception(error)
        waiter.exception()  # marks it as retrieved: the caller may have gone
