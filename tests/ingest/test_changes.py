"""Row changes, and the records that they become."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psycopg2
import pytest
from s2_sdk import S2

from streamfold.ingest import SourceUnusableError
from streamfold.ingest.postgres import connection
from streamfold.ingest.postgres.ingester import IngestOptions
from tests.ingest.ingesting import Ingesting, ingesting, stream
from tests.ingest.postgres import Rebuilt, database_name, execute, following

LARGE = "(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 400) n)"  # beyond 2 kB: TOAST


async def ingested(database: str, s2: S2, before: list[str], after: list[str]) -> Rebuilt:
    """Table t with key id, rebuilt from its stream."""
    execute(database, *before)
    options = IngestOptions(("t",), slot=database_name(database))
    async with ingesting(database, s2, options) as running:
        await running.followed()
        execute(database, *after, "INSERT INTO t (id) VALUES (-9)", "DELETE FROM t WHERE id = -9")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            return await until(lambda table: table.bodies[-1:] == [end(table)])


def end(table: Rebuilt) -> Any:
    last = table.bodies[-1] if table.bodies else {}
    return last if last.get("op") == "d" and last["key"] == {"id": -9} else None


async def test_truncate_empties_the_table(database: str, s2: S2) -> None:
    rebuilt = await ingested(
        database,
        s2,
        ["CREATE TABLE t (id int PRIMARY KEY, a text)", "INSERT INTO t VALUES (1, 'a')"],
        ["TRUNCATE t", "INSERT INTO t VALUES (2, 'b')"],
    )
    assert rebuilt.table("id", "a") == [(2, "b")]


async def test_large_values_that_did_not_change_are_named(database: str, s2: S2) -> None:
    rebuilt = await ingested(
        database,
        s2,
        [
            "CREATE TABLE t (id int PRIMARY KEY, a text, n int)",
            f"INSERT INTO t VALUES (1, {LARGE})",
        ],
        ["UPDATE t SET n = 5"],
    )
    (update,) = [body for body in rebuilt.bodies if body["op"] == "u"]
    assert update["unchanged"] == ["a"]
    assert update["after"] == {"id": 1, "n": 5}
    assert rebuilt.table("id", "a", "n") == execute(database, "SELECT id, a, n FROM t")


async def test_a_changed_key_takes_large_values_along(database: str, s2: S2) -> None:
    rebuilt = await ingested(
        database,
        s2,
        ["CREATE TABLE t (id int PRIMARY KEY, a text)", f"INSERT INTO t VALUES (1, {LARGE})"],
        ["UPDATE t SET id = 2", "UPDATE t SET id = 3"],
    )
    moves = [body for body in rebuilt.bodies if body["op"] == "u"]
    assert [body["key"] for body in moves] == [{"id": 1}, {"id": 2}]
    assert not any("unchanged" in body for body in moves)
    assert rebuilt.table("id", "a") == execute(database, "SELECT id, a FROM t")


async def test_a_changed_key_takes_large_values_along_as_the_log_has_them(
    database: str, s2: S2
) -> None:
    """A cast to text strips the spaces of char(n)."""
    columns = "a char(20000), b text, c text, d bytea"
    values = f"{LARGE}, E'\\t\\n\\\\N \"' || {LARGE}, NULL, {LARGE}::bytea"
    rebuilt = await ingested(
        database,
        s2,
        [f"CREATE TABLE t (id int PRIMARY KEY, {columns})", f"INSERT INTO t VALUES (1, {values})"],
        ["UPDATE t SET id = 2"],
    )
    (copied,) = [body["after"] for body in rebuilt.bodies if body["op"] == "r"]
    assert copied["a"].endswith(" ")
    assert rebuilt.rows == {(2,): copied | {"id": 2}}


async def test_a_large_value_of_a_key_stays_in_its_rows(database: str, s2: S2) -> None:
    # PostgreSQL sends the old key with every update, and leaves the same value out of the new row.
    large = [f"ALTER TABLE t ALTER {column} SET STORAGE EXTERNAL" for column in ("part", "a")]
    execute(
        database,
        "CREATE TABLE t (id int, part text, a text, n int, PRIMARY KEY (id, part))",
        *large,
        "INSERT INTO t VALUES (1, repeat('p', 2500), repeat('a', 9000), 0)",
    )
    options = IngestOptions(("t",), slot=database_name(database))
    async with ingesting(database, s2, options) as running:
        await running.followed()
        execute(database, "UPDATE t SET n = 1", "UPDATE t SET id = 2, n = 2")
        await running.until(lambda progress: progress.tables["public.t"].changes >= 2)
        async with following(stream(s2, "public.t"), ["id", "part"]) as until:
            rebuilt = await until(lambda table: table.bodies[-1:] and table.bodies[-1]["op"] == "u")
            rebuilt = await until(lambda table: table.bodies[-1]["after"]["n"] == 2)
    columns = ("id", "part", "a", "n")
    assert rebuilt.table(*columns) == execute(database, f"SELECT {', '.join(columns)} FROM t")
    first, second = [body for body in rebuilt.bodies if body["op"] == "u"]
    assert first["unchanged"] == ["a"]
    assert "unchanged" not in second


_WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
    "AND datname = current_database() AND {}"
)


@asynccontextmanager
async def locked_before_its_value_is_read(
    database: str, s2: S2
) -> AsyncIterator[tuple[Ingesting, Callable[[], None]]]:
    """An ingester that must ask for a large value of a table that is locked; and what unlocks it."""
    execute(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, a text)",
        f"INSERT INTO t VALUES (1, {LARGE})",
    )
    changing, locking = psycopg2.connect(database), psycopg2.connect(database)
    options = IngestOptions(("t",), slot=database_name(database))
    async with ingesting(database, s2, options) as running:
        await running.followed()
        changing.cursor().execute("UPDATE t SET id = 2")
        # So that a test whose query waits for the lock without a limit fails, and does not hang.
        locking.cursor().execute("SET idle_in_transaction_session_timeout = '120s'")
        locks = asyncio.ensure_future(
            asyncio.to_thread(locking.cursor().execute, "LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        )
        await counted(database, _WAITING.format("query LIKE 'LOCK%'"))
        changing.commit()  # the lock comes before the query for the large value
        await locks
        yield running, locking.rollback
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: (2,) in table.rows)
    changing.close()
    locking.close()
    assert rebuilt.table("id", "a") == execute(database, "SELECT id, a FROM t")


async def test_a_query_that_waits_in_postgres_does_not_hold_the_event_loop(
    database: str, s2: S2
) -> None:
    async with locked_before_its_value_is_read(database, s2) as (_, unlock):
        await counted(database, _WAITING.format("application_name = 'streamfold ingest'"))
        unlock()


async def test_a_query_that_waits_long_for_a_lock_starts_the_session_again(
    database: str, s2: S2, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_LOCK_WAIT", 200)
    async with locked_before_its_value_is_read(database, s2) as (running, unlock):
        failed = await running.until(lambda progress: progress.failures > 1)
        assert "lock timeout" in (failed.last_error or "")
        unlock()


async def counted(database: str, query: str) -> None:
    """Wait until a query for a count of this database finds one."""
    async with asyncio.timeout(100):  # less than a lock is held
        while not (await asyncio.to_thread(execute, database, query))[0][0]:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.05)


async def test_replica_identity_full_sends_whole_rows(database: str, s2: S2) -> None:
    rebuilt = await ingested(
        database,
        s2,
        [
            "CREATE TABLE t (id int PRIMARY KEY, a text, n int)",
            "ALTER TABLE t REPLICA IDENTITY FULL",
            f"INSERT INTO t VALUES (1, {LARGE}, 1), (2, 'b', 2)",
        ],
        ["UPDATE t SET n = 5 WHERE id = 1", "DELETE FROM t WHERE id = 2"],
    )
    (update,) = [body for body in rebuilt.bodies if body["op"] == "u"]
    assert update["before"]["n"] == 1
    assert "unchanged" not in update
    assert rebuilt.table("id", "a", "n") == execute(database, "SELECT id, a, n FROM t")


async def test_partitions_are_one_table(database: str, s2: S2) -> None:
    rebuilt = await ingested(
        database,
        s2,
        [
            "CREATE TABLE t (id int PRIMARY KEY, a text) PARTITION BY RANGE (id)",
            "CREATE TABLE t_low PARTITION OF t FOR VALUES FROM (-100) TO (100)",
            "CREATE TABLE t_high PARTITION OF t FOR VALUES FROM (100) TO (200)",
            "INSERT INTO t VALUES (1, 'a'), (101, 'b')",
        ],
        ["UPDATE t SET id = 102 WHERE id = 1", "UPDATE t SET a = 'c' WHERE id = 101"],
    )
    assert rebuilt.table("id", "a") == [(101, "c"), (102, "a")]


async def test_tables_that_inherit_are_others(database: str, s2: S2) -> None:
    rebuilt = await ingested(
        database,
        s2,
        [
            "CREATE TABLE t (id int PRIMARY KEY, a text)",
            "CREATE TABLE heir (PRIMARY KEY (id)) INHERITS (t)",
            "INSERT INTO t VALUES (1, 'a')",
            "INSERT INTO heir VALUES (2, 'b'), (3, 'c')",
        ],
        ["UPDATE t SET a = a || '!'", "DELETE FROM t WHERE id = 3"],
    )
    assert rebuilt.table("id", "a") == execute(database, "SELECT id, a FROM ONLY t")


async def test_a_transaction_says_where_it_ends_in_each_stream(database: str, s2: S2) -> None:
    rebuilt = await ingested(
        database,
        s2,
        ["CREATE TABLE t (id int PRIMARY KEY)"],
        ["INSERT INTO t SELECT generate_series(1, 5000)"],
    )
    inserts = [body["txn"] for body in rebuilt.bodies if body["op"] == "c"][:-1]
    assert len({txn["id"] for txn in inserts}) == 1
    assert [number for number, txn in enumerate(inserts) if "last" in txn] == [4999]
    assert [index for _, index in rebuilt.positions[:5000]] == list(range(5000))


async def test_an_added_column_needs_no_new_copy(database: str, s2: S2) -> None:
    rebuilt = await ingested(
        database,
        s2,
        ["CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)"],
        [
            "ALTER TABLE t ADD COLUMN at timestamptz",
            "INSERT INTO t VALUES (3, '2026-01-31 12:00+01')",
            "ALTER TABLE t ADD COLUMN price numeric(8, 2)",
            "UPDATE t SET price = 1 WHERE id = 1",
        ],
    )
    rows = {key: (row.get("at"), row.get("price")) for (key,), row in rebuilt.rows.items()}
    assert rows == {1: (None, "1.00"), 2: (None, None), 3: ("2026-01-31T11:00:00Z", None)}
    assert [body["op"] for body in rebuilt.bodies].count("t") == 0
    declared = [body["columns"] for body in rebuilt.bodies if body["op"] == "s"]
    assert declared[0] == [{"name": "id", "type": "INT", "nullable": False, "source": "integer"}]
    assert {column["name"]: column["type"] for column in declared[-1]} == {
        "id": "INT",
        "at": "TIMESTAMP",
        "price": "DECIMAL(8,2)",
    }


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE t RENAME COLUMN a TO b",
        "ALTER TABLE t DROP COLUMN a",
        "ALTER TABLE t ALTER COLUMN a TYPE int USING length(a)",
        "ALTER TABLE t ADD COLUMN b int DEFAULT 7",
        "ALTER TABLE t DROP COLUMN a, ADD COLUMN a text",
    ],
)
async def test_a_table_whose_old_rows_look_different_is_copied_again(
    database: str, s2: S2, change: str
) -> None:
    execute(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, a text)",
        "INSERT INTO t SELECT n, 'row ' || n FROM generate_series(1, 3) n",
    )
    options = IngestOptions(("t",), slot=database_name(database))
    async with ingesting(database, s2, options) as running:
        await running.followed()
        execute(database, change, "DELETE FROM t WHERE id = 3")
        await running.until(lambda progress: progress.sessions >= 2)
        await running.followed()
        execute(database, "DELETE FROM t WHERE id = 2")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: table.bodies[-1:] and table.bodies[-1]["op"] == "d")
    rows = execute(database, "SELECT row_to_json(t) FROM t ORDER BY id")
    assert [row for _, row in sorted(rebuilt.rows.items())] == [row for (row,) in rows]


async def test_a_changed_replica_identity_is_noticed_before_a_change_without_the_key(
    database: str, s2: S2
) -> None:
    execute(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, n int NOT NULL UNIQUE)",
        "INSERT INTO t SELECT n, n FROM generate_series(1, 3) n",
    )
    options = IngestOptions(("t",), slot=database_name(database))
    async with ingesting(database, s2, options) as running:
        await running.followed()
        execute(
            database,
            "ALTER TABLE t REPLICA IDENTITY USING INDEX t_n_key",
            "DELETE FROM t WHERE id = 1",
        )
        failure = await running.failure()
    assert isinstance(failure, SourceUnusableError)
    assert "was (id) and is now (n)" in failure.message
    execute(database, "ALTER TABLE t REPLICA IDENTITY DEFAULT", "DELETE FROM t WHERE id = 2")
    async with ingesting(database, s2, options) as running:
        await running.followed()
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: [b["op"] for b in table.bodies].count("e") == 2)
    assert rebuilt.table("id", "n") == [(3, 3)]


async def test_a_large_value_of_a_column_that_was_renamed_is_copied_again(
    database: str, s2: S2
) -> None:
    execute(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, a text)",
        f"INSERT INTO t VALUES (1, {LARGE})",
    )
    options = IngestOptions(("t",), slot=database_name(database))
    async with ingesting(database, s2, options) as running:
        await running.followed()
        # In one statement, so that the column has its new name when the value is looked up.
        execute(database, "UPDATE t SET id = 2; ALTER TABLE t RENAME COLUMN a TO b")
        await running.until(lambda progress: progress.sessions >= 2)
        await running.followed()
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: any("b" in row for row in table.rows.values()))
    assert rebuilt.table("id", "b") == execute(database, "SELECT id, b FROM t")
