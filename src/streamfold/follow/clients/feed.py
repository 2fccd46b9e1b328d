"""Reads that survive disconnects, retried calls, and repeated task cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final, TypeVar

from streamfold.backoff import Backoff
from streamfold.errors import InvalidError, PositionUnwrittenError, RetryLaterError
from streamfold.follow.clients.client import StreamClient, StreamRecord
from streamfold.follow.errors import SnapshotAheadError

#: Seconds without an expected record before checking whether it was trimmed.
SILENCE: Final = 1.0
#: Seconds before an unfinished task is cancelled again.
_ASK_AGAIN: Final = 0.25


async def cancel_until_done(task: asyncio.Task[Any]) -> None:
    """Cancel `task` repeatedly until it has ended. The caller retrieves its result."""
    while not (await asyncio.wait({task}, timeout=_ASK_AGAIN))[0]:
        task.cancel()


T = TypeVar("T")
Batch = Sequence[StreamRecord]


async def cancellable(call: Awaitable[T]) -> T:
    """Return the result of `call`. Raises CancelledError if the caller was cancelled meanwhile.

    The S2 SDK uses `asyncio.wait_for` for each request. Under Python 3.11 it drops a cancellation
    that arrives together with the response, and the caller would wait for records forever. The task
    still counts the cancellation.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        return await call
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError


async def retrying(backoff: Backoff, call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `call`, retrying while it raises `RetryLaterError`."""
    failures = 0
    while True:
        try:
            return await call()
        except RetryLaterError as error:
            failures += 1
            await backoff.wait(failures, error)


async def is_empty_from(client: StreamClient, position: int, backoff: Backoff) -> bool:
    """Return whether the stream has no record at or after `position`, even if it once had some.

    If records are expected there, they were trimmed or have expired, and a session would wait for
    the next append.
    """
    return not await retrying(backoff, partial(client.peek, position, 1))


class Feed:
    """Yields all records from a position on, in order, across disconnects.

    Seq_nums jump where records were trimmed.
    """

    def __init__(self, client: StreamClient, position: int, backoff: Backoff) -> None:
        self._client = client
        self.backoff = backoff
        self.position = position
        self._batches = self._read()
        self._pending: asyncio.Task[Batch] | None = None
        self._closed = False

    async def next(self, max_wait: float | None = None) -> Batch | None:
        """Return the next batch, or None after `max_wait` seconds. Cancelling loses no records."""
        if self._closed:
            raise InvalidError("the stream is no longer followed: its `async with` block is over")
        step = self._pending = self._pending or asyncio.create_task(self._step())
        done, _ = await asyncio.wait({step}, timeout=max_wait)
        if not done:
            return None
        if step.cancelled():
            raise InvalidError("the stream is no longer followed: its feed was closed")
        self._pending = None
        if step.exception() is not None:
            # A failed generator is finished and would look like an end.
            self._batches = self._read()
        return step.result()

    async def seek(self, position: int) -> None:
        """Continue from another position."""
        await self.close()
        self.position = position
        self._batches = self._read()
        self._closed = False

    async def close(self) -> None:
        """End the session. Undelivered records are read again when the feed continues."""
        self._closed = True
        if self._pending is not None:
            step, self._pending = self._pending, None
            step.cancel()
            await cancel_until_done(step)
            if not step.cancelled():
                step.exception()  # mark it as retrieved: no caller is left to receive it
        await self._batches.aclose()

    async def _step(self) -> Batch:
        return await anext(self._batches)

    async def _read(self) -> AsyncGenerator[Batch]:
        failures = 0
        while True:
            try:
                async with aclosing(self._client.read(self.position)) as session:
                    async for batch in session:
                        failures = 0
                        self.position = batch[-1].seq_num + 1
                        yield batch
                error = RetryLaterError("the session ended")
            except RetryLaterError as lost:
                error = lost
            except PositionUnwrittenError as beyond:
                raise SnapshotAheadError(
                    f"the state that follows {self._client.name}",
                    self.position,
                    beyond.tail_seq_num,
                ) from beyond
            failures += 1
            await self.backoff.wait(failures, error)
