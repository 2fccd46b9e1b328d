"""Bounds how long clients may take to send what they announced, with one timer for all of them."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from streamfold.wire.s2.failures import RequestTimeoutError

#: Seconds that a body may take to arrive, so that a client that dawdles does not stay for ever.
BODY_PATIENCE: Final = 30.0
#: Looks per patience: an interruption comes at most a quarter late. A timer for each request would be
#: exact, and cost as much as all else that reading a small body takes.
_LOOKS: Final = 4


class Patience:
    """Interrupts tasks that wait for a client too long."""

    def __init__(self, seconds: float = BODY_PATIENCE) -> None:
        self._seconds = seconds
        #: The look after which each began to wait.
        self._since: dict[asyncio.Task[Any], int] = {}
        self._looks = 0
        self._interrupted: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, task: asyncio.Task[Any]) -> None:
        """Watch a task that begins to wait; end it whatever happens."""
        self._since[task] = self._looks
        if self._timer is None:
            self._look_again(task.get_loop())

    def end(self, task: asyncio.Task[Any]) -> None:
        self._since.pop(task, None)

    def judge(self, task: asyncio.Task[Any]) -> None:
        """Raise RequestTimeoutError if the task was cancelled for lack of patience."""
        if task in self._interrupted:
            self._interrupted.discard(task)
            task.uncancel()
            raise RequestTimeoutError(
                f"the body did not arrive within {self._seconds:g} seconds: send it faster"
            )

    def _look_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self._seconds / _LOOKS, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self._looks += 1
        latest = self._looks - _LOOKS
        for task in [task for task, since in self._since.items() if since < latest]:
            self._interrupted.add(task)
            self.end(task)
            task.cancel()
        if self._since:
            self._look_again(loop)
