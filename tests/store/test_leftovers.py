"""Files that no row names: noted in bounded rows, and searched for until a search succeeds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import pytest

from streamfold.blob import BlobMeta
from streamfold.errors import BlobUnavailableError
from streamfold.store import keys, rows
from streamfold.store.engine.engine import commit_rows
from streamfold.store.leftovers import LEFTOVERS_MAX, Leftovers
from streamfold.store.rows import LeftoversRow
from tests.store.conftest import NO_GRACE, Bench, Clock

DAY = 86_400


async def test_no_more_files_are_noted_at_once_than_a_row_may_have(
    bench: Bench, clock: Clock
) -> None:
    engine = await bench._open_engine()
    leftovers = Leftovers("snapshot", engine, partial(commit_rows, engine), DAY, clock)
    names = [f"{number:06d}" for number in range(LEFTOVERS_MAX + 5)]
    assert await leftovers.overdue(names) == set()
    value = await engine.get(keys.leftovers("snapshot"))
    assert value is not None
    assert list(rows.decode(value, LeftoversRow).since) == names[:LEFTOVERS_MAX]
    clock.pass_seconds(DAY)
    assert await leftovers.overdue(names) == set(names[:LEFTOVERS_MAX])
    assert leftovers.due_at <= clock()  # the others are noted in the next pass
    assert await leftovers.overdue(names[LEFTOVERS_MAX:]) == set()
    assert leftovers.due_at == clock() + DAY * 1000
    clock.pass_seconds(DAY)
    assert await leftovers.overdue(names[LEFTOVERS_MAX:]) == set(names[LEFTOVERS_MAX:])
    await engine.close()


async def test_a_search_that_fails_is_repeated_by_the_next_pass(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench.store():
        pass
    snapshots = bench.location.snapshots
    unnamed = f"{7:016x}/{1:020d}-{'0' * 32}"
    await snapshots.put(unnamed, b"its row is lost")
    listing, available = snapshots.list, False

    async def failing(prefix: str = "") -> AsyncIterator[BlobMeta]:
        if not available:
            raise BlobUnavailableError("storage is not reachable")
        async for meta in listing(prefix):
            yield meta

    monkeypatch.setattr(snapshots, "list", failing)
    async with bench.store(replace(NO_GRACE, upkeep_interval=DAY)) as store:
        await store.upkeep()
        available = True
        await store.upkeep()
        assert [meta.key async for meta in listing()] == []
