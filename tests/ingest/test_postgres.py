"""Tables of a real PostgreSQL, through a real server, rebuilt from their streams."""

from __future__ import annotations

import asyncio
from functools import partial

from s2_sdk import S2

from streamfold.ingest.postgres.ingester import IngestOptions
from streamfold.model.records import trim_record
from tests.ingest.conftest import BASIN
from tests.ingest.ingesting import ingesting, stream
from tests.ingest.postgres import PATIENCE, Rebuilt, database_name, execute, following


def slot(database: str, *tables: str) -> IngestOptions:
    """Slots belong to the server, so that each database needs a name of its own."""
    return IngestOptions(tables, slot=database_name(database))


def has_row(number: int, table: Rebuilt) -> bool:
    return (number,) in table.rows


ORDERS = "CREATE TABLE orders (id int PRIMARY KEY, item text, price numeric(10, 2))"


async def test_a_table_is_copied_and_its_changes_follow(database: str, s2: S2) -> None:
    execute(
        database,
        ORDERS,
        r"INSERT INTO orders SELECT n, E'tab\t back\\ line\n ' || n, n / 4.0 "
        "FROM generate_series(1, 2500) n",
    )
    async with ingesting(database, s2, slot(database, "orders")) as running:
        await running.followed()
        execute(
            database,
            "INSERT INTO orders VALUES (5000, NULL, 1)",
            "UPDATE orders SET item = 'new' WHERE id <= 10",
            "DELETE FROM orders WHERE id BETWEEN 11 AND 20",
            "UPDATE orders SET id = -1 WHERE id = 30",
            "INSERT INTO orders VALUES (6000, 'last', 2)",
        )
        async with following(stream(s2, "public.orders"), ["id"]) as until:
            rebuilt = await until(lambda table: (6000,) in table.rows)
    rows = execute(database, "SELECT id, item, price::text FROM orders ORDER BY id")
    assert sorted(rebuilt.rows) == [(row[0],) for row in rows]
    assert [(r["id"], r["item"], r["price"]) for _, r in sorted(rebuilt.rows.items())] == rows


async def test_a_restarted_ingester_continues_where_the_stream_ends(database: str, s2: S2) -> None:
    execute(database, ORDERS, "INSERT INTO orders VALUES (1, 'a', 1)")
    for number in range(2, 5):
        async with ingesting(database, s2, slot(database, "orders")) as running:
            await running.followed()
            execute(database, f"INSERT INTO orders VALUES ({number}, 'a', 1)")
            async with following(stream(s2, "public.orders"), ["id"]) as until:
                await until(partial(has_row, number))
        execute(database, f"UPDATE orders SET item = item || 'b' WHERE id < {number}")
    async with (
        ingesting(database, s2, slot(database, "orders")),
        following(stream(s2, "public.orders"), ["id"]) as until,
    ):
        execute(database, "INSERT INTO orders VALUES (9, 'z', 1)")
        rebuilt = await until(lambda table: (9,) in table.rows)
    assert rebuilt.table("id", "item") == [(1, "abbb"), (2, "abb"), (3, "ab"), (4, "a"), (9, "z")]
    assert len(rebuilt.positions) == len(set(rebuilt.positions)) == 4 + 6


async def test_a_stream_whose_records_expired_is_filled_again_without_rows_that_are_gone(
    database: str, s2: S2
) -> None:
    execute(database, ORDERS, "INSERT INTO orders VALUES (1, 'a', 1), (2, 'b', 1)")
    orders = stream(s2, "public.orders")
    async with ingesting(database, s2, slot(database, "orders")) as running:
        await running.followed()
    execute(database, "DELETE FROM orders WHERE id = 2", "INSERT INTO orders VALUES (3, 'c', 1)")
    async with following(orders, ["id"]) as until:
        await until(partial(has_row, 2))
        tail = await orders.check_tail()
        await orders.append([trim_record(tail.seq_num)])
        async with asyncio.timeout(PATIENCE):
            while (await orders.peek(0, 1000))[0].seq_num < tail.seq_num:  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # nothing reports that a trim took effect
        async with ingesting(database, s2, slot(database, "orders")) as running:
            await running.followed()
            rebuilt = await until(partial(has_row, 3))
    assert sorted(rebuilt.rows) == [(1,), (3,)]


async def test_streams_are_created_to_be_kept(database: str, s2: S2) -> None:
    execute(database, ORDERS, "INSERT INTO orders VALUES (1, 'a', 1)")
    chosen = slot(database, "orders")
    async with ingesting(database, s2, chosen) as running:
        await running.followed()
    for name in ("public.orders", f"_ingest/{chosen.slot}"):
        config = await s2.basin(BASIN).get_stream_config(name)
        assert config.retention_policy == "infinite"
