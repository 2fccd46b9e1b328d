"""`streamfold publish` archives a table even if processes are killed meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tomllib
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import streamfold.archive
from streamfold.follow.clients.s2 import S2Client
from tests.cli.commands import Shell, ending_of, line_of
from tests.cli.documented_json import documented
from tests.ingest.postgres import PATIENCE, database_name, execute
from tests.proving import PROVING
from tests.sdk import sdk_client

#: Enough for a trim of the stream.
ROWS = 1500
#: The objects that the reference has for the verb.
DOCUMENTED = documented("publish")


@pytest.fixture
def shell(database: str) -> Shell:
    return Shell({"STREAMFOLD_POSTGRES_DSN": database})


@pytest.fixture
def orders(database: str) -> str:
    """A database with a table and a few rows."""
    execute(
        database,
        "CREATE TABLE orders (id int PRIMARY KEY, item text, price numeric(10, 2))",
        f"INSERT INTO orders SELECT n, 'item ' || n, n / 4.0 FROM generate_series(1, {ROWS}) n",
    )
    return database


def arguments(database: str, folder: Path, *more: str) -> tuple[str, ...]:
    name = database_name(database)
    return (
        *("publish", database, "--table", "orders", "--to", str(folder / "archive")),
        *("--slot", name, "--publication", name, "--diff-interval", "1s", "--json", *more),
    )


async def part(command: Process, verb: str) -> psutil.Process:
    """The process that runs a verb for `publish`, as soon as there is one."""
    while True:
        for child in psutil.Process(command.pid).children():
            with suppress(psutil.NoSuchProcess):  # one that was killed
                if verb in child.cmdline()[3:4]:
                    return child
        await asyncio.sleep(0.05)


async def until(command: Process, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Read status lines, which have the documented members, until one meets the condition."""
    while True:
        line = await line_of(command)
        assert line, await ending_of(command)
        shown: dict[str, Any] = json.loads(line)
        artifacts = [shown.get(name) for name in ("last_diff", "last_base")]
        for each in (shown, *filter(None, artifacts)):
            assert any(shape.fits(each) for shape in DOCUMENTED), each
        if condition(shown):
            return shown


@pytest.mark.timeout(1200)  # Spark starts three times, each in a process of its own
async def test_a_table_is_published_across_kills_of_the_command_and_of_every_part(
    orders: str, shell: Shell, tmp_path: Path
) -> None:
    command = arguments(orders, tmp_path)
    async with shell.running(*command) as first:
        await until(first, lambda shown: shown.get("state") == "following")
        parts = psutil.Process(first.pid).children()
        first.kill()
        await first.wait()
    await asyncio.to_thread(psutil.wait_procs, parts, PATIENCE)
    assert not any(process.is_running() for process in parts)
    execute(orders, "DELETE FROM orders WHERE id % 5 = 0")
    async with shell.running(*command) as second:
        url = (await until(second, lambda shown: "server" in shown))["server"]
        # Spark takes long to start: for a quick test, the kills come before it has.
        await until(
            second, lambda shown: shown.get("state") == ("publishing" if PROVING else "following")
        )
        for verb, given in (("serve", False), ("ingest", True)):
            variables = (await part(second, verb)).environ()
            assert ("STREAMFOLD_POSTGRES_DSN" in variables) is given
        busy = shell(*command)
        assert busy.error["code"] == "conflict"
        assert "is in use by another `streamfold publish`" in busy.error["message"]
        for verb in ("serve", "ingest", "snapshotter"):
            execute(orders, f"UPDATE orders SET item = '{verb}' WHERE id % 7 = 0", PLUS_ONE)
            (await part(second, verb)).kill()
        await until(second, lambda shown: shown.get("state") != "publishing")
        await until(second, lambda shown: shown.get("state") == "publishing")
        await until_trimmed(url)
        # The ingester resumes from the last record, the snapshotter from its archive.
        for verb in ("serve", "ingest", *(["snapshotter"] if PROVING else [])):
            execute(orders, f"UPDATE orders SET item = 'trimmed, {verb}' WHERE id % 13 = 0")
            (await part(second, verb)).kill()
        if (
            PROVING
        ):  # Spark starts again: before it has, a stop leaves the last changes in the stream
            await until(second, lambda shown: shown.get("state") != "publishing")
            await until(second, lambda shown: shown.get("state") == "publishing")
        execute(orders, "INSERT INTO orders VALUES (0, 'last', NULL)")
        await until(second, lambda shown: _has(orders, shown))
        second.send_signal(signal.SIGHUP)  # its terminal is closed
        ended = await ending_of(second)
    assert (ended.status, ended.stderr) == (0, "")
    assert await published(tmp_path) == rows_of(orders)
    state = str(tmp_path / "archive.state")
    elsewhere = shell(*command, "--to", str(tmp_path / "other"), "--state", state)
    assert elsewhere.error["code"] == "conflict"
    assert "public.orders has no archive" in elsewhere.error["message"]
    assert "--recopy" in elsewhere.error["message"]
    options = ("--to", str(tmp_path / "other"), "--state", state, "--on-trimmed", "publish")
    async with shell.running(*command, *options) as third:
        await until(third, lambda shown: shown.get("state") == "publishing")
        third.send_signal(signal.SIGTERM)
        assert (await ending_of(third)).status == 0
    archive = await streamfold.archive.open(tmp_path / "other" / "public.orders")
    assert archive.incomplete_before is not None


async def until_trimmed(url: str) -> None:
    """Wait until the ingester trims the stream, which takes effect when the server starts again."""
    async with sdk_client(url) as client:
        stream = S2Client(client.basin("published-tables").stream("public.orders"))
        while True:
            tail = (await stream.check_tail()).seq_num
            (last,) = await stream.peek(tail - 1, 1)
            if (b"", b"trim") in last.headers:
                return
            await asyncio.sleep(0.1)


#: Changes keys, in an order in which no two rows ever have the same.
PLUS_ONE = "UPDATE orders SET id = id + 10000 WHERE id % 11 = 0 AND id < 10000"


def _has(database: str, shown: dict[str, Any]) -> bool:
    """Return whether the stream has everything that the database had committed."""
    ((behind,),) = execute(
        database, f"SELECT '{shown.get('position') or '0/0'}'::pg_lsn < pg_current_wal_lsn()"
    )
    return not behind


def rows_of(database: str) -> list[Any]:
    return execute(database, "SELECT id, item, price FROM orders ORDER BY id")


async def published(folder: Path) -> list[Any]:
    archive = await streamfold.archive.open(folder / "archive" / "public.orders")
    rows = (await archive.table()).to_pylist()
    return sorted((row["id"], row["item"], row["price"]) for row in rows)


@pytest.mark.parametrize(
    ("statements", "given", "expected"),
    [
        (["CREATE TABLE t (a int)"], ("--table", "t"), "has no primary key"),
        ([], ("--table", "t"), "no table matches 'public.t'"),
        (['CREATE TABLE "t#1" (a int PRIMARY KEY)'], ("--table", "t*"), "has # in its name"),
        (["CREATE TABLE t (a int PRIMARY KEY)"], ("--table", "t", "--to", "ftp://x"), "not a folder"),
    ],
)  # fmt: skip
def test_what_cannot_be_published_is_said_before_anything_starts(
    statements: list[str],
    given: tuple[str, ...],
    expected: str,
    database: str,
    shell: Shell,
    tmp_path: Path,
) -> None:
    execute(database, *statements, "SELECT 1")
    state = tmp_path / "state"
    failed = shell("publish", "--to", str(tmp_path / "a"), "--state", str(state), *given)
    assert failed.status == 1
    assert expected in failed.stderr
    assert failed.stderr.count("\n") == 1
    assert not state.exists()


def test_once_ends_although_the_snapshotter_gave_a_table_up(
    orders: str, shell: Shell, tmp_path: Path
) -> None:
    archive = tmp_path / "archive" / "public.orders"
    archive.mkdir(parents=True)
    (archive / "manifest.json").write_text("{}")
    failed = shell(*arguments(orders, tmp_path), "--once")
    assert failed.status == 1
    assert "table public.orders is stopped: manifest_version" in failed.error["message"]


async def test_a_value_that_no_column_holds_is_corrected_by_a_recopy_or_becomes_a_dead_letter(
    orders: str, shell: Shell, tmp_path: Path
) -> None:
    execute(
        orders,
        "ALTER TABLE orders ADD at timestamp",
        f"DELETE FROM orders WHERE id < {ROWS}",
        f"UPDATE orders SET at = '294276-12-31' WHERE id = {ROWS}",
    )
    once = (*arguments(orders, tmp_path), "--once")
    failed = await asyncio.to_thread(shell, *once)
    assert failed.status == 1
    assert f'(row {{"id":{ROWS}}}), values do not fit' in failed.error["message"]
    assert "at: '922431" in failed.error["message"]
    execute(orders, "UPDATE orders SET at = '2026-01-31'", "INSERT INTO orders VALUES (1, 'b', 2)")
    copied = await asyncio.to_thread(shell.ok, *once, "--recopy")
    assert not any(shown.get("dead_letters") for shown in copied.objects)
    assert await published(tmp_path) == rows_of(orders)
    execute(orders, "UPDATE orders SET price = 'NaN' WHERE id = 1", "INSERT INTO orders VALUES (2)")
    lenient = await asyncio.to_thread(shell.ok, *once, "--mismatch", "dead_letter")
    shown = lenient.objects[-1]
    assert (shown["dead_letters"], shown["error"]) == (1, None)
    assert shown["dead_letters_at"].endswith("/archive/public.orders/dead-letters/")
    assert [key for key, *_ in await published(tmp_path)] == [1, 2, ROWS]


def test_skipped_records_are_those_of_the_snapshotter(
    orders: str, shell: Shell, tmp_path: Path
) -> None:
    file = tmp_path / "config" / "snapshotter.toml"
    given = ("--skip", "orders:17", "--skip", "public.orders:3", "--config", str(file.parent))
    shell.ok(*arguments(orders, tmp_path, *given))
    shell.ok("snapshotter", "validate", "--config", str(file))
    (table,) = tomllib.loads(file.read_text())["tables"]
    assert table["dead_letters"] == {"records": [3, 17]}
    refused = shell(*arguments(orders, tmp_path, "--skip", "other:17"))
    assert "give one of ['public.orders'], a colon" in refused.error["message"]


def test_an_error_of_a_part_that_no_restart_corrects_ends_the_command(
    orders: str, shell: Shell, tmp_path: Path
) -> None:
    name = database_name(orders)
    execute(orders, f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
    failed = shell(*arguments(orders, tmp_path))
    assert failed.status == 1
    assert failed.error["code"] == "source_unusable"
    log = tmp_path / "archive.state" / "log" / "ingest.log"
    assert failed.error["message"].endswith(f"(log: {log})")
    assert "no ingester of these streams made it" in log.read_text()


def test_a_missing_java_is_said_before_anything_starts(
    orders: str, shell: Shell, tmp_path: Path
) -> None:
    shell.environment["JAVA_HOME"] = str(tmp_path)
    failed = shell(*arguments(orders, tmp_path))
    assert failed.error["code"] == "java_missing"
    assert not (tmp_path / "archive.state").exists()


def test_missing_extras_are_named_together() -> None:
    for package in ("uvloop", "psycopg2", "pyspark"):
        script = (
            f"import sys; sys.modules[{package!r}] = None; from streamfold.cli.main import main; "
            "main(['publish', 'postgresql:///x', '--table', 't', '--to', 'a'])"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
        )
        assert "pip install 'streamfold[server,postgres,spark]'" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_configuration_is_written_for_the_three_parts_without_the_password(
    orders: str, shell: Shell, tmp_path: Path
) -> None:
    folder = tmp_path / "config"
    dsn = orders.replace("postgres:@", "postgres:s3cret@")
    dsn += f"{'&' if '?' in dsn else '?'}sslpassword=s3cret"
    command = arguments(dsn, tmp_path, "--config", str(folder))
    (written,) = shell.ok(*command).objects
    names = ["server.sh", "ingest.sh", "snapshotter.sh"]
    assert written == {"scripts": [str(folder / name) for name in names]}
    assert any(shape.fits(written) for shape in DOCUMENTED)
    texts = [file.read_text() for file in folder.iterdir()]
    assert not any("s3cret" in text for text in texts)
    for name in names:
        assert os.access(folder / name, os.X_OK)
        assert subprocess.run(["sh", "-n", folder / name], check=True).returncode == 0
    valid = shell.json("snapshotter", "validate", "--config", str(folder / "snapshotter.toml"))
    assert valid == {"valid": True, "tables": ["public.orders"]}
    assert shell(*command).error["code"] == "conflict"


@pytest.mark.parametrize("layout", ["streamfold", "laredo"])
def test_layout_and_kept_epochs_are_those_of_the_snapshotter(
    orders: str, shell: Shell, tmp_path: Path, layout: str
) -> None:
    file = tmp_path / "config" / "snapshotter.toml"
    given = ("--layout", layout, "--keep-epochs", "3", "--config", str(file.parent))
    shell.ok(*arguments(orders, tmp_path, *given))
    shell.ok("snapshotter", "validate", "--config", str(file))
    (table,) = tomllib.loads(file.read_text())["tables"]
    assert (table["layout"], table["retention"]) == (layout, {"keep_epochs": 3})
    refused = shell(*arguments(orders, tmp_path, "--layout", "other"))
    assert refused.status == 2


def test_the_configuration_for_another_server_starts_none(
    orders: str, shell: Shell, tmp_path: Path
) -> None:
    folder = tmp_path / "config"
    given = ("--endpoint", "https://streams.example", "--config", str(folder))
    shell.ok(*arguments(orders, tmp_path, *given))
    found = sorted(file.name for file in folder.iterdir())
    assert found == ["ingest.sh", "snapshotter.sh", "snapshotter.toml"]
    assert 'server = "https://streams.example"' in (folder / "snapshotter.toml").read_text()


def test_a_publication_is_dropped_with_the_last_slot(orders: str, shell: Shell) -> None:
    slots = [f"{database_name(orders)}_{part}" for part in "ab"]
    execute(
        orders,
        "CREATE PUBLICATION streamfold FOR TABLE orders",
        *(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')" for slot in slots),
    )
    for slot, last in zip(slots, (False, True), strict=True):
        dropped = shell.json("ingest", "drop", "--dsn", orders, "--slot", slot, "--yes")
        assert dropped == {"slot": slot, "dropped": True, "publication_dropped": last}
    assert execute(orders, "SELECT count(*) FROM pg_publication") == [(0,)]
