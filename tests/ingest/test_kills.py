"""`kill -9` of each part at random points under load: the rebuilt table equals the table."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import psycopg2
from s2_sdk import S2

from tests.ingest.conftest import BASIN
from tests.ingest.ingesting import stream
from tests.ingest.postgres import database_name, execute, following, restart, temporary_postgres
from tests.ingest.processes import Serving, end, kill, line_with, start
from tests.proving import PROVING
from tests.sdk import sdk_client

ROUNDS = 20 if PROVING else 3
ROWS = 5_000
#: Copies within which a part is killed, and rows of their table: for several appends.
COPIES = 20 if PROVING else 2
COPIED = 20_000
END = 10_000_000


class Load(threading.Thread):
    """Transactions of inserts, updates, deletes, key changes and, now and then, a truncate."""

    def __init__(self, uri: str, seed: int) -> None:
        super().__init__()
        self._uri = uri
        self._random = random.Random(seed)
        self._stopping = threading.Event()
        #: Committed transactions that have changed rows.
        self.transactions = 0

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._change_until_stopped()
            except psycopg2.OperationalError:
                self._stopping.wait(0.1)  # the server was killed

    def _change_until_stopped(self) -> None:
        connection = psycopg2.connect(self._uri)
        with closing(connection), connection.cursor() as cursor:
            while not self._stopping.is_set():
                changed = [self._change(cursor) for _ in range(self._random.randint(1, 20))]
                connection.commit()
                self.transactions += any(changed)

    def _change(self, cursor: psycopg2.extensions.cursor) -> bool:
        """Run a statement; returns whether it has changed a row."""
        some, other = self._random.randrange(ROWS), self._random.randrange(ROWS * 2)
        match self._random.randrange(100):
            case 0 if self.transactions % 97 == 5:
                cursor.execute("TRUNCATE t")
            case n if n < 40:
                cursor.execute(
                    "INSERT INTO t VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET a = t.a || 'x'",
                    (other, f"v{n}"),
                )
            case n if n < 70:
                cursor.execute("UPDATE t SET a = %s WHERE id = %s", (f"u{n}", some))
            case n if n < 85:
                cursor.execute("DELETE FROM t WHERE id = %s", (some,))
            case _:
                cursor.execute(
                    "UPDATE t SET id = %s WHERE id = %s "
                    "AND NOT EXISTS (SELECT 1 FROM t WHERE id = %s)",
                    (other, some, other),
                )
        return bool(cursor.rowcount)

    def stop(self) -> None:
        self._stopping.set()
        self.join()


async def kill_in_rounds(arguments: Sequence[str], load: Load, pauses: random.Random) -> int:
    """Kill ingesters under load, the first within its copy, the others at any point.

    Returns how many transactions the copy may hold.
    """
    copied = 0
    load.start()
    try:
        for number in range(ROUNDS):
            process = await start(*arguments)
            await line_with(process, b"copying" if number == 0 else b"following")
            if number == 1:
                copied = load.transactions
            await asyncio.sleep(pauses.uniform(0, 0.1 if number == 0 else 1.5))
            await kill(process)
    finally:
        await asyncio.to_thread(load.stop)
    return copied


async def test_a_killed_ingester_loses_and_repeats_nothing(
    database: str, s2: S2, endpoint: str
) -> None:
    execute(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, a text)",
        f"INSERT INTO t SELECT n, 'first' FROM generate_series(0, {ROWS - 1}) n",
    )
    arguments = (
        *("ingest", "postgres", "--dsn", database, "--table", "t", "--basin", BASIN),
        *("--slot", database_name(database), "--endpoint", endpoint, "--json"),
    )
    load = Load(database, seed=7)
    copied = await kill_in_rounds(arguments, load, random.Random(7))
    execute(database, f"INSERT INTO t VALUES ({END}, 'end')")
    process = await start(*arguments)
    try:
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: (END,) in table.rows)
    finally:
        assert await end(process, signal.SIGHUP) == 0  # its terminal is closed
    assert rebuilt.table("id", "a") == execute(database, "SELECT id, a FROM t ORDER BY id")
    assert len(rebuilt.positions) == len(set(rebuilt.positions)) > load.transactions - copied


#: Puts a row into a second table for every change of the first, in the same transaction.
_NOTED = """
CREATE TABLE note (id bigserial PRIMARY KEY, of int);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
  $$ BEGIN INSERT INTO note (of) VALUES (coalesce(NEW.id, OLD.id)); RETURN NULL; END $$;
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION note()
"""


async def test_a_killed_ingester_of_one_stream_loses_and_repeats_nothing(
    database: str, s2: S2, endpoint: str
) -> None:
    execute(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, a text)",
        f"INSERT INTO t SELECT n, 'first' FROM generate_series(0, {ROWS - 1}) n",
        _NOTED,
    )
    arguments = (
        *("ingest", "postgres", "--dsn", database, "--table", "t", "--basin", BASIN),
        *("--table", "note", "--stream", "all"),
        *("--slot", database_name(database), "--endpoint", endpoint, "--json"),
    )
    load = Load(database, seed=13)
    copied = await kill_in_rounds(arguments, load, random.Random(13))
    execute(database, f"INSERT INTO t VALUES ({END}, 'end')")
    ((last,),) = execute(database, "SELECT max(id) FROM note")
    process = await start(*arguments)
    try:
        async with following(stream(s2, "all"), ["id"], "public.t") as until:
            rebuilt = await until(lambda table: (END,) in table.rows)
        async with following(stream(s2, "all"), ["id"], "public.note") as until:
            notes = await until(lambda table: (last,) in table.rows)
    finally:
        assert await end(process) == 0
    assert rebuilt.table("id", "a") == execute(database, "SELECT id, a FROM t ORDER BY id")
    assert notes.table("id", "of") == execute(database, "SELECT id, of FROM note ORDER BY id")
    assert len(rebuilt.positions) == len(set(rebuilt.positions)) > load.transactions - copied


async def test_killed_parts_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """Ingester, server and PostgreSQL are killed in turn, wherever they are."""
    chance, serving = random.Random(11), Serving(tmp_path)
    with temporary_postgres() as database:
        execute(
            database,
            "CREATE TABLE t (id int PRIMARY KEY, a text)",
            f"INSERT INTO t SELECT n, 'first' FROM generate_series(0, {ROWS - 1}) n",
        )
        arguments = (
            *("ingest", "postgres", "--dsn", database, "--table", "t", "--basin", BASIN),
            *("--endpoint", serving.endpoint, "--json"),
        )
        load = Load(database, seed=11)
        server, process = await serving.start(), await start(*arguments)
        # On a slow machine the first copy would otherwise hold most of the load's changes.
        await line_with(process, b"following")
        load.start()
        try:
            for number in range(ROUNDS):
                await asyncio.sleep(chance.uniform(0, 3.0))
                match number % 3:
                    case 0:
                        await kill(process)
                        process = await start(*arguments)
                    case 1:
                        await kill(server)
                        server = await serving.start()
                    case _:
                        await asyncio.to_thread(restart, database, signal.SIGKILL)
                assert process.returncode is None
        finally:
            await asyncio.to_thread(load.stop)
        execute(database, f"INSERT INTO t VALUES ({END}, 'end')")
        try:
            async with (
                sdk_client(serving.endpoint) as s2,
                following(stream(s2, "public.t"), ["id"]) as until,
            ):
                rebuilt = await until(lambda table: (END,) in table.rows)
        finally:
            assert await end(process) == 0
            await kill(server)
        assert rebuilt.table("id", "a") == execute(database, "SELECT id, a FROM t ORDER BY id")
        assert len(rebuilt.positions) == len(set(rebuilt.positions)) > load.transactions


async def test_parts_killed_within_the_first_copy_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """Server, PostgreSQL and ingester are killed in turn, each in a copy of its own under load.

    How many changes the copy holds, and how many follow it, depends on the machine. The second table
    has a row for each change of the first, so that equal tables prove that none is missing.
    """
    chance, serving = random.Random(19), Serving(tmp_path)
    with temporary_postgres() as database:
        execute(database, "CREATE TABLE t (id int PRIMARY KEY, a text)")
        fill = (
            f"INSERT INTO t SELECT n, repeat('x', 300) FROM generate_series(0, {COPIED - 1}) n "
            "ON CONFLICT DO NOTHING"
        )
        execute(database, fill, _NOTED)
        server = await serving.start()
        for number in range(COPIES):
            execute(database, fill)
            arguments = (
                *("ingest", "postgres", "--dsn", database, "--table", "t", "--table", "note"),
                *("--basin", BASIN, "--slot", f"s{number}", "--prefix", f"{number}/"),
                *("--publication", f"p{number}", "--endpoint", serving.endpoint, "--json"),
            )
            load = Load(database, seed=number)
            load.start()
            process = await start(*arguments)
            try:
                await line_with(process, b'public.t", "state": "copying')
                await asyncio.sleep(chance.uniform(0, 1.0))
                match number % 3:
                    case 0:
                        await kill(server)
                        server = await serving.start()
                    case 1:
                        await asyncio.to_thread(restart, database, signal.SIGKILL)
                    case _:
                        await kill(process)
                        process = await start(*arguments)
                await line_with(process, b'public.t", "state": "following')
            finally:
                await asyncio.to_thread(load.stop)
            execute(database, f"INSERT INTO t VALUES ({END + number}, 'end')")
            await equals_tables(serving.endpoint, database, f"{number}/")
            assert await end(process) == 0
        await kill(server)


async def equals_tables(endpoint: str, database: str, prefix: str) -> None:
    """Wait until the streams have all changes, and compare what they rebuild with the tables."""
    ((last,),) = execute(database, "SELECT max(id) FROM note")
    async with (
        sdk_client(endpoint) as s2,
        following(stream(s2, f"{prefix}public.t"), ["id"]) as until,
        following(stream(s2, f"{prefix}public.note"), ["id"]) as until_noted,
    ):
        ((end,),) = execute(database, "SELECT max(id) FROM t")
        rebuilt = await until(lambda table: (end,) in table.rows)
        notes = await until_noted(lambda table: (last,) in table.rows)
    assert rebuilt.table("id", "a") == execute(database, "SELECT id, a FROM t ORDER BY id")
    assert notes.table("id", "of") == execute(database, "SELECT id, of FROM note ORDER BY id")
    assert len(rebuilt.positions) == len(set(rebuilt.positions))
