"""Unusable databases, tables and slots, each with a way out, and copies that resume."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

import pytest
from s2_sdk import S2

from streamfold.errors import ConflictError, InvalidError
from streamfold.ingest import (
    RowTooLargeError,
    SlotLostError,
    SourceUnavailableError,
    SourceUnusableError,
)
from streamfold.ingest.postgres.catalog import Column, Table, find_tables
from streamfold.ingest.postgres.connection import Database
from streamfold.ingest.postgres.control import Control
from streamfold.ingest.postgres.ingester import IngestOptions
from streamfold.ingest.postgres.pgoutput import parse_lsn
from streamfold.ingest.postgres.slot import System
from streamfold.ingest.progress import IngestProgress
from streamfold.ingest.table_stream import BasinStreams, Position, TableStream, change_headers
from streamfold.model.records import Record
from tests.ingest.conftest import BASIN
from tests.ingest.ingesting import EncodedMemoryStream, ingesting, stream
from tests.ingest.postgres import (
    database_name,
    drop_slot,
    execute,
    following,
    restart,
    temporary_postgres,
)


def options(database: str, *tables: str) -> IngestOptions:
    return IngestOptions(tables, slot=database_name(database))


@pytest.mark.parametrize(
    ("statements", "advice"),
    [
        (["CREATE TABLE t (id int)"], r'ALTER TABLE "public"."t" ADD PRIMARY KEY'),
        # PostgreSQL would refuse every update and delete of the table once it is published.
        (
            ["CREATE TABLE t (id int PRIMARY KEY DEFERRABLE)"],
            "no primary key that is not DEFERRABLE",
        ),
        (
            ["CREATE TABLE t (id int PRIMARY KEY)", "ALTER TABLE t REPLICA IDENTITY NOTHING"],
            r'ALTER TABLE "public"."t" REPLICA IDENTITY DEFAULT',
        ),
        (
            [
                "CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id)",
                "CREATE TABLE part PARTITION OF t FOR VALUES FROM (0) TO (9)",
                "ALTER TABLE part REPLICA IDENTITY NOTHING",
            ],
            "ALTER TABLE public.part REPLICA IDENTITY DEFAULT",
        ),
        ([], "no table matches 'public.t'"),
        (["CREATE UNLOGGED TABLE t (id int PRIMARY KEY)"], "no table matches 'public.t'"),
    ],
)
def test_a_table_that_cannot_be_followed_is_refused_with_advice(
    database: str, statements: list[str], advice: str
) -> None:
    execute(database, *statements)
    with Database(database).query() as cursor, pytest.raises(SourceUnusableError) as refused:
        find_tables(cursor, ["t"])
    assert advice in refused.value.message


def test_two_tables_that_have_one_name_are_refused(database: str) -> None:
    execute(database, 'CREATE SCHEMA a; CREATE TABLE a."b.c" (id int PRIMARY KEY)',
            'CREATE SCHEMA "a.b"; CREATE TABLE "a.b".c (id int PRIMARY KEY)')  # fmt: skip
    with (
        Database(database).query() as cursor,
        pytest.raises(SourceUnusableError, match=r"two tables have the name a\.b\.c"),
    ):
        find_tables(cursor, ["a.*"])


async def test_names_may_have_any_characters(database: str, s2: S2) -> None:
    execute(
        database,
        'CREATE DOMAIN "d{}%s" AS int',
        'CREATE TABLE "t{}%s""ü" ("i""{}%s" "d{}%s" PRIMARY KEY, "a.b" text)',
        'ALTER TABLE "t{}%s""ü" ALTER "a.b" SET STORAGE EXTERNAL',
        """INSERT INTO "t{}%s""ü" VALUES (1, repeat('x', 10000))""",
    )
    chosen = replace(options(database, 't{}%s"ü'), publication="""p{}%s"ü'\\, x""")
    async with ingesting(database, s2, chosen) as running:
        await running.followed()
        # The large value is read from the table, by the key.
        execute(database, 'UPDATE "t{}%s""ü" SET "i""{}%s" = 2')
        async with following(stream(s2, 'public.t{}%s"ü'), ['i"{}%s']) as until:
            rebuilt = await until(lambda table: (2,) in table.rows)
    assert rebuilt.table('i"{}%s', "a.b") == [(2, "x" * 10000)]


def test_an_index_as_replica_identity_is_the_key(database: str) -> None:
    execute(
        database,
        "CREATE TABLE t (a int NOT NULL, b text NOT NULL, c int)",
        "CREATE UNIQUE INDEX t_key ON t (b, a)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX t_key",
    )
    with Database(database).query() as cursor:
        (table,) = find_tables(cursor, ["t"])
    assert table.key == ("b", "a")


def test_patterns_choose_tables_of_all_schemas(database: str) -> None:
    execute(
        database,
        "CREATE SCHEMA sales",
        *(f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in ("sales.a", "sales.b", "other")),
    )
    with Database(database).query() as cursor:
        assert [t.full_name for t in find_tables(cursor, ["sales.*"])] == ["sales.a", "sales.b"]


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        (("host=", "host=/nowhere"), SourceUnavailableError, "check host and port of the DSN"),
        (("/test", "/missing_"), SourceUnusableError, "does not exist"),
        (("postgres:@", "stranger:@"), SourceUnusableError, 'role "stranger" does not exist'),
    ],
)
def test_a_database_that_cannot_be_reached_is_named_without_its_password(
    database: str, change: tuple[str, str], error: type[Exception], reason: str, tmp_path: Path
) -> None:
    password = tmp_path / "password"
    password.write_text("s3cret\n")
    with pytest.raises(error) as refused:
        Database(database.replace(*change), password_file=password).connect()
    assert reason in str(refused.value)
    assert "s3cret" not in str(refused.value)


def test_a_connection_string_that_is_none_is_refused_without_showing_it() -> None:
    with pytest.raises(SourceUnusableError, match="postgresql://user@host") as refused:
        Database("postgresql://user:s3cret@[host")
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("again", [False, True], ids=["dropped", "made again"])
async def test_a_lost_slot_is_an_error_until_the_tables_are_copied_again(
    database: str, s2: S2, again: bool
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    chosen = options(database, "t")
    async with ingesting(database, s2, chosen) as running:
        await running.followed()
    execute(database, "INSERT INTO t VALUES (2)", "DELETE FROM t WHERE id = 1")
    drop_slot(database, chosen.slot)
    execute(database, "INSERT INTO t VALUES (3)")
    if again:
        execute(database, f"SELECT pg_create_logical_replication_slot('{chosen.slot}', 'pgoutput')")
    async with ingesting(database, s2, chosen) as running:
        failure = await running.failure()
    assert isinstance(failure, SlotLostError)
    assert "--recopy" in failure.message
    async with ingesting(database, s2, replace(chosen, recopy=True)) as running:
        await running.followed()
        execute(database, "INSERT INTO t VALUES (4)")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: (4,) in table.rows)
    assert rebuilt.table("id") == [(2,), (3,), (4,)]


async def test_a_slot_of_another_program_is_left_alone(database: str, s2: S2) -> None:
    execute(
        database,
        "CREATE TABLE t (id int PRIMARY KEY)",
        f"SELECT pg_create_logical_replication_slot('{database_name(database)}', 'pgoutput')",
    )
    async with ingesting(database, s2, options(database, "t")) as running:
        failure = await running.failure()
    assert isinstance(failure, SourceUnusableError)
    assert "name another --slot" in failure.message


def rows_of(progress: IngestProgress) -> int:
    return sum(table.rows_copied for table in progress.tables.values())


async def test_an_interrupted_copy_resumes_after_its_last_row(database: str, s2: S2) -> None:
    execute(
        database,
        'CREATE TABLE t (a text COLLATE "C", b int, c text, PRIMARY KEY (a, b))',
        "INSERT INTO t SELECT chr(97 + n % 26), n, repeat('x', 300) FROM generate_series(1, 20000) n",
    )
    chosen = options(database, "t")
    async with ingesting(database, s2, chosen) as running:
        await running.until(lambda progress: rows_of(progress) >= 2000)
    execute(database, "UPDATE t SET c = 'new' WHERE b % 7 = 0", "DELETE FROM t WHERE b % 11 = 0",
            "UPDATE t SET a = 'A' WHERE b % 13 = 0")  # fmt: skip
    async with ingesting(database, s2, chosen) as running:
        await running.followed()
        resumed = running.ingest.progress.tables["public.t"].copy_resumed_at
        execute(database, "INSERT INTO t VALUES ('~', 1, 'end')")
        async with following(stream(s2, "public.t"), ["a", "b"]) as until:
            rebuilt = await until(lambda table: ("~", 1) in table.rows)
    assert resumed >= 2000
    assert rebuilt.table("a", "b", "c") == execute(database, "SELECT * FROM t ORDER BY a, b")


async def test_a_quiet_table_does_not_hold_the_log(database: str, s2: S2) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE other (id int)")
    chosen = replace(options(database, "t"), heartbeat=0.2)
    async with ingesting(database, s2, chosen) as running:
        await running.followed()
        execute(database, "INSERT INTO other SELECT generate_series(1, 1000)")
        ((target,),) = execute(database, "SELECT pg_current_wal_lsn() - '0/0'")
        await running.until(lambda progress: parse_lsn(progress.confirmed) >= target)


async def test_a_row_that_no_record_holds_is_named(database: str, s2: S2) -> None:
    execute(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, a text)",
        "INSERT INTO t VALUES (7, repeat('x', 1200000))",
    )
    async with ingesting(database, s2, options(database, "t")) as running:
        failure = await running.failure()
    assert isinstance(failure, RowTooLargeError)
    assert 'row {"id":7} of table public.t' in failure.message


async def test_a_second_ingester_fences_the_first() -> None:
    client = EncodedMemoryStream()
    first, second = TableStream(client, "one"), TableStream(client, "two")
    await first.take()
    await first.append([Record(b"{}", change_headers("0/1", 4))])
    await second.take()
    assert second.state == Position("0/1", 4)
    with pytest.raises(ConflictError, match="another ingester"):
        await first.append([Record(b"{}", change_headers("0/1", 5))])
    await second.append([Record(b"{}", change_headers("0/1", 5))])


async def test_the_last_of_large_records_says_where_the_source_was_left(s2: S2) -> None:
    client = await BasinStreams(s2.basin(BASIN)).ensure("large")
    first, second = TableStream(client, "one"), TableStream(client, "two")
    await first.take()
    await first.append([Record(b"x" * 300_000, change_headers("0/1", n)) for n in range(12)])
    await second.take()
    assert second.state == Position("0/1", 11)
    await second.append([Record(b"{}", change_headers("0/1", 12))])


async def test_a_stream_with_records_of_others_is_refused() -> None:
    client = EncodedMemoryStream("orders")
    await client.append([Record(b"hello")])
    with pytest.raises(InvalidError, match="record 0 of stream 'orders'"):
        await TableStream(client, "one").take()


@pytest.mark.parametrize("tables", [1, 2000])
async def test_notes_of_many_tables_are_found_again(tables: int) -> None:
    client, system = EncodedMemoryStream(), System("7", 1, {})
    columns = tuple(Column(f"column {n}", 23, -1, True, "integer") for n in range(50))
    stream = TableStream(client, "one")
    await stream.take()
    control = Control(stream, system, "slot", "publication")
    await control.note_columns(
        *(Table("public", f"t{n}", columns, ("column 0",), 0, 0) for n in range(tables))
    )
    again = TableStream(client, "two")
    await again.take()
    assert Control(again, system, "slot", "publication").tables == control.tables


async def test_notes_that_no_record_holds_are_refused() -> None:
    stream = TableStream(EncodedMemoryStream(), "one")
    await stream.take()
    control = Control(stream, System("7", 1, {}), "slot", "publication")
    columns = tuple(Column(token_hex(32), 23, -1, True, "integer") for _ in range(30_000))
    with pytest.raises(SourceUnusableError, match="name fewer tables"):
        await control.note_columns(Table("public", "t", columns, (), 0, 0))


READER = (
    "DROP ROLE IF EXISTS reader",
    "CREATE ROLE reader LOGIN REPLICATION",
    "GRANT SELECT ON t TO reader",
)


async def test_a_role_that_may_only_read_is_enough(database: str, s2: S2) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)", *READER)
    reader = database.replace("postgres:@", "reader:@")
    chosen = options(database, "t")
    async with ingesting(reader, s2, chosen) as running:
        failure = await running.failure()
    assert isinstance(failure, SourceUnusableError)
    statement = failure.message.rpartition("of the tables run ")[2]
    assert statement.startswith('CREATE PUBLICATION "streamfold" FOR TABLE "public"."t"')
    execute(database, statement)
    async with ingesting(reader, s2, chosen) as running:
        await running.followed()
        execute(database, "INSERT INTO t VALUES (2)")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            await until(lambda table: (2,) in table.rows)
    drop_slot(database, chosen.slot)
    execute(database, "DROP OWNED BY reader", "DROP ROLE reader")


async def test_columns_that_are_not_published_are_left_out(database: str, s2: S2) -> None:
    execute(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, secret text, "
        "twice int GENERATED ALWAYS AS (id * 2) STORED)",
        "INSERT INTO t VALUES (1, 'x')",
        "CREATE PUBLICATION streamfold FOR TABLE t (id) WITH (publish_via_partition_root)",
    )
    async with ingesting(database, s2, options(database, "t")) as running:
        await running.followed()
        execute(database, "INSERT INTO t VALUES (2, 'y')")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: (2,) in table.rows)
    assert rebuilt.rows == {(1,): {"id": 1}, (2,): {"id": 2}}


async def test_a_publication_that_leaves_out_rows_or_changes_is_refused(
    database: str, s2: S2
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    for publication, advice in {
        "FOR TABLE t WHERE (id > 5) WITH (publish_via_partition_root)": "without WHERE",
        "FOR TABLE t WITH (publish = 'insert', publish_via_partition_root)": "SET (publish =",
    }.items():
        execute(database, f"CREATE PUBLICATION streamfold {publication}")
        async with ingesting(database, s2, options(database, "t")) as running:
            failure = await running.failure()
        assert isinstance(failure, SourceUnusableError)
        assert advice in failure.message
        execute(database, "DROP PUBLICATION streamfold")


@pytest.mark.parametrize("running_meanwhile", [True, False])
async def test_a_table_that_left_the_publication_for_a_while_is_copied_again(
    database: str, s2: S2, running_meanwhile: bool
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    chosen = replace(options(database, "t"), heartbeat=0.2)
    away = (
        "ALTER PUBLICATION streamfold DROP TABLE t",
        "INSERT INTO t VALUES (2)",
        "ALTER PUBLICATION streamfold ADD TABLE t",
    )
    async with ingesting(database, s2, chosen) as running:
        await running.followed()
        if running_meanwhile:
            execute(database, *away)
            await running.until(lambda progress: progress.sessions >= 2)
    if not running_meanwhile:
        execute(database, *away)
    async with ingesting(database, s2, chosen) as running:
        await running.followed()
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: (2,) in table.rows)
    assert rebuilt.table("id") == [(1,), (2,)]


async def test_a_table_that_was_not_followed_for_a_while_is_copied_again(
    database: str, s2: S2
) -> None:
    execute(database, *(f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in ("a", "b")))
    both, one = options(database, "a", "b"), replace(options(database, "a"), heartbeat=0.2)
    async with ingesting(database, s2, both) as running:
        await running.followed()
    async with ingesting(database, s2, one) as running:
        await running.followed()
        execute(database, "INSERT INTO b VALUES (1)", "INSERT INTO a VALUES (1)")
        async with following(stream(s2, "public.a"), ["id"]) as until:
            await until(lambda table: (1,) in table.rows)
    async with ingesting(database, s2, both) as running:
        await running.followed()
        async with following(stream(s2, "public.b"), ["id"]) as until:
            await until(lambda table: (1,) in table.rows)


async def test_an_ingester_survives_a_restart_of_postgres(s2: S2) -> None:
    with temporary_postgres() as uri:
        execute(uri, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
        async with ingesting(uri, s2, options(uri, "t")) as running:
            await running.followed()
            await asyncio.to_thread(restart, uri)
            execute(uri, "INSERT INTO t VALUES (2)")
            async with following(stream(s2, "public.t"), ["id"]) as until:
                rebuilt = await until(lambda table: (2,) in table.rows)
            assert running.ingest.progress.sessions > 1
    assert len(rebuilt.positions) == 1
