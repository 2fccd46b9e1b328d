"""Messages of the replication protocol: many at once, and one by one with the same result."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np
import psycopg2
import pytest

from streamfold.errors import MalformedError
from streamfold.ingest.postgres.change_batches import load_kernel
from streamfold.ingest.postgres.connection import Database
from streamfold.ingest.postgres.encoding.row_kernel import PADDING
from streamfold.ingest.postgres.encoding.runs import RunReader, split_run
from streamfold.ingest.postgres.libpq_kernel import BYTES, MESSAGES
from streamfold.ingest.postgres.pgoutput import Insert, Lsn, decode_message, parse_lsn
from streamfold.ingest.postgres.replication import Received, Replication, split_messages
from tests.ingest.postgres import database_name, execute
from tests.proving import seeds


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    assert load_kernel()


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


def outcome_of(
    split: Callable[[Sequence[bytes]], Received], found: Sequence[bytes]
) -> tuple[list[bytes], int, bool] | str:
    try:
        received = split(found)
    except MalformedError as error:
        return error.message
    messages = [received.messages[number] for number in range(len(received.messages))]
    return messages, received.wal_end, received.asked


def by_kernel(found: Sequence[bytes]) -> Received:
    raw = np.frombuffer(bytearray().join([*found, PADDING]), np.uint8)
    return split_run(raw, np.cumsum([len(message) for message in found], dtype=np.int64))


@pytest.mark.parametrize("damaged", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("seed", seeds(10, proving=1000))
def test_the_kernel_splits_messages_as_python_does(seed: int, damaged: float) -> None:
    found = protocol_messages(random.Random(seed), damaged=damaged)
    assert outcome_of(by_kernel, found) == outcome_of(split_messages, found)


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


def changes_until(replication: Replication, reader: RunReader | None, last: bytes) -> list[bytes]:
    """Return all messages up to the insert of a row with this id."""
    found: list[bytes] = []
    while True:
        replication.gather(reader)
        received = replication.take(reader)
        for number in range(len(received.messages)):
            found.append(received.messages[number])
            event = decode_message(found[-1])
            if isinstance(event, Insert) and event.new[0] == last:
                return found


def test_the_kernel_receives_what_python_receives_however_long(database: str, slot: str) -> None:
    rows = 2 * MESSAGES
    execute(database, f"INSERT INTO t SELECT n, 'x' FROM generate_series(1, {rows}) n",
            f"INSERT INTO t VALUES (-1, repeat('long', {BYTES // 3}))",
            f"INSERT INTO t SELECT -n, repeat('y', {BYTES // 5}) FROM generate_series(2, 9) n",
            "INSERT INTO t VALUES (0, 'last')")  # fmt: skip
    found = []
    for reader in (None, RunReader()):
        with replicating(database, slot) as replication:
            found.append(changes_until(replication, reader, b"0"))
    plain, by_kernel = found
    assert len(plain) > rows
    assert by_kernel == plain


@pytest.mark.parametrize("kernel", [False, True])
def test_a_connection_that_the_server_ends_raises_its_error(
    database: str, slot: str, kernel: bool
) -> None:
    reader = RunReader() if kernel else None
    with replicating(database, slot) as replication:
        execute(database, "INSERT INTO t VALUES (1, 'first')")
        changes_until(replication, reader, b"1")
        execute(database, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
                f"WHERE slot_name = '{slot}'")  # fmt: skip
        with pytest.raises(psycopg2.Error, match="terminating connection") as failure:
            changes_until(replication, reader, b"none")
        assert failure.value.pgcode == "57P01"
        with pytest.raises(psycopg2.Error):
            replication.confirm(Lsn(1), ask=False)
        for _ in range(3):
            with pytest.raises(psycopg2.Error):
                replication.gather(reader)
        with pytest.raises(psycopg2.Error):
            replication.fileno()  # libpq has closed it: there is nothing to wait for


def test_what_is_confirmed_is_what_was_given(database: str, slot: str) -> None:
    ((lsn,),) = execute(
        database, "INSERT INTO t VALUES (1, 'a')", "SELECT pg_current_wal_lsn()::text"
    )
    query = f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{slot}'"
    with replicating(database, slot) as replication:
        changes_until(replication, None, b"1")
        replication.confirm(parse_lsn(lsn), ask=True)
        execute(database, "INSERT INTO t VALUES (2, 'b')")
        changes_until(replication, None, b"2")
        assert execute(database, query) == [(lsn,)]
