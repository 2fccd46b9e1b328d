"""Messages of the replication protocol, taken many at once."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import psycopg2
import pytest

from streamfold._native import CodecError, split_messages
from streamfold.ingest.postgres.connection import Database
from streamfold.ingest.postgres.pgoutput import Insert, Lsn, decode_message, parse_lsn
from streamfold.ingest.postgres.replication import Replication
from tests.ingest.postgres import database_name, execute
from tests.proving import seeds

#: Messages, and their bytes, that are taken at once.
MESSAGES, BYTES = 8192, 1 << 20


def protocol_messages(rng: random.Random, *, damaged: float) -> list[bytes]:
    found = []
    for _ in range(rng.choice((0, 1, 5, 200))):
        end = rng.choice((0, 1, 0x16B3748, (1 << 64) - 1))
        if rng.random() < 0.8:
            made = b"w" + struct.pack(">QQq", end, end, 7) + rng.randbytes(rng.choice((0, 1, 40)))
        else:
            made = b"k" + struct.pack(">Qq", end, 7) + rng.choice((b"\0", b"\1", b"\2"))
        if rng.random() < damaged:
            made = rng.choice((b"", made[:-1], made[:17], made + b"\0", b"?" + made[1:], made[1:]))
        found.append(made)
    return found


def split_slowly(found: Sequence[bytes]) -> tuple[list[bytes], int, bool] | bytes:
    """The messages of pgoutput, the end of the log and whether an answer is due, or what is wrong."""
    messages, wal_end, asked = [], 0, False
    for message in found:
        if message[:1] == b"w" and len(message) >= 25:
            (wal_end,) = struct.unpack_from(">8xQ", message, 1)
            messages.append(message[25:])
        elif message[:1] == b"k" and len(message) == 18:
            (wal_end,) = struct.unpack_from(">Q", message, 1)
            asked = asked or message[-1] != 0
        else:
            return message[:1]
    return messages, wal_end, asked


def split(found: Sequence[bytes]) -> tuple[list[bytes], int, bool] | bytes:
    try:
        run, wal_end, asked = split_messages(found)
    except CodecError as error:
        code, kind, *_ = error.args
        assert code == "replication"
        return bytes([kind]) if kind < 256 else b""
    return [run[number] for number in range(len(run))], wal_end, asked


@pytest.mark.parametrize("damaged", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("seed", seeds(10, proving=1000))
def test_native_code_splits_messages_as_python_does(seed: int, damaged: float) -> None:
    found = protocol_messages(random.Random(seed), damaged=damaged)
    assert split(found) == split_slowly(found)


@contextmanager
def replicating(database: str, slot: str) -> Iterator[Replication]:
    with closing(Database(database).connect_replication()) as connection:
        yield Replication(connection, slot, "p")


@pytest.fixture
def slot(database: str) -> str:
    name = database_name(database)
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, a text)", "CREATE PUBLICATION p FOR TABLE t",
            f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")  # fmt: skip
    return name


def changes_until(replication: Replication, last: bytes) -> list[bytes]:
    """Return all messages up to the insert of a row with this id."""
    found: list[bytes] = []
    while True:
        replication.gather()
        run = replication.take().run
        for number in range(len(run)):
            found.append(run[number])
            event = decode_message(found[-1])
            if isinstance(event, Insert) and event.new[0] == last:
                return found


def test_messages_arrive_in_order_however_long_and_many(database: str, slot: str) -> None:
    rows = 2 * MESSAGES
    execute(database, f"INSERT INTO t SELECT n, 'x' FROM generate_series(1, {rows}) n",
            f"INSERT INTO t VALUES (-1, repeat('long', {BYTES // 3}))",
            f"INSERT INTO t SELECT -n, repeat('y', {BYTES // 5}) FROM generate_series(2, 9) n",
            "INSERT INTO t VALUES (0, 'last')")  # fmt: skip
    with replicating(database, slot) as replication:
        events = map(decode_message, changes_until(replication, b"0"))
    found = [event.new for event in events if isinstance(event, Insert)]
    assert found == [
        *((b"%d" % number, b"x") for number in range(1, rows + 1)),
        (b"-1", b"long" * (BYTES // 3)),
        *((b"-%d" % number, b"y" * (BYTES // 5)) for number in range(2, 10)),
        (b"0", b"last"),
    ]


def test_a_connection_that_the_server_ends_raises_its_error(database: str, slot: str) -> None:
    with replicating(database, slot) as replication:
        execute(database, "INSERT INTO t VALUES (1, 'first')")
        changes_until(replication, b"1")
        execute(database, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
                f"WHERE slot_name = '{slot}'")  # fmt: skip
        with pytest.raises(psycopg2.Error, match="terminating connection") as failure:
            changes_until(replication, b"none")
        assert failure.value.pgcode == "57P01"
        with pytest.raises(psycopg2.Error):
            replication.confirm(Lsn(1), ask=False)
        for _ in range(3):
            with pytest.raises(psycopg2.Error):
                replication.gather()
        with pytest.raises(psycopg2.Error):
            replication.fileno()  # libpq has closed it: there is nothing to wait for


def test_what_is_confirmed_is_what_was_given(database: str, slot: str) -> None:
    ((lsn,),) = execute(
        database, "INSERT INTO t VALUES (1, 'a')", "SELECT pg_current_wal_lsn()::text"
    )
    query = f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{slot}'"
    with replicating(database, slot) as replication:
        changes_until(replication, b"1")
        replication.confirm(parse_lsn(lsn), ask=True)
        execute(database, "INSERT INTO t VALUES (2, 'b')")
        changes_until(replication, b"2")
        assert execute(database, query) == [(lsn,)]
