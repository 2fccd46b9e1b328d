"""Commits enter SlateDB in order, and none without those before it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamfold.errors import StorageError
from streamfold.store.engine.engine import commit_rows
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine


class Stuck:
    """SlateDB that takes no write, as it does while too much waits for slow storage."""

    def __init__(self, db: Any) -> None:
        self._db = db
        self.asked = asyncio.Event()
        self.writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    async def write(self, batch: Any) -> Any:
        self.writes += 1
        self.asked.set()
        await asyncio.Event().wait()


async def test_nothing_is_written_after_a_commit_that_was_cancelled_before_its_write() -> None:
    engine = await SlateEngine.open(open_location("memory:"))
    stuck = engine._db = Stuck(engine._db)
    first = asyncio.create_task(commit_rows(engine, [(b"1", b"first")]))
    await stuck.asked.wait()
    second = asyncio.create_task(commit_rows(engine, [(b"2", b"second")]))
    await asyncio.sleep(0)  # it waits for the first
    first.cancel()
    with pytest.raises(StorageError, match="earlier commit"):
        async with asyncio.timeout(60):
            await second
    assert stuck.writes == 1
    await engine.close(flush=False)
