"""Settings of roles, databases and environments, which change nothing in the streams."""

from __future__ import annotations

import pytest
from s2_sdk import S2

from streamfold.ingest.errors import SourceUnusableError
from streamfold.ingest.postgres.connection import Database
from streamfold.ingest.postgres.ingester import IngestOptions
from tests.ingest.ingesting import ingesting, stream
from tests.ingest.postgres import database_name, execute, following


async def test_the_environment_and_the_database_do_not_change_how_values_look(
    database: str, s2: S2, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, a timestamptz, b timestamptz[], c text, d bytea)",
        "INSERT INTO t VALUES (1, '2026-07-01T12:00Z', '{2026-07-01T12:00Z}', '€', 'x')",
        f"ALTER DATABASE {database_name(database)} SET bytea_output = escape",
    )
    options = IngestOptions(("t",), slot=database_name(database))
    with monkeypatch.context() as environment:
        for name, value in {"TZ": "Europe/Berlin", "DATESTYLE": "SQL, DMY"}.items():
            environment.setenv(f"PG{name}", value)
        async with ingesting(f"{database}&client_encoding=LATIN1", s2, options) as running:
            await running.followed()
            execute(database, "INSERT INTO t SELECT 2, a, b, c, d FROM t")
            async with following(stream(s2, "public.t"), ["id"]) as until:
                rebuilt = await until(lambda table: (2,) in table.rows)
    wanted = ("2026-07-01T12:00:00Z", '{"2026-07-01 12:00:00+00"}', "€", "eA==")
    assert rebuilt.table("id", "a", "b", "c", "d") == [(1, *wanted), (2, *wanted)]


@pytest.mark.parametrize("replication", [True, False])
def test_limits_of_the_role_do_not_end_copies(database: str, replication: bool) -> None:
    limits = ("statement", "transaction", "idle_session", "idle_in_transaction_session")
    name = database_name(database)
    for limit in limits:
        execute(database, f"ALTER DATABASE {name} SET {limit}_timeout = '1min'")
    opened = Database(database)
    connection = opened.connect_replication() if replication else opened.connect()
    try:
        with connection.cursor() as cursor:
            for limit in limits:
                cursor.execute(f"SHOW {limit}_timeout")
                assert cursor.fetchone() == ("0",), limit
    finally:
        connection.close()


async def test_a_policy_that_hides_rows_is_an_error(database: str, s2: S2) -> None:
    execute(
        database,
        "CREATE TABLE t (id int PRIMARY KEY)",
        "INSERT INTO t VALUES (1), (2)",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "DROP ROLE IF EXISTS half",
        "CREATE ROLE half LOGIN REPLICATION",
        "GRANT SELECT ON t TO half",
        "CREATE POLICY half ON t TO half USING (id = 1)",
        "CREATE PUBLICATION streamfold FOR TABLE t WITH (publish_via_partition_root = true)",
    )
    options = IngestOptions(("t",), slot=database_name(database))
    async with ingesting(database.replace("postgres:@", "half:@"), s2, options) as running:
        failure = await running.failure()
    assert isinstance(failure, SourceUnusableError)
    assert 'row-level security policy for table "t"' in failure.message
    execute(database, "DROP OWNED BY half", "DROP ROLE half")
