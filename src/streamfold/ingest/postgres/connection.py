"""Connections to PostgreSQL: what every session is set to, and how failures are named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from streamfold.extras import needing_extra
from streamfold.ingest.errors import SourceUnavailableError, SourceUnusableError

with needing_extra("postgres"):
    import psycopg2
    import psycopg2.errors
    from psycopg2.extensions import make_dsn, parse_dsn
    from psycopg2.extras import LogicalReplicationConnection

T = TypeVar("T")

#: So that values have one text form, whatever the database's own settings are; see `values`. Policies
#: of rows, which the log does not know, are errors. Limits of the role do not suit copies of hours.
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
#: Seconds between two requests to end a statement.
_CANCEL_AGAIN: Final = 0.2
#: Milliseconds that a query waits for a lock. Meanwhile a session that follows changes sends no
#: answers, and PostgreSQL ends it after `wal_sender_timeout`, 60 s by default.
_LOCK_WAIT: Final = 20_000
#: Seconds to connect.
_CONNECT_TIMEOUT: Final = 10
#: Seconds of silence after which the kernel probes a connection, and of probing until it is closed;
#: milliseconds until it closes one whose data is not acknowledged, which it does not probe.
_KEEPALIVE: Final = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}


class Database:
    """One database, by its connection string; opens connections that are set up alike.

    libpq's own means apply: PGPASSWORD, PGPASSFILE, ~/.pgpass, a service file, sslmode.
    """

    def __init__(
        self, dsn: str, *, password_file: Path | None = None, options: Sequence[str] = ()
    ) -> None:
        try:
            given = parse_dsn(dsn)
        except psycopg2.ProgrammingError:
            # The text is not shown: it may have a password.
            raise SourceUnusableError(
                "the connection string is not valid: write it as in "
                "postgresql://user@host:5432/database, or as in 'host=… dbname=…'"
            ) from None
        if password_file is not None:
            given["password"] = password_file.read_text().rstrip("\n")
        settings = " ".join(f"-c {name}={value}" for name, value in _SETTINGS.items())
        given["options"] = " ".join([*options, given.get("options", ""), settings]).strip()
        given["client_encoding"] = _SETTINGS["client_encoding"]
        given.setdefault("application_name", "streamfold ingest")
        given.setdefault("connect_timeout", str(_CONNECT_TIMEOUT))
        self._dsn = make_dsn(**_KEEPALIVE | given)
        shown = {name: given[name] for name in ("host", "port", "dbname", "user") if name in given}
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
        """Yield a cursor of a connection of its own, for queries that do not wait for locks for long.

        One that does raises SourceUnavailableError.
        """
        connection = self.connect()
        try:
            with named_failures(self.shown), connection.cursor() as cursor:
                cursor.execute("SET lock_timeout = %s", (_LOCK_WAIT,))
                yield cursor
        finally:
            connection.close()

    def connect_replication(self) -> Any:
        """Open a connection that speaks the replication protocol too."""
        with named_failures(self.shown):
            return _set_up(
                psycopg2.connect(self._dsn, connection_factory=LogicalReplicationConnection)
            )


def _set_up(connection: Any) -> Any:
    """Set what the options of the connection string could not; the connection is closed if that fails.

    libpq sends PGTZ and PGDATESTYLE after the options, and PostgreSQL takes the last.
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
    """Run a call on the connection in a thread; a cancellation ends it in PostgreSQL too."""
    calling = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        while not calling.done():
            # Again and again: a request that comes before the statement has no effect.
            connection.cancel()
            await asyncio.wait({calling}, timeout=_CANCEL_AGAIN)
        calling.exception()  # the end that was asked for; asyncio would report it as forgotten
        raise


@contextmanager
def named_failures(database: str) -> Iterator[None]:
    """Raise what PostgreSQL reports as our errors: what may pass later, and what will not."""
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
        # Without a code, it is libpq that reports a connection.
        passing = error.pgcode is None or error.pgcode[:2] in _PASSING
        if passing and not any(text in line for text in _LASTING):
            unknown = any(text in line for text in _NOT_THERE)
            advice = "; check host and port of the DSN" if unknown else ""
            raise SourceUnavailableError(f"{database} is unavailable: {line}{advice}") from error
        raise SourceUnusableError(f"{database}: {line}") from error


#: What libpq reports if nothing answers at an address.
_NOT_THERE = ("could not translate host name", "Connection refused", "No such file or directory")
#: Classes of errors that may pass: connection, conflict, resources, state, shutdown, system.
_PASSING: Final = ("08", "40", "53", "55", "57", "58")
#: What libpq says of connections that no retry makes good; it has no code for them.
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
