"""When the space of deleted records is freed, and how much is rewritten; with a clock by hand."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamfold.store import slate_tables
from streamfold.store.location import open_location
from streamfold.store.slate_engine import SlateEngine
from tests.store.small_tables import use_small_tables


@pytest.fixture(autouse=True)
def _small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_tables(monkeypatch.setattr)


async def test_a_merge_that_slatedb_refused_does_not_count_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await SlateEngine.open(open_location(tmp_path.as_uri()))

    async def write_tables(count: int) -> None:
        for number in range(count):
            await engine.commit([(b"%04d" % number, bytes(1000))])
            await engine.flush()

    while len((await engine.tables()).runs) < 2:
        await write_tables(4)
    monkeypatch.setattr(slate_tables, "_MERGE_LOOK", 2.0)  # SlateDB has forgotten it by then
    oldest = (await engine.tables()).runs[-1].id
    # Young tables and the oldest run are not neighbours.
    refused = asyncio.create_task(engine.merge([oldest], young=True))
    await write_tables(16)
    assert not await refused
    await engine.close()
