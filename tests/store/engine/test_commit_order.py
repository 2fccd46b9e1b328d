"""Commits enter SlateDB in order, and none without its predecessors."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from streamfold._native import FaultyDisk
from streamfold.errors import StorageError
from streamfold.store.engine.engine import Engine, commit_rows
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine

COMMITS = 20


def row(number: int) -> tuple[bytes, bytes]:
    return b"%04d" % number, b"value"


async def stored(engine: Engine) -> list[int]:
    return [int(key) async for page in engine.scan(b"0", b"1") for key, _ in page]


async def test_commits_that_were_cancelled_leave_no_gap(tmp_path: Path) -> None:
    engine = await SlateEngine.open(open_location(tmp_path.as_uri()))
    commits = [asyncio.create_task(commit_rows(engine, [row(n)])) for n in range(COMMITS)]
    await asyncio.sleep(0)
    for commit in commits[::2]:
        commit.cancel()
    await asyncio.gather(*commits, return_exceptions=True)
    await engine.close(flush=False)
    reopened = await SlateEngine.open(open_location(tmp_path.as_uri()))
    assert await stored(reopened) == list(range(COMMITS))
    await reopened.close()


async def test_nothing_is_written_after_a_commit_that_failed(tmp_path: Path) -> None:
    faults = FaultyDisk(tmp_path, 1)
    try:
        engine = await SlateEngine.open(open_location(tmp_path.as_uri()))
        await commit_rows(engine, [row(0)])
        faults.turn(steps=2, number=errno.EIO)
        with pytest.raises(StorageError):
            await commit_rows(engine, [row(1)])
        faults.turn()
        with pytest.raises(StorageError):
            await commit_rows(engine, [row(2)])
        await engine.close(flush=False)
        reopened = await SlateEngine.open(open_location(tmp_path.as_uri()))
        assert await stored(reopened) == [0]
        await reopened.close()
    finally:
        faults.close()
