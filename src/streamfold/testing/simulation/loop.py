"""An event loop in simulated time, on which whole processes can be killed between two steps.

A step is one callback that the loop runs: a task from one `await` to the next, a timer, work that a
server would give to a thread. Ready callbacks run in the order in which asyncio runs them; the seed
decides how long storage, clients and threads take, and so who meets whom at an `await`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context, ContextVar, copy_context
from heapq import heappop
from itertools import count
from random import Random
from typing import Any, TypeVar, TypeVarTuple

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

#: Simulated seconds that work in a thread takes at most.
_THREAD_SECONDS = 0.002

_chance: ContextVar[Random] = ContextVar("chance")
_process: ContextVar[SimulatedProcess | None] = ContextVar("process", default=None)


def chance() -> Random:
    """The dice of the running operation, or of the background work of its process."""
    return _chance.get()


def roll_with(seed: int) -> Random:
    """Give the running task dice of its own."""
    random = Random(seed)  # noqa: S311 - repeatable, not secret
    _chance.set(random)
    return random


class SimulationStuckError(Exception):
    """Every task waits for another one: nothing can ever happen again."""


class SimulatedProcess:
    """Runs tasks that can be killed together: after `kill` none of them takes another step."""

    def __init__(self, seed: int) -> None:
        self.dead = False
        self._context = copy_context()
        self._context.run(_process.set, self)
        self._context.run(roll_with, seed)

    def start(
        self, work: Coroutine[Any, Any, Result], dice: Random | None = None
    ) -> asyncio.Task[Result]:
        """A task of this process; with the caller's `dice`, if it works for one."""
        context = self._context.copy()
        if dice is not None:
            context.run(_chance.set, dice)
        return asyncio.get_running_loop().create_task(work, context=context)

    def kill(self) -> None:
        """Stop everything between two steps, without any clean-up."""
        self.dead = True


class _Task(asyncio.Task[Any]):
    """A task whose hash does not depend on its address: sets of tasks have one order."""

    def __init__(self, coro: Any, *, loop: SimulationLoop, **options: Any) -> None:
        self._number = next(loop.numbers)
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future[Any]):
    """A future whose hash does not depend on its address."""

    def __init__(self, loop: SimulationLoop) -> None:
        self._number = next(loop.numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class SimulationLoop(asyncio.BaseEventLoop):
    """Runs callbacks in order and jumps to the next timer when there are none left.

    Work for threads runs on the loop, a random moment later: a run depends on its dice alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seconds = 0.0
        #: Callbacks that were run.
        self.steps = 0
        self.numbers = count()
        #: Errors of callbacks that no task could raise.
        self.errors: list[str] = []
        #: Callbacks of dead processes. Freeing one would run the `finally` of its task.
        self._dropped: list[asyncio.Handle] = []
        self.set_task_factory(_make_task)
        self.set_exception_handler(lambda _, details: self._note_error(details))

    def bury(self) -> None:
        """Close the loop, and forget what dead processes have left."""
        self.close()
        self._dropped.clear()

    def time(self) -> float:
        """Simulated seconds since the loop was made."""
        return self._seconds

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(self)

    def _note_error(self, details: dict[str, Any]) -> None:
        message = str(details.get("message"))
        if message.startswith("Exception in callback"):
            self.errors.append(f"{message}: {details.get('exception')!r}")

    def _run_once(self) -> None:
        # asyncio's own, without a selector: nothing outside can wake this loop.
        ready: Any = self._ready  # type: ignore[attr-defined]
        scheduled: Any = self._scheduled  # type: ignore[attr-defined]
        if not ready:
            while scheduled and scheduled[0]._cancelled:
                heappop(scheduled)._scheduled = False
            if not scheduled:
                raise SimulationStuckError("all tasks wait, and no timer is set")
            self._seconds = max(self._seconds, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self._seconds:
            handle = heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(_process)
            if process is not None and process.dead:
                self._dropped.append(handle)
                continue
            self.steps += 1
            handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing to do: cancelled timers are dropped when their time comes."""

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

        self.call_later(chance().random() * _THREAD_SECONDS, run)
        return done


def _make_task(
    loop: asyncio.AbstractEventLoop, coro: Any, *, context: Context | None = None
) -> asyncio.Task[Any]:
    assert isinstance(loop, SimulationLoop)
    return _Task(coro, loop=loop, context=context)
