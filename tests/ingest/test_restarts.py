"""Restarts and failed appends lose nothing and cost no copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from s2_sdk import S2

from streamfold.errors import RetryLaterError
from streamfold.follow.clients.client import Appended, StreamClient
from streamfold.follow.clients.s2 import S2Client
from streamfold.ingest.postgres.ingester import IngestOptions
from streamfold.ingest.streams import BasinStreams
from streamfold.model.records import Record
from tests.ingest.conftest import BASIN
from tests.ingest.ingesting import ingesting, stream
from tests.ingest.postgres import (
    database_name,
    execute,
    following,
)

TABLES = ("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE other (id int PRIMARY KEY)")


def options(database: str, *tables: str) -> IngestOptions:
    # Longer than the second between two confirmations, as the default is.
    return IngestOptions(tables, slot=database_name(database), heartbeat=2.0)


class FailingClient(S2Client):
    """Refuses one append with changes when a test asks for it."""

    failing = False

    async def append(
        self,
        records: Sequence[Record],
        *,
        match_seq_num: int | None = None,
        fencing_token: str | None = None,
    ) -> Appended:
        if self.failing and match_seq_num is not None:
            self.failing = False
            raise RetryLaterError("the test refuses this append: append again")
        return await super().append(
            records, match_seq_num=match_seq_num, fencing_token=fencing_token
        )


class FailingStreams(BasinStreams):
    """Streams of a basin that can refuse an append."""

    def __init__(self, s2: S2) -> None:
        super().__init__(s2.basin(BASIN))
        self._s2 = s2
        self.clients: dict[str, FailingClient] = {}

    async def ensure(self, name: str) -> StreamClient:
        await super().ensure(name)
        self.clients[name] = FailingClient(self._s2.basin(BASIN).stream(name))
        return self.clients[name]


@pytest.mark.parametrize("one_stream", ["", "all"], ids=["a stream for each", "one stream"])
async def test_added_columns_are_declared_again_after_a_failed_append(
    database: str, s2: S2, one_stream: str
) -> None:
    execute(database, *TABLES)
    chosen = replace(options(database, "t"), one_stream=one_stream)
    name, streams = one_stream or "public.t", FailingStreams(s2)
    async with ingesting(database, s2, chosen, streams=streams) as running:
        await running.followed()
        streams.clients[name].failing = True
        execute(
            database,
            "ALTER TABLE t ADD COLUMN price numeric(8, 2)",
            "INSERT INTO t VALUES (1, 2.50)",
        )
        async with following(stream(s2, name), ["id"]) as until:
            rebuilt = await until(lambda table: (1,) in table.rows)
        assert running.ingest.progress.failures == 1
        execute(database, "INSERT INTO t VALUES (2, 3)")
        async with following(stream(s2, name), ["id"]) as until:
            rebuilt = await until(lambda table: (2,) in table.rows)
    declared = [b"price" in raw for raw in rebuilt.raw if b'"op":"s"' in raw]
    assert [body["op"] for body in rebuilt.bodies][-3:] == ["s", "c", "c"]
    assert declared[-1]
    assert declared.count(True) == 1
