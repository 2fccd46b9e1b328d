"""Row changes that PostgreSQL does not log cause a new copy of the table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from s2_sdk import S2

from streamfold.ingest.errors import SourceUnusableError
from streamfold.ingest.postgres.ingester import IngestOptions
from tests.ingest.ingesting import ingesting, stream
from tests.ingest.postgres import PATIENCE, Rebuilt, database_name, execute, following
from tests.ingest.test_restarts import HeldStreams

_PLAIN = "CREATE TABLE {} (id int PRIMARY KEY, v int); INSERT INTO {} VALUES (1, 1), (60, 2)"
_PARTS = (
    "CREATE TABLE {} (id int PRIMARY KEY, v int) PARTITION BY RANGE (id);"
    "CREATE TABLE {}_1 PARTITION OF {} FOR VALUES FROM (0) TO (50);"
    "CREATE TABLE {}_2 PARTITION OF {} FOR VALUES FROM (50) TO (100);"
    "INSERT INTO {} VALUES (1, 1), (60, 2)"
)
_ENUM = (
    "CREATE TYPE {}_type AS ENUM ('a', 'b');"
    "CREATE TABLE {} (id int PRIMARY KEY, v {}_type[]); INSERT INTO {} VALUES (1, '{{a}}')"
)
_ATTACH = "ALTER TABLE {} ATTACH PARTITION {}_3 FOR VALUES FROM (100) TO (200)"
#: By table: how it is made, and what is done to it.
_ALTERED = {
    "default_dropped": (
        _PLAIN,
        "ALTER TABLE {} ADD w int DEFAULT 5; ALTER TABLE {} ALTER w DROP DEFAULT",
    ),
    "volatile_default_dropped": (
        _PLAIN,
        "ALTER TABLE {} ADD w float DEFAULT random(); ALTER TABLE {} ALTER w DROP DEFAULT",
    ),
    "default_of_partitions_dropped": (
        _PARTS,
        "ALTER TABLE {} ADD w int DEFAULT 5; ALTER TABLE {} ALTER w DROP DEFAULT",
    ),
    "default_of_domain": (
        _PLAIN,
        "CREATE DOMAIN {}_type AS int DEFAULT 7; ALTER TABLE {} ADD w {}_type",
    ),
    "same_type": (_PLAIN, "ALTER TABLE {} ALTER v TYPE int USING v * 2"),
    "expression": (
        "CREATE TABLE {} (id int PRIMARY KEY, v int GENERATED ALWAYS AS (id * 2) STORED);"
        "INSERT INTO {} (id) VALUES (1)",
        "ALTER TABLE {} ALTER v SET EXPRESSION AS (id * 3)",
    ),
    "label": (_ENUM, "ALTER TYPE {}_type RENAME VALUE 'a' TO 'z'"),
    "composite": (
        "CREATE TYPE {}_type AS (x int);"
        "CREATE TABLE {} (id int PRIMARY KEY, v {}_type); INSERT INTO {} VALUES (1, '(1)')",
        "ALTER TYPE {}_type ADD ATTRIBUTE y int",
    ),
    "swapped": (
        _PLAIN,
        "CREATE TABLE {}_new (id int PRIMARY KEY, v int); INSERT INTO {}_new VALUES (5, 5);"
        "ALTER TABLE {} RENAME TO {}_old; ALTER TABLE {}_new RENAME TO {}",
    ),
    "attached": (
        _PARTS,
        "CREATE TABLE {}_3 (id int PRIMARY KEY, v int); INSERT INTO {}_3 VALUES (150, 3);"
        + _ATTACH,
    ),
    "detached": (_PARTS, "ALTER TABLE {} DETACH PARTITION {}_1"),
    "dropped": (_PARTS, "DROP TABLE {}_1"),
    "emptied": (_PARTS, "TRUNCATE {}_1"),
}
_KEPT = {
    "vacuum": (_PLAIN, "VACUUM FULL {}"),
    "other_default": (_PLAIN, "ALTER TABLE {} ALTER v SET DEFAULT 7"),
    "new_label": (_ENUM, "ALTER TYPE {}_type ADD VALUE 'c'"),
    "created_as_partition": (
        _PARTS,
        "CREATE TABLE {}_3 PARTITION OF {} FOR VALUES FROM (100) TO (200)",
    ),
}


def _options(database: str, *tables: str) -> IngestOptions:
    return IngestOptions(tables, slot=database_name(database), heartbeat=0.2)


def _copies(rebuilt: Rebuilt) -> int:
    return sum(body["op"] == "e" for body in rebuilt.bodies)


def _rows(database: str, table: str) -> list[dict[str, object]]:
    found = execute(database, f"SELECT to_jsonb(t) FROM {table} t ORDER BY id")
    return [row for (row,) in found]


async def test_a_table_that_the_log_does_not_tell_about_is_copied_again(
    database: str, s2: S2
) -> None:
    both = _ALTERED | _KEPT
    for name, (creation, _) in both.items():
        execute(database, creation.replace("{}", name).replace("{{", "{").replace("}}", "}"))
    execute(database, "CREATE PUBLICATION streamfold FOR ALL TABLES WITH "
            "(publish_via_partition_root = true, publish_generated_columns = stored)")  # fmt: skip
    async with ingesting(database, s2, _options(database, *both)) as running:
        await running.followed()
        for name, (_, change) in both.items():
            execute(database, change.replace("{}", name))
        for name in _ALTERED:
            async with following(stream(s2, f"public.{name}"), ["id"]) as until:
                rebuilt = await until(lambda found: _copies(found) > 1)
            found = [rebuilt.rows[key] for key in sorted(rebuilt.rows)]
            if name == "composite":
                assert [row["v"] for row in found] == ["(1,)"], name
            elif name == "label":
                assert [row["v"] for row in found] == ["{z}"], name
            else:
                assert found == _rows(database, name), name
        await running.followed()
        for name in _KEPT:
            execute(database, f"INSERT INTO {name} (id) VALUES (99)")
            async with following(stream(s2, f"public.{name}"), ["id"]) as until:
                rebuilt = await until(lambda found: (99,) in found.rows)
            assert _copies(rebuilt) == 1, name


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
async def test_a_key_that_gets_more_columns_ends_the_ingester(
    database: str, s2: S2, identity: str
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, v int NOT NULL)",
            f"ALTER TABLE t REPLICA IDENTITY {identity}")  # fmt: skip
    async with ingesting(database, s2, _options(database, "t")) as running:
        await running.followed()
        execute(database, "ALTER TABLE t DROP CONSTRAINT t_pkey",
                "ALTER TABLE t ADD PRIMARY KEY (id, v)",
                "INSERT INTO t VALUES (1, 1), (1, 2)")  # fmt: skip
        error = await running.failure()
    assert isinstance(error, SourceUnusableError)
    assert "the key of table public.t was (id) and is now (id, v)" in error.message


async def test_changes_of_a_table_that_had_another_name_for_a_while_are_not_missed(
    database: str, s2: S2
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    async with ingesting(database, s2, _options(database, "t")) as running:
        await running.followed()
        execute(database, "BEGIN; INSERT INTO t VALUES (1); ALTER TABLE t RENAME TO other;"
                "INSERT INTO other VALUES (2); ALTER TABLE other RENAME TO t; COMMIT",
                "INSERT INTO t VALUES (3)")  # fmt: skip
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: (3,) in table.rows)
    assert rebuilt.table("id") == [(1,), (2,), (3,)]


async def _noted(s2: S2, options: IngestOptions, condition: Callable[[set[str]], bool]) -> None:
    """Wait until the marks in the last note of the only table meet the condition."""
    control = stream(s2, options.control_stream)
    async with asyncio.timeout(PATIENCE):
        while True:
            (last,) = await control.peek((await control.check_tail()).seq_num - 1, 1)
            (noted,) = json.loads(last.body)["tables"].values()
            if condition(set(noted["marks"])):
                return
            await asyncio.sleep(0.05)


async def test_a_table_that_is_emptied_and_altered_later_is_not_copied_again(
    database: str, s2: S2
) -> None:
    execute(database, _PLAIN.replace("{}", "t"))
    options, file = _options(database, "t"), "SELECT relfilenode FROM pg_class WHERE relname = 't'"
    async with ingesting(database, s2, options) as running:
        await running.followed()
        execute(database, "TRUNCATE t")
        ((number,),) = execute(database, file)
        await _noted(s2, options, lambda marks: f"f{number}" in marks)
        execute(database, "ALTER TABLE t ADD w int", "INSERT INTO t VALUES (3, 3, 3)")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            await until(lambda found: (3,) in found.rows)
            await running.followed()
            execute(database, "INSERT INTO t VALUES (4, 4, 4)")
            rebuilt = await until(lambda found: (4,) in found.rows)
    assert _copies(rebuilt) == 1


async def test_a_partition_that_is_new_and_dropped_later_takes_its_rows_along(
    database: str, s2: S2
) -> None:
    execute(database, _PARTS.replace("{}", "t"))
    options = _options(database, "t")
    async with ingesting(database, s2, options) as running:
        await running.followed()
        execute(database, "CREATE TABLE t_3 PARTITION OF t FOR VALUES FROM (100) TO (200)",
                "INSERT INTO t VALUES (150, 3)")  # fmt: skip
        await _noted(s2, options, lambda marks: sum(mark[0] == "p" for mark in marks) == 3)
        async with following(stream(s2, "public.t"), ["id"]) as until:
            await until(lambda found: (150,) in found.rows)
            execute(database, "DROP TABLE t_3")
            rebuilt = await until(lambda found: _copies(found) > 1)
    assert rebuilt.table("id") == [(1,), (60,)]


async def test_a_label_that_is_new_while_columns_are_declared_is_missed_when_it_is_renamed(
    database: str, s2: S2
) -> None:
    execute(database, _ENUM.replace("{}", "t").replace("{{", "{").replace("}}", "}"))
    options, streams = _options(database, "t"), HeldStreams(s2)
    async with ingesting(database, s2, options, streams=streams) as running:
        await running.followed()
        held = streams.clients["public.t"].held = asyncio.Queue()
        execute(database, "ALTER TABLE t ADD w int", "INSERT INTO t VALUES (2, '{b}', 2)")
        release = await held.get()
        execute(database, "ALTER TYPE t_type ADD VALUE 'c'")
        await _noted(s2, options, lambda marks: any(mark.endswith(" c") for mark in marks))
        streams.clients["public.t"].held = None
        release.set()
        execute(database, "INSERT INTO t VALUES (3, '{c}', 3)")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            await until(lambda found: (3,) in found.rows)
    execute(database, "ALTER TYPE t_type RENAME VALUE 'c' TO 'z'")
    async with ingesting(database, s2, options) as running:
        await running.followed()
        execute(database, "INSERT INTO t VALUES (4, '{a}', 4)")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda found: (4,) in found.rows)
    assert rebuilt.rows[(3,)]["v"] == "{z}"
