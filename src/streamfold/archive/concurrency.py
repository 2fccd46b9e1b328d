"""Concurrent work: on several destinations at once, and ahead of what is needed next."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


async def finish_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results; every piece of work has ended, also when the first error is raised.

    Work left running could still write after the caller has moved on.
    """
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def prefetch(items: Iterator[T]) -> Generator[T]:
    """Yield the same items, each made in another thread while the one before is in use.

    Closed early, it waits for the item under way: nothing is read behind the caller's back.
    """
    nothing = object()
    with ThreadPoolExecutor(1, "archive-ahead") as maker:
        coming = maker.submit(next, items, nothing)
        while (item := coming.result()) is not nothing:
            coming = maker.submit(next, items, nothing)
            yield item  # type: ignore[misc]  # not the sentinel
