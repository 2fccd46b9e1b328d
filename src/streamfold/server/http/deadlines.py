"""Ends a long wait when the client hangs up or the server drains."""

from __future__ import annotations

import asyncio
from types import TracebackType

from streamfold.errors import StoreClosingError, StreamfoldError
from streamfold.server.http.drain import DrainGate
from streamfold.server.http.errors import ClientHangupError
from streamfold.server.http.request import Request


class WaitGuard:
    """While entered, interrupts the running task when the client hangs up or the server drains.

    The block then raises ClientHangupError or StoreClosingError. Draining interrupts only where
    `interruptible` is set, since a message that has been begun must go out whole.
    """

    def __init__(self, request: Request, drain_gate: DrainGate) -> None:
        self.interruptible = True
        self._request = request
        self._gate = drain_gate
        self._reason: StreamfoldError | None = None

    async def __aenter__(self) -> WaitGuard:
        self._task = self._request.task
        self._pending_cancellations = self._task.cancelling()
        self._watcher = asyncio.create_task(self._await_hangup())
        self._request.guarded = True
        self._gate.when_draining(self._drain)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._gate.forget(self._drain)
        self._watcher.cancel()
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
