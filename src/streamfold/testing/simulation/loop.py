"""An event loop whose time passes only when nothing else can happen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from random import Random
from typing import Any, TypeVar, TypeVarTuple

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

#: Simulated seconds that work in a thread takes at most.
_THREAD_SECONDS = 0.002


class SimulationStuckError(Exception):
    """Every task waits for another one: nothing can ever happen again."""


class SimulationLoop(asyncio.BaseEventLoop):
    """Runs callbacks in order and jumps to the next timer when there are none left.

    Work for threads runs on the loop, a random moment later: the run depends on `random` alone.
    """

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        self._seconds = 0.0
        #: What the base class asks for events; there are none but timers.
        self._selector = self

    def time(self) -> float:
        """Simulated seconds since the loop was made."""
        return self._seconds

    def select(self, timeout: float | None) -> list[Any]:
        """Pass the time until the next timer."""
        if timeout is None:
            raise SimulationStuckError("all tasks wait, and no timer is set")
        self._seconds += timeout
        return []

    def _process_events(self, events: list[Any]) -> None:
        """Nothing to do: there are no events."""

    def _write_to_self(self) -> None:
        """Nothing to wake: no other thread calls this loop."""

    def run_in_executor(
        self,
        executor: Executor | None,
        func: Callable[[*Arguments], Result],
        *args: *Arguments,
    ) -> asyncio.Future[Result]:
        """Run `func` on the loop, a little later."""
        done: asyncio.Future[Result] = self.create_future()

        def run() -> None:
            if done.cancelled():
                return
            try:
                done.set_result(func(*args))
            except Exception as error:
                done.set_exception(error)

        self.call_later(self._random.random() * _THREAD_SECONDS, run)
        return done
