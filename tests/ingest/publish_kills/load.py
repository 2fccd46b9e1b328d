"""The load: two tables, and writers that change them at a steady rate."""

from __future__ import annotations

import random
import threading
import time
from contextlib import closing, suppress
from typing import Final

import psycopg2
from psycopg2.errors import DeadlockDetected, UniqueViolation

#: Writers, transactions of each per second, and the range of their keys.
WRITERS, RATE, KEYS = 3, 20, 3000
#: Memos are stored out of line, so that updates of other columns reach the stream without them.
SCHEMA: Final = (
    "CREATE TABLE accounts (id int PRIMARY KEY, branch smallint, balance numeric(14, 2), "
    "score double precision, active boolean, opened date, changed timestamptz, touched bigint, "
    "owner text, details jsonb, memo text)",
    "ALTER TABLE accounts ALTER memo SET STORAGE EXTERNAL",
    "CREATE TABLE transfers (branch text, number bigserial, account int, amount numeric(14, 2), "
    "at timestamptz DEFAULT clock_timestamp(), note text, PRIMARY KEY (branch, number))",
    "CREATE FUNCTION memo(n int) RETURNS text LANGUAGE sql AS $$ "
    "SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 80 + n % 7) $$",
    "CREATE FUNCTION account(n int) RETURNS accounts LANGUAGE sql AS $$ "
    "SELECT n, n % 9, n / 4.0, random(), n % 2 = 0, DATE '2020-01-01' + n, clock_timestamp(), "
    "9007199254740993 + n, CASE WHEN n % 5 > 0 THEN 'owner ' || n END, "
    "jsonb_build_object('n', n, 'text', 'ü\"'), CASE WHEN n % 3 > 0 THEN memo(n) END $$",
    f"INSERT INTO accounts SELECT (account(n)).* FROM generate_series(1, {KEYS // 2}) n",
)
TABLES: Final = {
    "accounts": "SELECT id, branch, balance, score, active, opened, changed, touched, owner, "
    "details::text, memo FROM accounts",
    "transfers": "SELECT branch, number, account, amount, at, note FROM transfers",
}
#: The statements of transactions, and how often each is drawn.
STATEMENTS: Final = {
    "UPDATE accounts SET balance = balance + %(amount)s, changed = clock_timestamp(), "
    "touched = touched + 1 WHERE id = %(id)s": 8000,
    "INSERT INTO transfers (branch, account, amount, note) "
    "VALUES (%(branch)s, %(id)s, %(amount)s, E'to\\n\"' || %(branch)s)": 6000,
    "INSERT INTO accounts SELECT * FROM account(%(id)s) "
    "ON CONFLICT (id) DO UPDATE SET owner = accounts.owner || '.'": 1500,
    "DELETE FROM accounts WHERE id = %(id)s": 1000,
    "UPDATE accounts SET id = %(other)s WHERE id = %(id)s "
    "AND NOT EXISTS (SELECT FROM accounts WHERE id = %(other)s)": 1500,
    "UPDATE accounts SET memo = memo(id), score = -score WHERE id = %(id)s": 500,
    "UPDATE transfers SET branch = %(branch)s WHERE account = %(id)s": 500,
    "DELETE FROM transfers WHERE branch = %(branch)s "
    "AND number < (SELECT max(number) - 2000 FROM transfers)": 1000,
    "TRUNCATE transfers": 1,
}
#: One transaction, with keys that no writer uses.
LAST_CHANGE: Final = (
    f"INSERT INTO accounts SELECT * FROM account({KEYS}); INSERT INTO transfers VALUES ('last')"
)


def write(uri: str, rng: random.Random, stop: threading.Event) -> int:
    """Run transactions at a steady rate until `stop`; returns how many were committed."""
    transactions, due = 0, time.monotonic()
    with closing(psycopg2.connect(uri)) as connection, connection.cursor() as cursor:
        while not stop.wait(max(0.0, due - time.monotonic())):
            due += 1 / RATE
            count, weights = rng.randint(1, 5), list(STATEMENTS.values())
            with suppress(UniqueViolation, DeadlockDetected), connection:
                for statement in rng.choices(list(STATEMENTS), weights, k=count):
                    key, other = rng.sample(range(KEYS), 2)
                    branch, amount = f"branch {rng.randrange(9)}", rng.randrange(-9999, 9999) / 100
                    values = {"id": key, "other": other, "branch": branch, "amount": amount}
                    cursor.execute(statement, values)
                transactions += 1
    return transactions
