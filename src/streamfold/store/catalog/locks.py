"""Locks by name: one change to a basin or stream at a time, without delaying others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class NamedLocks:
    """A lock for every name, kept only while it is held or awaited."""

    def __init__(self) -> None:
        self._locks: dict[tuple[str, ...], tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def hold(self, *name: str) -> AsyncIterator[None]:
        lock, users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[name]
            if users == 1:
                del self._locks[name]
            else:
                self._locks[name] = lock, users - 1
