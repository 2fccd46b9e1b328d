"""PostgreSQL connections: session settings, translated failures, and reads through libpq."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from streamfold._native import Libpq, MessageReader
from streamfold.extras import needing_extra
from streamfold.ingest.errors import SourceUnavailableError, SourceUnusableError

with needing_extra("postgres"):
    import psycopg2
    import psycopg2.errors
    from psycopg2 import _psycopg
    from psycopg2.extensions import make_dsn, parse_dsn
    from psycopg2.extras import LogicalReplicationConnection

T = TypeVar("T")

#: Give values one text form regardless of the database's settings (see `values`), turn row
#: policies, which the log ignores, into errors, and lift the role's limits for copies that take
#: hours.
_SETTINGS: Final = {
    "client_encoding": "UTF8",
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "xmloption": "content",
    "lc_monetary": "C",
    "search_path": "pg_catalog",
    "row_security": "off",
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
}
#: The first version with `transaction_timeout`.
_VERSION_LIMITED: Final = 170_000
#: Seconds between requests to cancel a statement.
_CANCEL_AGAIN: Final = 0.2
#: Milliseconds that a query waits for a lock. Meanwhile a following session sends no status, and
#: PostgreSQL ends it after `wal_sender_timeout`, 60 s by default.
_LOCK_WAIT: Final = 20_000
#: Seconds to connect.
_CONNECT_TIMEOUT: Final = 10
#: Seconds of silence before the kernel probes a connection, how it probes, and milliseconds until it
#: closes one with unacknowledged data, which it does not probe.
_KEEPALIVE: Final = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}


class Database:
    """One database, whose connections all have the same settings.

    libpq's own configuration applies: PGPASSWORD, PGPASSFILE, ~/.pgpass, service files, sslmode.
    """

    def __init__(self, dsn: str, *, password_file: Path | None = None) -> None:
        try:
            parameters = parse_dsn(dsn)
        except psycopg2.ProgrammingError:
            # Not shown, because it may contain a password.
            raise SourceUnusableError(
                "the connection string is not valid: write it as in "
                "postgresql://user@host:5432/database, or as in 'host=… dbname=…'"
            ) from None
        if password_file is not None:
            parameters["password"] = password_file.read_text().rstrip("\n")
        settings = " ".join(f"-c {name}={value}" for name, value in _SETTINGS.items())
        parameters["options"] = f"{parameters.get('options', '')} {settings}".strip()
        parameters["client_encoding"] = _SETTINGS["client_encoding"]
        parameters.setdefault("application_name", "streamfold ingest")
        parameters.setdefault("connect_timeout", str(_CONNECT_TIMEOUT))
        self._dsn = make_dsn(**_KEEPALIVE | parameters)
        shown = {
            name: parameters[name]
            for name in ("host", "port", "dbname", "user")
            if name in parameters
        }
        #: For messages, without secrets.
        self.shown = " ".join(f"{name}={value}" for name, value in shown.items())

    def connect(self) -> Any:
        """Open a connection for queries."""
        with named_failures(self.shown):
            connection = psycopg2.connect(self._dsn)
            connection.autocommit = True
            return _set_up(connection)

    @contextmanager
    def query(self) -> Iterator[Any]:
        """Yield a cursor on a new connection, for short queries.

        Raises SourceUnavailableError if a query waits too long for a lock.
        """
        connection = self.connect()
        try:
            with named_failures(self.shown), connection.cursor() as cursor:
                cursor.execute("SET lock_timeout = %s", (_LOCK_WAIT,))
                yield cursor
        finally:
            connection.close()

    def connect_replication(self) -> Any:
        """Open a connection that also speaks the replication protocol."""
        with named_failures(self.shown):
            return _set_up(
                psycopg2.connect(self._dsn, connection_factory=LogicalReplicationConnection)
            )


def _set_up(connection: Any) -> Any:
    """Repeat the settings on an open connection. Closes it if that fails.

    libpq sends PGTZ and PGDATESTYLE after the connection string's options, and the last value wins.
    """
    settings = dict(_SETTINGS)
    if connection.server_version >= _VERSION_LIMITED:
        settings["transaction_timeout"] = "0"
    try:
        with connection.cursor() as cursor:
            cursor.execute("; ".join(f"SET {name} = '{value}'" for name, value in settings.items()))
    except psycopg2.Error:
        connection.close()
        raise
    return connection


async def interruptible(connection: Any, call: Callable[[], T]) -> T:
    """Run a call on the connection in a thread. Cancelling it also cancels it in PostgreSQL."""
    calling = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        while not calling.done():
            # Repeatedly, because a request that arrives before the statement has no effect.
            connection.cancel()
            await asyncio.wait({calling}, timeout=_CANCEL_AGAIN)
        calling.exception()  # retrieve it, or asyncio would report it as forgotten
        raise


@contextmanager
def named_failures(database: str) -> Iterator[None]:
    """Translate PostgreSQL's errors into ours, which distinguish transient from permanent failures."""
    try:
        yield
    except psycopg2.errors.InsufficientPrivilege as error:
        raise SourceUnusableError(
            f"{database}: {_line(error)}; see the grants in docs/guides/postgres.md"
        ) from error
    except (
        psycopg2.errors.CharacterNotInRepertoire,
        psycopg2.errors.UntranslatableCharacter,
    ) as error:
        raise SourceUnusableError(
            f"{database}: {_line(error)}; a text has bytes that are not of the database's encoding, "
            "which SQL_ASCII allows: correct the text, and start again, once with --recopy if it came "
            "after the first copy"
        ) from error
    except psycopg2.Error as error:
        line = _line(error)
        # Without a code, libpq reports a connection failure.
        passing = error.pgcode is None or error.pgcode[:2] in _PASSING
        if passing and not any(text in line for text in _LASTING):
            unknown = any(text in line for text in _NOT_THERE)
            advice = "; check host and port of the DSN" if unknown else ""
            raise SourceUnavailableError(f"{database} is unavailable: {line}{advice}") from error
        raise SourceUnusableError(f"{database}: {line}") from error


#: libpq's messages if nothing responds at an address.
_NOT_THERE = ("could not translate host name", "Connection refused", "No such file or directory")
#: Classes of transient errors: connection, conflict, resources, state, shutdown, system.
_PASSING: Final = ("08", "40", "53", "55", "57", "58")
#: libpq's messages for permanent connection failures, which have no code.
_LASTING: Final = (
    "password authentication failed",
    "no password supplied",
    "does not exist",
    "no pg_hba.conf entry",
    "certificate verify failed",
    "does not support SSL",
)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


#: libpq is part of psycopg2's own file, or linked to it.
_LIBRARY: Final = Libpq(_psycopg.__file__)


class CopyConnection:
    """A psycopg2 connection in the replication protocol, which is a COPY in both directions.

    Calls libpq directly. psycopg2 would make an object of each message, and would itself confirm
    positions that the ingester has not noted. Native code reads many messages at once, and only the
    ingester confirms. Use the connection in one thread, and do not use it through psycopg2 until it
    is closed.
    """

    def __init__(self, connection: Any) -> None:
        #: Referenced to keep it open.
        self._connection = connection
        self.pointer: int = connection.pgconn_ptr

    def reader(self) -> MessageReader:
        """Return a message reader, whose `pull` takes this connection's pointer."""
        return MessageReader(_LIBRARY)

    def fileno(self) -> int:
        """Return the socket. Raises psycopg2's error if libpq closed it after a failed send."""
        number = int(self._connection.fileno())
        if number < 0:
            raise self.failure()
        return number

    def send(self, message: bytes) -> None:
        """Send a message. Raises psycopg2's error if the connection is broken."""
        if not _LIBRARY.send(self.pointer, message):
            raise self.failure()

    def failure(self) -> psycopg2.Error:
        """Return the error that ended the connection, as psycopg2 would raise it."""
        return _error(*(_LIBRARY.end(self.pointer) or (b"", None)))


def _error(text: bytes, code: bytes | None) -> psycopg2.Error:
    message = text.decode(errors="replace") or "the server ended the connection"
    state = None if code is None else code.decode()
    try:
        kind = psycopg2.OperationalError if state is None else psycopg2.errors.lookup(state)
    except KeyError:
        kind = psycopg2.DatabaseError
    error = kind(message)
    error.__setstate__({"pgcode": state, "pgerror": message})
    return error
