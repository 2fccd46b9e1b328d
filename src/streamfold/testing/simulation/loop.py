"""An event loop in simulated time that can kill whole processes between two steps.

A step is one callback: a task from one `await` to the next, a timer, or work that a server would
offload to a thread. Ready callbacks run in asyncio's own order. The seed decides how long storage,
clients and threads take, and thereby how tasks interleave.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from heapq import heappop
from itertools import count
from random import Random
from typing import Any, TypeVar, TypeVarTuple
from unittest.mock import patch

from streamfold import backoff

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

#: Maximum simulated seconds of work in a thread.
_THREAD_SECONDS = 0.002

_chance: ContextVar[Random] = ContextVar("chance")
_process: ContextVar[SimulatedProcess | None] = ContextVar("process", default=None)


def chance() -> Random:
    """Return the dice of the running operation, or of its process for background work."""
    return _chance.get()


def roll_with(seed: int) -> Random:
    """Give the running task its own dice, seeded with `seed`, and return them."""
    random = Random(seed)  # noqa: S311 - repeatable, not secret
    _chance.set(random)
    return random


class SimulationStuckError(Exception):
    """The loop is deadlocked: all tasks wait and no timer is set."""


class SimulatedProcess:
    """A group of tasks to kill together. After `kill`, none of them takes another step."""

    def __init__(self, seed: int) -> None:
        self.dead = False
        self._context = copy_context()
        self._context.run(_process.set, self)
        self._context.run(roll_with, seed)

    def start(
        self, work: Coroutine[Any, Any, Result], dice: Random | None = None
    ) -> asyncio.Task[Result]:
        """Start a task in this process, with `dice` if it works on behalf of a caller."""
        context = self._context.copy()
        if dice is not None:
            context.run(_chance.set, dice)
        return asyncio.get_running_loop().create_task(work, context=context)

    def kill(self) -> None:
        """Stop all tasks between two steps, without cleanup."""
        self.dead = True


class _Task(asyncio.Task[Any]):
    """A task whose hash is independent of its address, which makes sets of tasks ordered alike."""

    def __init__(self, coro: Any, *, loop: SimulationLoop, **options: Any) -> None:
        self._number = next(loop.numbers)
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future[Any]):
    """A future whose hash is independent of its address."""

    def __init__(self, loop: SimulationLoop) -> None:
        self._number = next(loop.numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class SimulationLoop(asyncio.BaseEventLoop):
    """Runs callbacks in order and jumps to the next timer when none is ready.

    Offloaded work runs on the loop after a random delay, so that a run depends only on its dice.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seconds = 0.0
        #: Callbacks run so far.
        self.steps = 0
        self.numbers = count()
        #: Errors of callbacks that belong to no task.
        self.errors: list[str] = []
        #: Callbacks of dead processes, kept because freeing one would run its task's `finally`.
        self._dropped: list[asyncio.Handle] = []
        self.set_task_factory(_make_task)
        self.set_exception_handler(lambda _, details: self._note_error(details))

    def bury(self) -> None:
        """Close the loop and free the callbacks of dead processes."""
        self.close()
        self._dropped.clear()

    def time(self) -> float:
        """Return simulated seconds since the loop was created."""
        return self._seconds

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(self)

    def _note_error(self, details: dict[str, Any]) -> None:
        message = str(details.get("message"))
        if message.startswith("Exception in callback"):
            self.errors.append(f"{message}: {details.get('exception')!r}")

    def _run_once(self) -> None:
        # Copied from asyncio, minus the selector, since nothing outside can wake this loop.
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
        """Do nothing: `_run_once` drops cancelled timers when they come due."""

    def _write_to_self(self) -> None:
        """Do nothing: no other thread calls this loop."""

    def run_in_executor(
        self,
        executor: Executor | None,
        func: Callable[[*Arguments], Result],
        *args: *Arguments,
    ) -> asyncio.Future[Result]:
        """Run `func` on the loop after a short random delay."""
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


@contextmanager
def seeded(seed: int, now: Callable[[], int]) -> Iterator[None]:
    """Seed `random` and `os.urandom`, and drive `time.time_ns` by `now` (in ms).

    Garbage collection is off inside the block, because freeing an abandoned task runs its `finally`.
    """
    dice = random.Random(seed)  # noqa: S311 - repeatable, not secret
    state = random.getstate()
    pauses: Any = backoff._RNG
    collecting = gc.isenabled()
    gc.disable()
    random.seed(seed)
    pauses.seed(seed)
    try:
        with (
            patch.object(os, "urandom", dice.randbytes),
            patch.object(random, "_urandom", dice.randbytes),
            patch.object(time, "time_ns", lambda: now() * 1_000_000),
        ):
            yield
    finally:
        random.setstate(state)
        pauses.seed()
        with quiet():
            gc.collect(1)  # all garbage of this run is young, since nothing was collected meanwhile
        if collecting:
            gc.enable()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings that Python prints when it frees the tasks of killed processes."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook
