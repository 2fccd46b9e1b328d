"""A real replica: refused while it is one, followed once it is promoted, unless commits are lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from s2_sdk import S2

from streamfold.ingest import SlotLostError, SourceUnusableError
from streamfold.ingest.postgres.ingester import IngestOptions
from streamfold.ingest.postgres.pgoutput import parse_lsn
from tests.ingest.ingesting import ingesting, stream
from tests.ingest.postgres import PATIENCE, binaries, execute, following, temporary_postgres
from tests.proving import PROVING

CHOSEN = IngestOptions(("t",), heartbeat=0.2)


class Replica:
    """A replica of a server, beside its folder."""

    def __init__(self, primary: str) -> None:
        self._primary = primary
        source = Path(primary.partition("host=")[2])
        self._folder = source.parent / "replica"
        self._folder.mkdir(mode=0o700)
        #: PostgreSQL does not run as root.
        self._user = "pgserver" if os.geteuid() == 0 else None
        if self._user is not None:
            found = source.stat()
            os.chown(self._folder, found.st_uid, found.st_gid)
        self.uri = primary.replace(str(source), str(self._folder))
        self._run("pg_basebackup", "-D", str(self._folder), "-d", primary, "-R", "-C", "-S", "replica",
                  "-c", "fast")  # fmt: skip
        (self._folder / ".s.PGSQL.5432.lock").unlink()
        self._set("hot_standby_feedback = on", "sync_replication_slots = on")

    def _set(self, *lines: str) -> None:
        with (self._folder / "postgresql.auto.conf").open("a") as settings:
            settings.writelines(f"{line}\n" for line in lines)

    def disconnect(self) -> None:
        """Receive nothing from the primary after the next start."""
        self._set("primary_conninfo = ''", "sync_replication_slots = off")

    def start(self) -> None:
        arguments = f"-h '' -k {self._folder}"
        log = str(self._folder / "log")
        self._run("pg_ctl", "-D", str(self._folder), "-o", arguments, "-l", log, "-w", "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self._folder), "-m", "immediate", "-w", "stop")

    def take_over_slot(self, slot: str) -> None:
        """Wait until the replica has the slot of an ingester that runs, as of now."""
        ready = f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{slot}' AND NOT temporary"
        deadline = time.monotonic() + PATIENCE
        while not execute(self.uri, ready):
            assert time.monotonic() < deadline
            execute(self._primary, "SELECT pg_log_standby_snapshot()")
            time.sleep(0.1)

    def _run(self, command: str, *arguments: str) -> None:
        # Not through pipes, which a server that stays would keep open.
        subprocess.run(
            [binaries() / command, *arguments], check=True, user=self._user, cwd="/",
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip


@contextmanager
def replicated() -> Iterator[tuple[str, Replica]]:
    with temporary_postgres() as primary:
        replica = Replica(primary)
        replica.start()
        try:
            yield primary, replica
        finally:
            replica.stop()


async def ingested(uri: str, s2: S2, number: int, replica: Replica | None = None) -> None:
    """Insert a row; returns when the stream has it and the database, and its replica, know that."""
    async with ingesting(uri, s2, CHOSEN) as running:
        await running.followed()
        execute(uri, f"INSERT INTO t VALUES ({number})")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            await until(lambda table: (number,) in table.rows)
        ((end,),) = execute(uri, "SELECT pg_current_wal_flush_lsn()::text")
        await running.until(lambda progress: parse_lsn(progress.confirmed) >= parse_lsn(end))
        if replica is not None:
            await asyncio.to_thread(replica.take_over_slot, CHOSEN.slot)


#: Each takes a primary and a replica.
CASES = {"commits lost": True} | ({"all commits": False} if PROVING else {})


@pytest.mark.parametrize("lost", CASES.values(), ids=CASES)
async def test_a_promoted_replica_is_followed_unless_it_lacks_commits(s2: S2, lost: bool) -> None:
    with replicated() as (primary, replica):
        execute(primary, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
        await ingested(primary, s2, 2, replica)
        async with ingesting(replica.uri, s2, CHOSEN) as running:
            refused = await running.failure()
        assert isinstance(refused, SourceUnusableError)
        assert "is a replica: connect to the primary" in refused.message
        if lost:
            replica.stop()
            await ingested(primary, s2, 3)
            replica.disconnect()
            replica.start()
        execute(replica.uri, f"SELECT pg_promote(true, {PATIENCE:.0f})", "CREATE TABLE other (a text)",
                "INSERT INTO other SELECT repeat('x', 1000) FROM generate_series(1, 5000)")  # fmt: skip
        chosen = CHOSEN
        if lost:
            async with ingesting(replica.uri, s2, CHOSEN) as running:
                failure = await running.failure()
            assert isinstance(failure, SlotLostError)
            assert "as after a failover that lost commits" in failure.message
            chosen = replace(CHOSEN, recopy=True)
        async with ingesting(replica.uri, s2, chosen) as running:
            await running.followed()
        await ingested(replica.uri, s2, 4)
        await ingested(replica.uri, s2, 5)
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: (5,) in table.rows)
    assert rebuilt.table("id") == [(1,), (2,), (4,), (5,)]
