"""TLS, passwords, grants, metrics and warnings, each as an operator meets them."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace

import psycopg2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from prometheus_client.parser import text_string_to_metric_families
from s2_sdk import S2

from streamfold.ingest import SourceUnavailableError, SourceUnusableError
from streamfold.ingest.postgres import slot
from streamfold.ingest.postgres.catalog import check_server
from streamfold.ingest.postgres.connection import Database, interruptible
from streamfold.ingest.postgres.ingester import IngestOptions
from streamfold.ingest.progress import serve_metrics
from tests.ingest.ingesting import ingesting, stream
from tests.ingest.network import proxy_to_postgres
from tests.ingest.postgres import (
    PATIENCE,
    binaries,
    database_name,
    drop_slot,
    execute,
    following,
)
from tests.ports import free_port

ROOT = Path(__file__).parents[2]


def options(database: str, *tables: str) -> IngestOptions:
    return IngestOptions(tables, slot=database_name(database), heartbeat=0.2)


def certificate(folder: Path, name: str) -> tuple[Path, ssl.SSLContext]:
    """A certificate for this machine that signs itself, and a server's context with it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    today = datetime.now(UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(today - timedelta(days=1))
        .not_valid_after(today + timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = folder / f"{name}.pem"
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM) + secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    return pem, context


async def test_tls_is_verified_against_the_given_root(
    database: str, s2: S2, tmp_path: Path
) -> None:
    """The PostgreSQL of the tests has no TLS, so a proxy speaks it before it."""
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    ours, context = certificate(tmp_path, "ours")
    other, _ = certificate(tmp_path, "other")
    with proxy_to_postgres(database, context) as (_, uri):
        verified = f"{uri}?sslmode=verify-full&sslrootcert={ours}"
        async with ingesting(verified, s2, options(database, "t")) as running:
            await running.followed()
        with pytest.raises(SourceUnusableError, match="certificate verify failed"):
            Database(f"{uri}?sslmode=verify-full&sslrootcert={other}").connect()
        with pytest.raises(SourceUnusableError, match="root certificate file"):
            Database(f"{uri}?sslmode=verify-full&sslrootcert={tmp_path / 'none'}").connect()
    with (
        proxy_to_postgres(database) as (_, plain),
        pytest.raises(SourceUnusableError, match="does not support SSL"),
    ):
        Database(f"{plain}?sslmode=require").connect()


def reload(database: str) -> None:
    """Have PostgreSQL read its files again, and wait until it has: new connections follow them then."""
    loaded = "SELECT pg_conf_load_time()"
    before = execute(database, loaded)
    execute(database, "SELECT pg_reload_conf()")
    while execute(database, loaded) == before:
        time.sleep(0.02)


@pytest.fixture
def locked(database: str) -> Iterator[str]:
    """The database for a role that needs its password."""
    ((found,),) = execute(database, "SHOW hba_file")
    hba = Path(found)
    before = hba.read_text()
    hba.write_text(f"local all locked scram-sha-256\n{before}")
    execute(database, "CREATE ROLE locked LOGIN PASSWORD 's3cret'")
    reload(database)
    yield database.replace("postgres:@", "locked@")
    hba.write_text(before)
    execute(database, "DROP ROLE locked")
    reload(database)


def test_the_password_comes_from_environment_file_or_pgpass(
    locked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "none"))
    with pytest.raises(SourceUnusableError, match="no password supplied"):
        Database(locked).connect()
    file = tmp_path / "password"
    file.write_text("s3cret\n")
    Database(locked, password_file=file).connect().close()
    with monkeypatch.context() as environment:
        environment.setenv("PGPASSWORD", "s3cret")
        Database(locked).connect().close()
    passwords = tmp_path / "pgpass"
    passwords.write_text("*:*:*:locked:s3cret\n")
    passwords.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    Database(locked).connect().close()


async def test_a_wrong_password_ends_the_ingester_without_showing_it(
    locked: str, s2: S2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", "wr0ng")
    async with ingesting(locked, s2, IngestOptions(("t",))) as running:
        failure = await running.failure()
    assert isinstance(failure, SourceUnusableError)
    assert "password authentication failed" in failure.message
    assert "wr0ng" not in failure.message


async def test_the_documented_grants_are_enough(database: str, s2: S2) -> None:
    guide = (ROOT / "docs/guides/postgres.md").read_text()
    (statements,) = re.findall(r"<<'SQL'\n(.*?)\nSQL\n", guide, re.DOTALL)
    psql = [str(binaries() / "psql"), database, "--quiet", "--set=ON_ERROR_STOP=1"]
    run = partial(subprocess.run, psql, input=statements, text=True, check=True)
    await asyncio.to_thread(run)
    chosen = options(database, "orders")
    try:
        ingest = database.replace("postgres:@", "ingest@")
        async with ingesting(ingest, s2, chosen) as running:
            await running.followed()
            execute(database, "INSERT INTO orders VALUES (1001, 'new', 1)")
            async with following(stream(s2, "public.orders"), ["id"]) as until:
                rebuilt = await until(lambda table: (1001,) in table.rows)
            await running.until(lambda progress: progress.confirmed != "0/0")
        assert len(rebuilt.rows) == 1001
    finally:
        drop_slot(database, chosen.slot)
        execute(database, "DROP OWNED BY ingest", "DROP ROLE ingest")


class _Old:
    """A connection to a server of this version."""

    def __init__(self, server_version: int) -> None:
        self.server_version = server_version
        self.connection = self


def test_a_server_that_is_too_old_is_refused_with_the_version_it_needs() -> None:
    with pytest.raises(SourceUnusableError, match="PostgreSQL 13: 14 or newer is needed"):
        check_server(_Old(130_022))


async def test_a_slot_that_holds_much_log_is_warned_about(
    database: str, s2: S2, caplog: pytest.LogCaptureFixture
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    chosen = replace(options(database, "t"), retained_warn=1 << 20)
    with caplog.at_level(logging.WARNING):
        async with ingesting(database, s2, chosen) as running:
            await running.followed()
            await running.until(lambda progress: progress.retained_bytes < 1 << 20)
            assert "keeps" not in caplog.text
            # An open transaction holds the log back.
            holding = await asyncio.to_thread(hold, database)
            try:
                execute(
                    database, "SELECT pg_logical_emit_message(false, 'x', repeat('x', 3 << 20))"
                )
                await running.until(lambda progress: progress.retained_bytes > 2 << 20)
                await running.until(lambda _: "of log for slot" in caplog.text)
            finally:
                holding.close()
    assert "max_slot_wal_keep_size limits it" in caplog.text


async def test_transactions_that_a_slot_waits_for_are_named(
    database: str, s2: S2, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: asyncio.Queue[str] = asyncio.Queue()
    handler = logging.Handler(logging.WARNING)
    monkeypatch.setattr(handler, "emit", lambda record: messages.put_nowait(record.getMessage()))
    monkeypatch.setattr(slot.logger, "handlers", [handler])
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    holding = await asyncio.to_thread(hold, database)
    with closing(holding):
        async with ingesting(database, s2, options(database, "t")) as running:
            message = await asyncio.wait_for(messages.get(), PATIENCE)
            assert f"it waits for process {holding.info.backend_pid}: see pg_stat" in message
            holding.close()
            await running.followed()


def hold(database: str) -> psycopg2.extensions.connection:
    """A connection with an open transaction that has changed something."""
    connection = psycopg2.connect(database)
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO t VALUES (1)")
    return connection


async def test_the_metrics_say_how_far_each_table_is(database: str, s2: S2) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
    port = free_port()
    async with ingesting(database, s2, options(database, "t")) as running:
        serve_metrics(running.ingest.progress, port)
        await running.followed()
        execute(database, "INSERT INTO t VALUES (3)")
        await running.until(lambda progress: progress.tables["public.t"].changes == 1)
        await running.until(lambda progress: progress.retained_bytes > 0)
        found = await asyncio.to_thread(metrics, port)
    assert found["streamfold_ingest_rows_copied_total", "public.t"] == 2
    assert found["streamfold_ingest_changes_total", "public.t"] == 1
    assert found["streamfold_ingest_sessions_total", ""] == 1
    assert found["streamfold_ingest_failures_total", ""] == 0
    assert found["streamfold_ingest_following", ""] == 1
    assert found["streamfold_ingest_retained_bytes", ""] > 0
    assert found["streamfold_ingest_lag_bytes", ""] >= 0
    assert 0 <= found["streamfold_ingest_lag_seconds", ""] < 600


async def test_a_steady_load_that_is_appended_is_no_lag(database: str, s2: S2) -> None:
    execute(database, "CREATE TABLE t (id serial PRIMARY KEY)")
    stop = threading.Event()

    def load() -> None:
        with closing(psycopg2.connect(database)) as connection, connection.cursor() as cursor:
            while not stop.wait(0.005):
                cursor.execute("INSERT INTO t DEFAULT VALUES")
                connection.commit()

    async with ingesting(database, s2, options(database, "t")) as running:
        await running.followed()
        loading = asyncio.create_task(asyncio.to_thread(load))
        try:
            await running.until(lambda progress: progress.tables["public.t"].changes > 50)
            now = time.time()
            await running.until(lambda progress: progress.caught_up_at > now)
        finally:
            stop.set()
            await loading


def metrics(port: int) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
        text = answer.read().decode()
    return {
        (sample.name, sample.labels.get("table", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def wait_for_rows(database: str, query: str) -> None:
    while not execute(database, query):
        time.sleep(0.05)


async def test_an_ingester_that_waits_for_a_transaction_to_end_can_be_stopped(
    database: str, s2: S2
) -> None:
    """PostgreSQL makes a slot only when older transactions have ended."""
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    waiting = (
        "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
        f"AND datname = '{database_name(database)}'"
    )
    with closing(hold(database)):
        async with ingesting(database, s2, options(database, "t")), asyncio.timeout(PATIENCE):
            await asyncio.to_thread(wait_for_rows, database, waiting)
        assert not execute(database, waiting)


async def test_a_call_that_is_ended_on_request_is_not_reported_as_forgotten() -> None:
    """asyncio would print its error, with a traceback, when the task is collected."""
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    begun, asked = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        asked.wait(PATIENCE)
        raise SourceUnavailableError("the statement was cancelled")

    async def cancelled() -> None:
        calling = asyncio.create_task(interruptible(SimpleNamespace(cancel=asked.set), call))
        await asyncio.to_thread(begun.wait, PATIENCE)
        calling.cancel()
        await asyncio.wait({calling})
        assert calling.cancelled()

    await cancelled()
    gc.collect()
    assert reported == []


async def test_an_ingester_begins_again_until_the_database_is_back(database: str, s2: S2) -> None:
    with proxy_to_postgres(database) as (proxy, uri):
        proxy.cut(refuse=True)
        execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
        async with ingesting(uri, s2, options(database, "t")) as running:
            await running.until(lambda progress: progress.failures >= 3)
            assert "is unavailable" in running.ingest.progress.last_error
            proxy.mend()
            await running.followed()
