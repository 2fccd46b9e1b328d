"""Every built-in type, from a real server to the values that a reader gets."""

from __future__ import annotations

from itertools import count

import pytest
from s2_sdk import S2

from streamfold.ingest import SourceUnusableError
from streamfold.ingest.postgres.ingester import IngestOptions
from streamfold.snapshotter.decoding import EnvelopeDecoder, parse_ddl
from streamfold.testing.change_decoder_kit import records
from tests.ingest.ingesting import ingesting, stream
from tests.ingest.postgres import database_name, execute, following

UUID = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
#: Type, value in SQL, value in JSON, declared type.
VALUES = [
    ("smallint", "-32768", -32768, "SMALLINT"),
    ("integer", "2147483647", 2147483647, "INT"),
    ("bigint", "-9223372036854775808", -9223372036854775808, "BIGINT"),
    ("real", "0.1", 0.1, "REAL"),
    ("double precision", "3", 3.0, "DOUBLE"),
    ("double precision", "1e-300", 1e-300, "DOUBLE"),
    ("double precision", "'NaN'", "NaN", "DOUBLE"),
    ("double precision", "'-Infinity'", "-Infinity", "DOUBLE"),
    ("boolean", "true", True, "BOOLEAN"),
    ("boolean", "false", False, "BOOLEAN"),
    ("numeric(10,2)", "12345678.9", "12345678.90", "DECIMAL(10,2)"),
    ("numeric", "1e-20", "0.00000000000000000001", "STRING"),
    ("numeric", "'NaN'", "NaN", "STRING"),
    ("numeric(50,3)", "1", "1.000", "STRING"),
    ("numeric(3,5)", "0.00123", "0.00123", "STRING"),
    ("numeric(5,-2)", "12345", "12300", "STRING"),
    ("text", "E'\\u00e9 \"q\" \\\\ \\t \\n \\x01'", 'é "q" \\ \t \n \x01', "STRING"),
    ("text", "E'\\U0001f600'", "\U0001f600", "STRING"),
    ("text", "''", "", "STRING"),
    ("text", "'\\N'", "\\N", "STRING"),
    ("varchar(9)", "'a'", "a", "STRING"),
    ("char(3)", "'a'", "a  ", "STRING"),
    ("bytea", "'\\x00ff10'", "AP8Q", "BINARY"),
    ("bytea", "''", "", "BINARY"),
    ("date", "'2026-01-31'", "2026-01-31", "DATE"),
    ("date", "'infinity'", "2147483647", "DATE"),
    ("date", "'0044-03-15 BC'", "-735160", "DATE"),
    ("date", "'10000-01-01'", "2932897", "DATE"),
    ("timestamp", "'2026-01-31 12:00:00.000001'", "2026-01-31T12:00:00.000001", "TIMESTAMP_NTZ"),
    ("timestamp", "'-infinity'", "-9223372036854775808", "TIMESTAMP_NTZ"),
    ("timestamptz", "'2026-01-31 12:00:00+01'", "2026-01-31T11:00:00Z", "TIMESTAMP"),
    ("timestamptz", "'infinity'", "9223372036854775807", "TIMESTAMP"),
    ("timestamptz", "'10000-01-01 00:00:00.5+00'", "253402300800500000", "TIMESTAMP"),
    ("timestamptz", "'0001-12-31 23:59:59+00 BC'", "-62135596801000000", "TIMESTAMP"),
    ("time", "'24:00:00'", "24:00:00", "STRING"),
    ("timetz", "'12:00:00+02'", "12:00:00+02", "STRING"),
    ("interval", "'1 year -2 days 03:04:05.6'", "1 year -2 days +03:04:05.6", "STRING"),
    ("uuid", f"'{UUID}'", UUID, "STRING"),
    ("json", "'{\"b\": 1, \"a\":  [1.0]}'", '{"b": 1, "a":  [1.0]}', "STRING"),
    ("jsonb", "'{\"b\": 1, \"a\":  1.00}'", '{"a": 1.00, "b": 1}', "STRING"),
    ("integer[]", "'[0:1][1:2]={{1,2},{3,NULL}}'", "[0:1][1:2]={{1,2},{3,NULL}}", "STRING"),
    ("text[]", "ARRAY['a,b', NULL, '\"']", '{"a,b",NULL,"\\""}', "STRING"),
    ("mood", "'happy'", "happy", "STRING"),
    ("price", "1.5", "1.50", "DECIMAL(6,2)"),
    ("int4range", "'[1,5)'", "[1,5)", "STRING"),
    ("inet", "'10.0.0.1/8'", "10.0.0.1/8", "STRING"),
    ("cidr", "'10.0.0.0/8'", "10.0.0.0/8", "STRING"),
    ("macaddr", "'08:00:2b:01:02:03'", "08:00:2b:01:02:03", "STRING"),
    ("bit(3)", "B'101'", "101", "STRING"),
    ("point", "'(1,2)'", "(1,2)", "STRING"),
    ("money", "'-1234.5'", "-$1,234.50", "STRING"),
    ("oid", "4294967295", 4294967295, "BIGINT"),
    ("pg_lsn", "'16/B374D848'", "16/B374D848", "STRING"),
    ("tsvector", "'b a'::tsvector", "'a' 'b'", "STRING"),
    ("text", "NULL", None, "STRING"),
]  # fmt: skip


async def test_every_type_is_exact_in_copy_and_changes_and_for_the_snapshotter(
    database: str, s2: S2
) -> None:
    columns = ", ".join(f"c{n} {kind}" for n, (kind, *_) in enumerate(VALUES))
    values = ", ".join(value for _, value, *_ in VALUES)
    execute(
        database,
        f"ALTER DATABASE {database_name(database)} SET timezone = 'Asia/Tokyo'",
        f"ALTER DATABASE {database_name(database)} SET datestyle = 'German'",
        f"ALTER DATABASE {database_name(database)} SET bytea_output = 'escape'",
        "CREATE TYPE mood AS ENUM ('sad', 'happy')",
        "CREATE DOMAIN base AS numeric(6, 2)",
        "CREATE DOMAIN price AS base CHECK (VALUE > 0)",
        f"CREATE TABLE t (id int PRIMARY KEY, {columns}, "
        "twice int GENERATED ALWAYS AS (id * 2) STORED, number int GENERATED ALWAYS AS IDENTITY)",
        f"INSERT INTO t VALUES (1, {values})",
    )
    options = IngestOptions(("t",), slot=database_name(database))
    async with ingesting(database, s2, options) as running:
        await running.followed()
        execute(database, f"INSERT INTO t VALUES (2, {values})")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: (2,) in table.rows)
    wanted = {f"c{n}": value for n, (_, _, value, _) in enumerate(VALUES)}
    assert rebuilt.rows[(1,)] == {"id": 1, **wanted, "twice": 2, "number": 1}
    assert rebuilt.rows[(2,)] == {"id": 2, **wanted, "twice": 4, "number": 2}
    decoded = EnvelopeDecoder(("id",)).decode(records(rebuilt.raw), None)
    assert decoded.dead_letters.num_rows == 0
    assert decoded.schema is not None
    assert decoded.changes.num_rows == 2
    wanted_types = {f"c{n}": kind for n, (*_, kind) in enumerate(VALUES)}
    ddl = ", ".join(f"{name} {kind}" for name, kind in wanted_types.items())
    typed = {field.name: field.type for field in parse_ddl(ddl).arrow}
    assert {f.name: f.type for f in decoded.schema.arrow if f.name in typed} == typed
    (declared,) = [body["columns"] for body in rebuilt.bodies if body["op"] == "s"]
    types = {column["name"]: column["type"] for column in declared}
    assert types == {
        "id": "INT",
        **wanted_types,
        "twice": "INT",
        "number": "INT",
    }


def encoded_database(uri: str, encoding: str) -> str:
    """A database whose texts have another encoding, with table t."""
    name = f"{encoding.lower()}_{next(NUMBERS)}"
    encoded = f"ENCODING '{encoding}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
    execute(uri, f"CREATE DATABASE {name} {encoded}")
    made = uri.replace("/postgres?", f"/{name}?")
    execute(made, "CREATE TABLE t (id int PRIMARY KEY, a text)")
    return made


NUMBERS = count()
E_ACUTE = "convert_from('\\xe9', '{}')"


async def test_texts_of_a_latin1_database_are_unicode(postgres: str, s2: S2) -> None:
    database = encoded_database(postgres, "LATIN1")
    execute(database, f"INSERT INTO t VALUES (1, {E_ACUTE.format('LATIN1')})")
    async with ingesting(database, s2, IngestOptions(("t",), slot="latin1")) as running:
        await running.followed()
        execute(database, "INSERT INTO t SELECT 2, a || a FROM t")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: (2,) in table.rows)
    assert rebuilt.table("id", "a") == [(1, "é"), (2, "éé")]


@pytest.mark.parametrize("copied", [True, False], ids=["in the copy", "in a change"])
async def test_bytes_that_are_not_unicode_in_an_sql_ascii_database_are_a_clear_error(
    postgres: str, s2: S2, copied: bool
) -> None:
    database = encoded_database(postgres, "SQL_ASCII")
    slot, wrong = f"sql_ascii_{copied}".lower(), E_ACUTE.format("SQL_ASCII")
    insert = f"INSERT INTO t VALUES (1, {wrong})"
    execute(database, insert if copied else "INSERT INTO t VALUES (1, 'plain')")
    async with ingesting(database, s2, IngestOptions(("t",), slot=slot)) as running:
        if not copied:
            await running.followed()
            execute(database, insert.replace("(1", "(2"))
        failure = await running.failure()
    assert isinstance(failure, SourceUnusableError)
    assert "0xe9" in failure.message
    assert "correct the text" in failure.message
