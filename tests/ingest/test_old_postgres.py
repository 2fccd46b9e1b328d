"""An older PostgreSQL, which behaves differently without a publication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from s2_sdk import S2

from streamfold.ingest import SlotLostError
from streamfold.ingest.postgres.ingester import IngestOptions
from tests.ingest.ingesting import ingesting, stream
from tests.ingest.postgres import execute, following, temporary_postgres


@pytest.fixture(scope="module")
def postgres_16() -> Iterator[str]:
    with temporary_postgres(16) as uri:
        yield uri


async def test_postgres_16_is_followed_until_its_publication_is_dropped(
    postgres_16: str, s2: S2
) -> None:
    """It refuses changes from a time without the publication, although there is one again."""
    execute(postgres_16, "CREATE TABLE t (id int PRIMARY KEY, "
            "twice int GENERATED ALWAYS AS (id * 2) STORED)", "INSERT INTO t VALUES (1)")  # fmt: skip
    chosen = IngestOptions(("t",), heartbeat=60.0)
    async with ingesting(postgres_16, s2, chosen) as running:
        await running.followed()
        execute(postgres_16, "INSERT INTO t VALUES (2)")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            await until(lambda table: (2,) in table.rows)
        execute(postgres_16, "DROP PUBLICATION streamfold", "INSERT INTO t VALUES (3)")
        failure = await running.failure()
    assert isinstance(failure, SlotLostError)
    assert 'publication "streamfold" does not exist' in failure.message
    async with ingesting(postgres_16, s2, chosen) as running:
        assert isinstance(await running.failure(), SlotLostError)
    async with ingesting(postgres_16, s2, replace(chosen, recopy=True)) as running:
        await running.followed()
        execute(postgres_16, "INSERT INTO t VALUES (4)")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: (4,) in table.rows)
    assert rebuilt.rows == {(n,): {"id": n} for n in (1, 2, 3, 4)}
