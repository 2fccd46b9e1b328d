"""Measures `streamfold ingest postgres`: `python -m bench.postgres --help`.

Against a PostgreSQL of its own, with pgbench's tables and load:

- the first copy, beside COPY of the same table to a client that drops it,
- pgbench's transactions per second with an ingester that follows all four tables, beside those without,
- a backlog of changes, beside pg_recvlogical, which writes the same changes to a file undecoded.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg2
from tests.ingest.postgres import binaries, execute, temporary_postgres

from bench.serving import Served, serving
from bench.store import BASIN

#: Tables of pgbench that have a key.
TABLES = ("pgbench_accounts", "pgbench_branches", "pgbench_tellers")
ROWS_PER_SCALE = 100_000
#: Seconds that an ingester may take for what is measured.
TIMEOUT = 600


class Ingester:
    """An ingester in a process of its own, over all tables."""

    def __init__(self, uri: str, served: Served, slot: str) -> None:
        tables = [part for table in TABLES for part in ("--table", table)]
        self._uri, self._slot = uri, slot
        self.began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "streamfold.cli.main", "ingest", "postgres", "--dsn", uri, *tables,
             "--basin", BASIN, "--slot", slot, "--prefix", f"{slot}/", "--endpoint", served.url,
             "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def wait_for_copies(self) -> tuple[float, float]:
        """Return seconds from the first row to the end of all copies, and processor seconds."""
        assert self._process.stdout is not None
        began, left = 0.0, len(TABLES)
        for line in self._process.stdout:
            state = json.loads(line)["state"]
            began = began or (time.monotonic() if state == "copying" else 0.0)
            left -= state == "following"
            if not left:
                return time.monotonic() - began, self.processor_seconds()
        raise RuntimeError("the ingester ended")

    def wait_for(self, lsn: str) -> None:
        """Wait until everything up to a position is confirmed."""
        deadline = time.monotonic() + TIMEOUT
        query = (
            f"SELECT confirmed_flush_lsn >= '{lsn}' FROM pg_replication_slots "
            f"WHERE slot_name = '{self._slot}'"
        )
        while execute(self._uri, query) != [(True,)]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"position {lsn} was not confirmed in {TIMEOUT} s")
            time.sleep(0.05)

    def processor_seconds(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


@contextmanager
def ingesting(uri: str, served: Served, slot: str) -> Iterator[Ingester]:
    ingester = Ingester(uri, served, slot)
    try:
        yield ingester
    finally:
        ingester.stop()


def mark(uri: str) -> str:
    """Return a position after all changes, and before one more: an ingester confirms commits."""
    ((lsn,),) = execute(uri, "SELECT pg_current_wal_lsn()::text")
    execute(uri, "UPDATE pgbench_branches SET bbalance = bbalance WHERE bid = 1")
    return str(lsn)


def copy_seconds(uri: str) -> float:
    """How long COPY of the largest table takes."""
    with psycopg2.connect(uri) as connection, connection.cursor() as cursor:
        began = time.monotonic()
        with Path("/dev/null").open("wb") as target:
            cursor.copy_expert("COPY pgbench_accounts TO STDOUT", target)
        return time.monotonic() - began


def load(uri: str, seconds: int) -> float:
    """Transactions per second of pgbench."""
    command = [str(binaries() / "pgbench"), "-n", "-c", "4", "-T", str(seconds), uri]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"tps = ([\d.]+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def received_seconds(uri: str, slot: str, end: str) -> float:
    """How long pg_recvlogical takes for the changes up to `end`."""
    command = [
        str(binaries() / "pg_recvlogical"), "-d", uri, "--slot", slot, "--start", "--no-loop",
        "-o", "proto_version=1", "-o", "publication_names=streamfold", "-f", "/dev/null",
        "--endpos", end,
    ]  # fmt: skip
    began = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    return time.monotonic() - began


def run(uri: str, served: Served, scale: int, seconds: int) -> None:
    initialize = [str(binaries() / "pgbench"), "-i", "-q", "-s", str(scale), uri]
    subprocess.run(initialize, check=True, capture_output=True)
    rows = ROWS_PER_SCALE * scale
    plain = copy_seconds(uri)
    with ingesting(uri, served, "bench") as ingester:
        copied, spent = ingester.wait_for_copies()
        print(f"first copy: {rows / copied:,.0f} rows/s, COPY {rows / plain:,.0f}: "
              f"{plain / copied:.2f} x; {spent:.1f} processor seconds")  # fmt: skip
        ingester.wait_for(mark(uri))
        beside = load(uri, seconds)
        began = time.monotonic()
        ingester.wait_for(mark(uri))
        behind = time.monotonic() - began
    alone = load(uri, seconds)
    print(f"pgbench: {beside:,.0f} transactions/s with ingest, {alone:,.0f} without: "
          f"{beside / alone:.2f} x; confirmed {behind:.1f} s after the end")  # fmt: skip
    backlog(uri, served, seconds)


def backlog(uri: str, served: Served, seconds: int) -> None:
    """Measure how quickly a backlog is read by both."""
    execute(uri, "SELECT pg_create_logical_replication_slot('received', 'pgoutput')")
    transactions = load(uri, seconds) * seconds
    end = mark(uri)
    received = received_seconds(uri, "received", end)
    with ingesting(uri, served, "bench") as ingester:
        ingester.wait_for_copies()
        began, spent = time.monotonic(), ingester.processor_seconds()
        ingester.wait_for(end)
        took, spent = time.monotonic() - began, ingester.processor_seconds() - spent
    print(f"backlog of {transactions:,.0f} transactions: {took:.1f} s, pg_recvlogical "
          f"{received:.1f} s: {received / took:.2f} x; {spent:.1f} processor seconds")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=10, help="hundred thousands of rows")
    parser.add_argument("--seconds", type=int, default=30, help="of each load")
    parser.add_argument("--backend", default="file", help="memory or file")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        temporary_postgres() as uri,
        serving(given.backend, [], Path(folder)) as served,
    ):
        run(uri, served, given.scale, given.seconds)


if __name__ == "__main__":
    main()
