"""Work on several destinations at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def finish_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results; every piece of work has ended, also when the first error is raised.

    What goes on behind a caller's back could still write when the caller has moved on.
    """
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
