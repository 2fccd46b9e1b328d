"""Counts the requests under way, refuses new ones while the server stops, and ends long waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import Any

from streamfold.errors import StoreClosingError, StreamfoldError
from streamfold.server.http.problems import ClientHangupError
from streamfold.server.http.request import Request


class DrainGate:
    """Open at first, then draining, then expired: open sessions are then ended."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self.expired = asyncio.Event()
        #: By whether they are of a reader that follows a stream.
        self._callbacks: dict[Callable[[], None], bool] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        #: Set whenever the last request has left; meaningful only while draining.
        self._emptied = asyncio.Event()
        self._last_left = float("-inf")

    @property
    def inside(self) -> int:
        """Requests under way."""
        return len(self._tasks)

    @property
    def waits(self) -> int:
        """Reads that wait for records, or send them as they come: each has a callback."""
        return sum(self._callbacks.values())

    def enter(self, task: asyncio.Task[Any]) -> None:
        """Count a task as a request under way, until it leaves."""
        self._tasks.add(task)

    def leave(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._last_left = monotonic()
            self._emptied.set()

    def when_draining(self, callback: Callable[[], None], *, follows: bool = True) -> None:
        """Call `callback` when draining begins; at once if it has."""
        self._callbacks[callback] = follows
        if self.draining.is_set():
            callback()

    def forget(self, callback: Callable[[], None]) -> None:
        self._callbacks.pop(callback, None)

    async def drain(self, max_wait: float) -> None:
        """Refuse new requests, and return when all others have ended.

        Sessions are advised to reconnect; half of `max_wait` seconds later they are ended, and at its
        end the remaining ones are cut off.
        """
        self.draining.set()
        for callback in tuple(self._callbacks):
            callback()
        for last_word in (self.expired.set, self._cut_off):
            if await self._wait_until_empty(max_wait / 2):
                return
            last_word()
        await self._wait_until_empty(None)

    async def linger(self, seconds: float) -> None:
        """Return this many seconds after the last request has left; call it when none is inside."""
        await asyncio.sleep(max(0.0, self._last_left + seconds - monotonic()))

    async def _wait_until_empty(self, max_wait: float | None) -> bool:
        try:
            async with asyncio.timeout(max_wait):
                while self._tasks:
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            return False
        return True

    def _cut_off(self) -> None:
        for task in self._tasks:
            task.cancel()


class WaitGuard:
    """While entered, interrupts the running task when the client hangs up or the server drains.

    The block then raises ClientHangupError or StoreClosingError. Draining interrupts only where
    `interruptible` is set, since a message that has been begun must go out whole.
    """

    def __init__(self, request: Request, drain_gate: DrainGate, *, follows: bool = True) -> None:
        """`follows`: the block reads a stream as it grows, and counts as a follower."""
        self.interruptible = True
        self._follows = follows
        self._request = request
        self._gate = drain_gate
        self._reason: StreamfoldError | None = None

    async def __aenter__(self) -> WaitGuard:
        self._task = self._request.task
        self._pending_cancellations = self._task.cancelling()
        self._watcher = asyncio.create_task(self._await_hangup())
        self._request.guarded = True
        self._gate.when_draining(self._drain, follows=self._follows)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._gate.forget(self._drain)
        self._watcher.cancel()
        del self._watcher  # its cancellation refers to this guard
        self._request.guarded = False
        if self._reason is None:
            return
        # As asyncio.timeout does: only the cancellation that this object asked for is taken back.
        if self._task.uncancel() <= self._pending_cancellations and isinstance(
            error, asyncio.CancelledError
        ):
            raise self._reason from None

    async def _await_hangup(self) -> None:
        await self._request.gone()
        self._interrupt(ClientHangupError("the client hung up"))

    def _drain(self) -> None:
        if self.interruptible:
            self._interrupt(StoreClosingError())

    def _interrupt(self, reason: StreamfoldError) -> None:
        if self._reason is None:
            self._reason = reason
            self._task.cancel()
