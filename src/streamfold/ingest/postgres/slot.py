"""The replication slot: PostgreSQL retains its log from the position that the slot has confirmed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from streamfold.ingest.errors import SourceUnavailableError, SourceUnusableError
from streamfold.ingest.postgres.connection import Database, interruptible, named_failures
from streamfold.ingest.postgres.pgoutput import Lsn, parse_lsn

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: The first version whose replicas can take over logical slots.
VERSION_FAILOVER: Final = 170_000
#: Seconds until the log names the transactions that a slot waits for, and between such lines.
_TELL_AFTER, _TELL_EVERY = 3.0, 60.0


@dataclass(frozen=True, slots=True)
class ReplicationSlot:
    """A slot as the server reports it."""

    name: str
    #: The process that uses it.
    active_pid: int | None
    #: Changes before this are not sent again.
    confirmed: Lsn
    #: Bytes of log that the server retains for it.
    retained_bytes: int
    #: Bytes of log after `confirmed`.
    lag_bytes: int
    #: Whether the server has removed log that the slot needs.
    lost: bool


_SLOT = """
SELECT plugin, database, active_pid, confirmed_flush_lsn::text,
       pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint,
       pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::bigint,
       wal_status = 'lost'
FROM pg_replication_slots WHERE slot_name = %s
"""
_CREATE = "SELECT lsn::text FROM pg_create_logical_replication_slot(%s, 'pgoutput')"
_CREATE_FOR_FAILOVER = """
SELECT lsn::text FROM pg_create_logical_replication_slot(%s, 'pgoutput', failover => true)
"""


def find_slot(cursor: Any, name: str) -> ReplicationSlot | None:
    """Return the slot, or None if it does not exist."""
    cursor.execute(_SLOT, (name,))
    row = cursor.fetchone()
    if row is None:
        return None
    _, _, pid, confirmed, retained, lag, lost = row
    return ReplicationSlot(
        name, pid, parse_lsn(confirmed or "0/0"), retained or 0, lag or 0, bool(lost)
    )


def create_slot(cursor: Any, name: str) -> Lsn:
    """Create the slot, with failover if the server supports it. Returns its start."""
    newer = cursor.connection.server_version >= VERSION_FAILOVER
    cursor.execute(_CREATE_FOR_FAILOVER if newer else _CREATE, (name,))
    return parse_lsn(cursor.fetchone()[0])


async def creating(database: Database, connection: Any, create: Callable[[], T]) -> T:
    """Run `create`, which creates a slot on the connection.

    PostgreSQL waits for all open transactions to end. Meanwhile the log names them.
    """
    telling = asyncio.create_task(_tell_blockers(database, connection.info.backend_pid))
    try:
        return await interruptible(connection, create)
    finally:
        telling.cancel()


async def _tell_blockers(database: Database, waiting: int) -> None:
    """Periodically log the processes that block the process `waiting`."""

    def blockers() -> list[int]:
        with database.query() as cursor:
            cursor.execute("SELECT pg_blocking_pids(%s)", (waiting,))
            return sorted(set(cursor.fetchone()[0]))

    await asyncio.sleep(_TELL_AFTER)
    while True:
        try:
            processes = await asyncio.to_thread(blockers)
        except (SourceUnavailableError, SourceUnusableError) as error:
            logger.warning("cannot ask which transactions a replication slot waits for: %s", error)
            processes = []
        if processes:
            # Process 0 is a prepared transaction.
            names = [f"process {pid}" if pid else "a prepared transaction" for pid in processes]
            logger.warning(
                "PostgreSQL creates a replication slot when the transactions that are open have ended; "
                "it waits for %s: see pg_stat_activity and pg_prepared_xacts",
                ", ".join(names),
            )
        await asyncio.sleep(_TELL_EVERY if processes else _TELL_AFTER)


def has_slots(cursor: Any) -> bool:
    """Return whether this database has a slot that sends changes of publications."""
    cursor.execute(
        "SELECT count(*) FROM pg_replication_slots "
        "WHERE plugin = 'pgoutput' AND database = current_database()"
    )
    return bool(cursor.fetchone()[0])


def drop_slot(cursor: Any, name: str) -> None:
    cursor.execute("SELECT pg_drop_replication_slot(%s)", (name,))


def flush_lag(cursor: Any, slot: ReplicationSlot) -> float | None:
    """Return the seconds by which the slot's user lags behind, or None if unknown."""
    cursor.execute(
        "SELECT extract(epoch FROM flush_lag)::float FROM pg_stat_replication WHERE pid = %s",
        (slot.active_pid,),
    )
    row = cursor.fetchone()
    if row is not None and row[0] is None and not slot.lag_bytes:
        return 0.0
    return None if row is None else row[0]


def current_lsn(cursor: Any) -> Lsn:
    cursor.execute("SELECT pg_current_wal_lsn()::text")
    return parse_lsn(cursor.fetchone()[0])


class System(NamedTuple):
    """The database cluster that a server belongs to, and the history of its log."""

    #: The same for a server and its replicas.
    identifier: str
    #: Changes with each failover.
    timeline: int
    #: Where the log left earlier timelines. Later commits on those are not in this one.
    ends: dict[int, Lsn]


def identify_system(database: Database) -> System:
    """Return the server's cluster."""
    connection = database.connect_replication()
    try:
        with named_failures(database.shown), connection.cursor() as cursor:
            cursor.execute("IDENTIFY_SYSTEM")
            identifier, timeline, *_ = cursor.fetchone()
            history = ""
            if timeline > 1:
                cursor.execute(f"TIMELINE_HISTORY {timeline}")
                _, content = cursor.fetchone()  # text from PostgreSQL 16 on
                history = content if isinstance(content, str) else bytes(content).decode()
    finally:
        connection.close()
    return System(str(identifier), int(timeline), _ends(history))


def _ends(history: str) -> dict[int, Lsn]:
    """Parse a history file. Each line contains timeline, position and reason."""
    lines = (line.split("\t") for line in history.splitlines() if line[:1].isdigit())
    return {int(timeline): parse_lsn(end) for timeline, end, *_ in lines}
