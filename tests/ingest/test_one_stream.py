"""Several tables of a real PostgreSQL in one stream, in the order of commits."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import psycopg2
from s2_sdk import S2

from streamfold.ingest import SourceUnusableError
from streamfold.ingest.postgres.ingester import IngestOptions
from streamfold.ingest.postgres.pgoutput import parse_lsn
from streamfold.ingest.progress import IngestProgress
from tests.ingest.ingesting import ingesting, stream, wait_for_first
from tests.ingest.postgres import Rebuilt, database_name, execute, following

STREAM = "shop"
TABLES = (
    "CREATE TABLE orders (id int PRIMARY KEY, item text)",
    "CREATE TABLE items (id int PRIMARY KEY, name text)",
)
END = 1_000_000


def options(database: str, *tables: str) -> IngestOptions:
    return IngestOptions(tables, slot=database_name(database), one_stream=STREAM)


async def rebuilt_at(s2: S2, table: str, key: int) -> Rebuilt:
    """The table, once it has a row."""
    async with following(stream(s2, STREAM), ["id"], table) as until:
        return await until(lambda found: (key,) in found.rows)


def transactions(database: str, *groups: tuple[str, ...]) -> None:
    connection = psycopg2.connect(database)
    for group in groups:
        with connection, connection.cursor() as cursor:
            for statement in group:
                cursor.execute(statement)
    connection.close()


def rows_of(database: str, table: str) -> list[Any]:
    return execute(database, f"SELECT * FROM {table} ORDER BY id")


async def test_changes_of_all_tables_are_in_the_order_of_commits(database: str, s2: S2) -> None:
    execute(database, *TABLES, "INSERT INTO orders VALUES (1, 'a')", "INSERT INTO items VALUES (1)")
    async with ingesting(database, s2, options(database, "orders", "items")) as running:
        await running.followed()
        transactions(
            database,
            ("INSERT INTO orders VALUES (2)", "INSERT INTO items VALUES (2)", "DELETE FROM orders"),
            ("TRUNCATE orders, items",),
            ("INSERT INTO items VALUES (3)", "INSERT INTO orders VALUES (3)"),
            (f"INSERT INTO orders VALUES ({END})",),
        )
        found = await rebuilt_at(s2, "public.orders", END)
    changes = [body for body in found.bodies if "txn" in body and body["op"] != "e"]
    names = [(body["op"], body["table"]) for body in changes]
    orders, items = "public.orders", "public.items"
    assert names[:5] == [("c", orders), ("c", items), ("d", orders), ("d", orders), ("t", orders)]
    assert names[5:] == [("t", items), ("c", items), ("c", orders), ("c", orders)]
    ends = [number for number, body in enumerate(changes) if body["txn"].get("last")]
    assert ends == [3, 5, 7, 8]
    lsns = [parse_lsn(body["txn"]["id"]) for body in changes]
    assert lsns == sorted(lsns)
    assert len(set(found.positions)) == len(found.positions)
    assert [body["table"] for body in found.bodies if body["op"] == "r"] == [orders, items]


async def test_a_table_that_comes_later_is_copied_between_the_changes_of_others(
    database: str, s2: S2
) -> None:
    execute(
        database,
        *TABLES,
        "INSERT INTO items SELECT n, repeat('x', 300) FROM generate_series(1, 20000) n",
    )
    async with ingesting(database, s2, options(database, "orders")) as running:
        await running.followed()
        execute(database, "INSERT INTO orders VALUES (1, 'a')", "INSERT INTO orders VALUES (2)")
        await rebuilt_at(s2, "public.orders", 2)
    chosen = options(database, "orders", "items")
    async with ingesting(database, s2, chosen) as running:
        await running.until(lambda progress: copied(progress) >= 2000)
    execute(database, "UPDATE items SET name = 'new' WHERE id % 7 = 0", "DELETE FROM orders")
    async with ingesting(database, s2, chosen) as running:
        await running.followed()
        assert running.ingest.progress.tables["public.items"].copy_resumed_at >= 2000
        execute(database, f"INSERT INTO items VALUES ({END})")
        found = await rebuilt_at(s2, "public.items", END)
    assert found.table("id", "name")[:-1] == rows_of(database, "items")[:-1]
    ((began, ended),) = found.snapshots
    assert parse_lsn(began) < parse_lsn(ended)
    # Changes before and after the copy are there once, although the copy hid the last of them.
    changes = [body["op"] for body in found.bodies if body.get("table") == "public.orders"]
    assert changes == ["t", "s", "e", "c", "c", "d", "d"]
    assert len(set(found.positions)) == len(found.positions)


def copied(progress: IngestProgress) -> int:
    return progress.tables["public.items"].rows_copied if progress.tables else 0


async def test_an_ingester_of_one_stream_that_stops_anywhere_loses_and_repeats_nothing(
    database: str, s2: S2
) -> None:
    execute(database, *TABLES, "INSERT INTO items SELECT n, 'x' FROM generate_series(1, 3000) n")
    rng = random.Random(11)
    chosen = options(database, "orders", "items")
    for number in range(6):
        async with ingesting(database, s2, chosen) as running:
            if number:
                await running.followed()
            work = asyncio.create_task(asyncio.to_thread(change, database, number))
            await asyncio.sleep(rng.uniform(0, 0.3))
        await work
    execute(database, f"INSERT INTO items VALUES ({END})", f"INSERT INTO orders VALUES ({END})")
    async with ingesting(database, s2, chosen):
        orders = await rebuilt_at(s2, "public.orders", END)
    items = await rebuilt_at(s2, "public.items", END)
    assert orders.table("id", "item") == rows_of(database, "orders")
    assert items.table("id", "name") == rows_of(database, "items")
    assert len(set(orders.positions)) == len(orders.positions)


def change(database: str, number: int) -> None:
    """Transactions of both tables, one of them large."""
    first = number * 10_000
    transactions(
        database,
        *(
            (
                f"INSERT INTO orders VALUES ({first + n}, 'o{n}')",
                f"UPDATE items SET name = name || 'y' WHERE id % 10 = {n % 10}",
            )
            for n in range(20)
        ),
        (
            f"DELETE FROM items WHERE id % 13 = {number}",
            "UPDATE orders SET id = -id - 1 WHERE id >= 0",
        ),
    )


async def test_a_changed_table_is_copied_again_and_the_others_continue(
    database: str, s2: S2
) -> None:
    execute(database, *TABLES, "INSERT INTO orders VALUES (1, 'a')", "INSERT INTO items VALUES (1)")
    async with ingesting(database, s2, options(database, "orders", "items")) as running:
        await running.followed()
        execute(
            database,
            "ALTER TABLE orders RENAME COLUMN item TO thing",
            "INSERT INTO items VALUES (2, 'b')",
            "INSERT INTO orders VALUES (2, 'b')",
        )
        await running.until(lambda progress: progress.sessions > 1)
        await running.followed()
        execute(database, f"INSERT INTO orders VALUES ({END}, 'c')")
        found = await rebuilt_at(s2, "public.orders", END)
        items = await rebuilt_at(s2, "public.items", 2)
    assert found.table("id", "thing") == rows_of(database, "orders")
    assert items.table("id") == [(1,), (2,)]
    copied_rows = [body["table"] for body in found.bodies if body["op"] == "r"]
    assert copied_rows.count("public.items") == 1


async def test_tables_are_copied_again_into_one_stream_after_the_slot_was_lost(
    database: str, s2: S2
) -> None:
    execute(database, *TABLES, "INSERT INTO orders VALUES (1, 'a')", "INSERT INTO items VALUES (1)")
    chosen = options(database, "orders", "items")
    async with ingesting(database, s2, chosen) as running:
        await running.followed()
    execute(database, "DELETE FROM items", "INSERT INTO items VALUES (5)")
    async with ingesting(database, s2, replace(chosen, recopy=True)) as running:
        await running.followed()
        execute(database, f"INSERT INTO items VALUES ({END})")
        found = await rebuilt_at(s2, "public.items", END)
    assert found.table("id") == [(5,), (END,)]


async def test_one_stream_is_trimmed_as_its_readers_allow_and_continues_after_a_restart(
    database: str, s2: S2
) -> None:
    execute(database, *TABLES, "INSERT INTO items SELECT n, 'x' FROM generate_series(1, 50) n")
    chosen = replace(options(database, "orders", "items"), heartbeat=0.1)
    points = {STREAM: 40}
    async with ingesting(database, s2, chosen, trim_points=points) as running:
        await running.followed()
        await wait_for_first(stream(s2, STREAM), lambda first: first.seq_num == 40)
        points[STREAM] = 1 << 40
        execute(database, "INSERT INTO orders VALUES (1, 'a')")
        await wait_for_first(stream(s2, STREAM), lambda first: b'"op":"c"' in first.body)
    execute(database, "INSERT INTO items VALUES (60, 'y')", "INSERT INTO orders VALUES (2, 'b')")
    async with ingesting(database, s2, chosen):
        found = await rebuilt_at(s2, "public.orders", 2)
    # Neither table is copied again, and no change is there twice.
    assert [body["op"] for body in found.bodies] == ["c", "c", "c"]
    assert len(set(found.positions)) == 3


async def test_a_slot_keeps_to_the_streams_that_it_fills(database: str, s2: S2) -> None:
    execute(database, *TABLES)
    chosen = options(database, "orders")
    async with ingesting(database, s2, chosen) as running:
        await running.followed()
    for other in ("", "another"):
        async with ingesting(database, s2, replace(chosen, one_stream=other)) as running:
            failure = await running.failure()
        assert isinstance(failure, SourceUnusableError)
        assert "fills the stream 'shop' with all tables" in failure.message
