"""Reads that survive disconnects, retried calls, and tasks that are cancelled until they end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from streamfold.backoff import pause_after
from streamfold.errors import InvalidError, PositionUnwrittenError, RetryLaterError
from streamfold.follow.clients.client import StreamClient, StreamRecord
from streamfold.follow.errors import SnapshotAheadError

#: Seconds without a record, where some are expected, after which to look whether they are gone.
SILENCE: Final = 1.0
#: Seconds after which a task that has not ended is cancelled again.
_ASK_AGAIN: Final = 0.25


async def cancel_until_done(task: asyncio.Task[Any]) -> None:
    """Cancel `task` repeatedly until it has ended; the caller looks at its result."""
    while not (await asyncio.wait({task}, timeout=_ASK_AGAIN))[0]:
        task.cancel()


T = TypeVar("T")
Batch = Sequence[StreamRecord]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between attempts, in seconds: doubling, half of each at random."""

    first: float = 0.1
    longest: float = 10.0
    #: Failures in a row after which the error is raised; None = never.
    attempts: int | None = None
    rng: random.Random = field(default_factory=random.Random)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def pause(self, failures: int, error: RetryLaterError) -> None:
        """Wait after so many failures in a row, or raise the last one's error."""
        if self.attempts is not None and failures >= self.attempts:
            raise error
        logger.warning("trying again after failure %d: %s", failures, error)
        await self.sleep(pause_after(failures, self.first, self.longest, self.rng))


async def retrying(backoff: Backoff, call: Callable[[], Awaitable[T]]) -> T:
    """The result of `call`, which is retried while it raises `RetryLaterError`."""
    failures = 0
    while True:
        try:
            return await call()
        except RetryLaterError as error:
            failures += 1
            await backoff.pause(failures, error)


async def is_empty_from(client: StreamClient, position: int, backoff: Backoff) -> bool:
    """Whether the stream has no record at or after `position`, also if it had some.

    Where records are expected, they were trimmed or have expired: a session would wait for the next.
    """
    return not await retrying(backoff, partial(client.peek, position, 1))


class Feed:
    """All records from a position on, in order, across disconnects; seq_nums jump where records
    were trimmed.
    """

    def __init__(self, client: StreamClient, position: int, backoff: Backoff) -> None:
        self._client = client
        self.backoff = backoff
        self.position = position
        self._batches = self._read()
        self._pending: asyncio.Task[Batch] | None = None
        self._closed = False

    async def next(self, max_wait: float | None = None) -> Batch | None:
        """The next batch; None after `max_wait` seconds without one. Cancelling loses nothing."""
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
            self._batches = self._read()  # the failed one is over, and would look like an end
        return step.result()

    async def seek(self, position: int) -> None:
        """Continue from another position."""
        await self.close()
        self.position = position
        self._batches = self._read()
        self._closed = False

    async def close(self) -> None:
        """End the session; records not taken are read again after the next start."""
        self._closed = True
        if self._pending is not None:
            step, self._pending = self._pending, None
            step.cancel()
            await cancel_until_done(step)
            if not step.cancelled():
                step.exception()  # mark it as retrieved: no caller is left to raise it to
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
            await self.backoff.pause(failures, error)
