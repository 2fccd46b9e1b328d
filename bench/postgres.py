"""Measures `streamfold ingest postgres`: `python -m bench.postgres --help`.

Against a PostgreSQL of its own, with pgbench's tables and load:

- the first copy, beside COPY of the same table to a file and to a client that drops it, and the
  processor time of each process: on two cores their sum is the limit,
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import psycopg2
from tests.ingest.postgres import binaries, execute, temporary_postgres

from bench.serving import Served, serving
from bench.store import BASIN

#: Tables of pgbench that have a key.
TABLES = ("pgbench_accounts", "pgbench_branches", "pgbench_tellers")
ROWS_PER_SCALE = 100_000
RESULTS = Path(__file__).parent / "results" / "postgres.json"
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

    def wait_for_copies(self, on_begin: Callable[[], None] = lambda: None) -> float:
        """Return seconds from the first row to the end of all copies."""
        assert self._process.stdout is not None
        began, left = 0.0, len(TABLES)
        for line in self._process.stdout:
            state = json.loads(line)["state"]
            if state == "copying" and not began:
                on_begin()
                began = time.monotonic()
            left -= state == "following"
            if not left:
                return time.monotonic() - began
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
        return processor_seconds(self._process.pid)

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


def processor_seconds(pid: int) -> float:
    """Of a process, and of its children that have ended."""
    return float(sum(psutil.Process(pid).cpu_times()[:4]))


def database_seconds(uri: str) -> float:
    """Processor seconds of all processes of the database."""
    ((folder,),) = execute(uri, "SHOW data_directory")
    server = psutil.Process(int((Path(folder) / "postmaster.pid").read_text().split()[0]))
    found = processor_seconds(server.pid)
    for child in server.children():
        with suppress(psutil.NoSuchProcess):
            found += processor_seconds(child.pid)
    return found


def mark(uri: str) -> str:
    """Return a position after all changes, and before one more: an ingester confirms commits."""
    ((lsn,),) = execute(uri, "SELECT pg_current_wal_lsn()::text")
    execute(uri, "UPDATE pgbench_branches SET bbalance = bbalance WHERE bid = 1")
    return str(lsn)


class CopyTime(NamedTuple):
    """What COPY of the largest table takes."""

    seconds: float
    #: Of the database.
    processor_seconds: float


def copy_to_file(uri: str) -> CopyTime:
    """By the database itself, into a file beside its own; nothing is synced."""
    ((folder,),) = execute(uri, "SHOW data_directory")
    target = Path(folder) / "copied"
    spent, began = database_seconds(uri), time.monotonic()
    execute(uri, f"COPY pgbench_accounts TO '{target}'")
    taken = CopyTime(time.monotonic() - began, database_seconds(uri) - spent)
    target.unlink()
    return taken


def copy_to_client(uri: str) -> CopyTime:
    """By a client that drops the rows."""
    spent = database_seconds(uri)
    with psycopg2.connect(uri) as connection, connection.cursor() as cursor:
        began = time.monotonic()
        with Path("/dev/null").open("wb") as target:
            cursor.copy_expert("COPY pgbench_accounts TO STDOUT", target)
        seconds = time.monotonic() - began
        return CopyTime(seconds, database_seconds(uri) - spent)


#: What was measured, by name.
Found = dict[str, float]


def first_copy(
    uri: str,
    served: Served,
    rows: int,
    ingester: Ingester,
    to_file: CopyTime,
    to_client: CopyTime,
) -> Found:
    """Measure the first copy, and what each process does for a row."""

    def spent() -> tuple[float, ...]:
        return database_seconds(uri), ingester.processor_seconds(), processor_seconds(served.pid)

    before: list[tuple[float, ...]] = []
    copied = ingester.wait_for_copies(lambda: before.append(spent()))
    parts = [(after - was) / rows * 1e6 for was, after in zip(before[0], spent(), strict=True)]
    for name, plain in ("a file", to_file), ("a client", to_client):
        print(f"first copy: {rows / copied:,.0f} rows/s, COPY to {name} {rows / plain.seconds:,.0f}: "
              f"{plain.seconds / copied:.2f} x (PostgreSQL "
              f"{plain.processor_seconds / rows * 1e6:.2f} us per row)")  # fmt: skip
    print(f"processor us per row: PostgreSQL {parts[0]:.2f}, ingester {parts[1]:.2f}, "
          f"server {parts[2]:.2f}")  # fmt: skip
    found: Found = {"rows_per_s": rows / copied, "rows": rows}
    found["copy_to_file_per_s"] = rows / to_file.seconds
    found["copy_to_client_per_s"] = rows / to_client.seconds
    names = ("postgres_us", "ingester_us", "server_us")
    return found | dict(zip(names, parts, strict=True))


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


def run(uri: str, served: Served, scale: int, seconds: int) -> dict[str, Found]:
    initialize = [str(binaries() / "pgbench"), "-i", "-q", "-s", str(scale), uri]
    subprocess.run(initialize, check=True, capture_output=True)
    rows = ROWS_PER_SCALE * scale
    to_file, to_client = copy_to_file(uri), copy_to_client(uri)
    with ingesting(uri, served, "bench") as ingester:
        copied = first_copy(uri, served, rows, ingester, to_file, to_client)
        ingester.wait_for(mark(uri))
        beside = load(uri, seconds)
        began = time.monotonic()
        ingester.wait_for(mark(uri))
        behind = time.monotonic() - began
    alone = load(uri, seconds)
    print(f"pgbench: {beside:,.0f} transactions/s with ingest, {alone:,.0f} without: "
          f"{beside / alone:.2f} x; confirmed {behind:.1f} s after the end")  # fmt: skip
    pgbench = {"beside_per_s": beside, "alone_per_s": alone, "behind_s": behind}
    return {
        "first_copy": copied,
        "pgbench": pgbench,
        "backlog": backlog(uri, served, seconds),
    }


def backlog(uri: str, served: Served, seconds: int) -> Found:
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
          f"{received:.1f} s: {received / took:.2f} x; "
          f"{spent / transactions / len(TABLES) * 1e6:.1f} processor us per change")  # fmt: skip
    found = {"transactions": transactions, "ingest_s": took, "pg_recvlogical_s": received}
    return found | {"processor_s": spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=40, help="hundred thousands of rows")
    parser.add_argument("--seconds", type=int, default=30, help="of each load")
    parser.add_argument("--backend", default="file", help="memory or file")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        temporary_postgres() as uri,
        serving(given.backend, [], Path(folder)) as served,
    ):
        found = run(uri, served, given.scale, given.seconds)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
