"""Requests that are repeated within limits, and whose outcome is known when they are given up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from streamfold.blob.obstore.errors_from_obstore import (
    OBSTORE_ERRORS,
    Failure,
    FailureKind,
    read_failure,
    write_error,
)
from streamfold.blob.obstore.request_limits import RequestLimits

T = TypeVar("T")

Sleep = Callable[[float], Awaitable[None]]


class Attempts:
    """Repeats one write; `name` stands for the store in messages."""

    def __init__(self, name: str, limits: RequestLimits, sleep: Sleep) -> None:
        self._name = name
        self._limits = limits
        self._sleep = sleep

    async def repeat(self, key: str, attempt: Callable[[bool], Awaitable[T | Failure]]) -> T:
        """Return what `attempt` returns once it is no failure.

        `attempt` sends one request, and is told whether an earlier one may have worked.
        """
        doubtful = False
        pauses = self._limits.pauses()
        while isinstance(result := await attempt(doubtful), Failure):
            doubtful = doubtful or result.kind is FailureKind.DOUBTFUL
            pause = next(pauses, None)
            if pause is None or not result.worth_repeating:
                raise write_error(self._name, key, result, doubtful=doubtful)
            await self._sleep(pause)
        return result


async def send(request: Awaitable[T]) -> T | Failure:
    """Return what the request returns, or how it failed."""
    try:
        return await request
    except OBSTORE_ERRORS as error:
        return read_failure(error)
