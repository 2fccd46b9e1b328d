"""Measures what a snapshotter weighs: `python -m bench.weight --help`.

Streams of changes exist before a snapshotter starts, in a process of its own. Measured are the seconds
and processor seconds until all tables are ready, and the memory of all its processes, shared pages
counted once: the most of it until then, and what is left after a while of rest.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from bench.serving import serving
from bench.store import BASIN, MIB, PathNotTakenError, plain_python
from bench.subjects import LOOK, Usage
from streamfold.model.records import Record
from streamfold.records.protobuf import encode_append
from streamfold.spark.stream.client import Endpoint, ServerConnection, StreamCalls

#: Records of one append.
APPEND = 500
#: Bytes of a row's text.
TEXT = 100
#: Seconds for tables to become ready, for a writer to end, and of rest before memory is measured.
TIMEOUT, REST = 900, 5


def fill(url: str, stream: str, rows: int) -> None:
    """Append one insert per row."""
    with ServerConnection(Endpoint(url, BASIN)) as connection:
        streams = StreamCalls(connection)
        for first in range(0, rows, APPEND):
            changes = (_insert(key) for key in range(first, min(rows, first + APPEND)))
            streams.append(stream, b"".join(encode_append(Record(change)) for change in changes))


def _insert(key: int) -> bytes:
    row = {"id": key, "name": f"name {key} {'x' * TEXT}"}
    return json.dumps({"op": "c", "key": {"id": key}, "after": row}).encode()


@contextmanager
def writing(url: str, tables: list[str], folder: Path) -> Iterator[tuple[int, int]]:
    """A snapshotter in a process of its own; gives its pid and the port of its status."""
    file, log = folder / "writer.toml", folder / "writer.log"
    shared = (
        'key_fields = ["id"]\nschema = "id BIGINT NOT NULL, name STRING"\n'
        'diff = { interval = "500ms" }\n'
        f'destinations = [{{ type = "local", path = "{folder / "archive"}" }}]\n'
        'formats = { snapshot = ["parquet"], diff = ["parquet"] }\n'
    )
    sources = (
        f'source = {{ server = "{url}", basin = "{BASIN}", stream = "{name}", table = "{name}" }}\n'
        for name in tables
    )
    sections = "".join(f"[[tables]]\n{source}{shared}" for source in sources)
    file.write_text(f'http = {{ port = 0, host = "127.0.0.1" }}\n{sections}')
    command = [sys.executable, "-m", "streamfold.cli.main", "snapshotter", "run", "--json"]
    with log.open("wb") as output:
        writer = subprocess.Popen(
            [*command, "--config", str(file)], stdout=subprocess.PIPE, stderr=output
        )
    with writer:
        try:
            line = writer.stdout.readline() if writer.stdout else b""
            if not line:
                raise RuntimeError(f"the writer did not start: {log.read_text()[-2000:]}")
            yield writer.pid, int(json.loads(line)["port"])
            writer.send_signal(signal.SIGTERM)
            if writer.wait(TIMEOUT):
                raise RuntimeError(f"the writer failed: {log.read_text()[-2000:]}")
        finally:
            writer.kill()


def is_ready(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health/ready") as answer:
            return bool(answer.status == 200)
    except URLError:
        return False


def run(rows: int, tables: int, folder: Path) -> dict[str, Any]:
    names = [f"table-{number}" for number in range(tables)]
    with serving("local", names, folder) as server:
        url = f"http://127.0.0.1:{server.port}"
        for name in names:
            fill(url, name, rows)
        began, usage = time.perf_counter(), Usage()
        with writing(url, names, folder) as (pid, port):
            while not is_ready(port):
                if time.perf_counter() - began > TIMEOUT:
                    raise TimeoutError(f"{tables} tables are not ready after {TIMEOUT} s")
                usage.look(pid)
                time.sleep(LOOK)
            seconds = time.perf_counter() - began
            usage.look(pid)
            time.sleep(REST)
            resting = Usage()
            resting.look(pid)
            processes = 1 + len(psutil.Process(pid).children(recursive=True))
        _check_rows(folder, names, rows)
    return {
        "tables": tables,
        "rows": rows,
        "ready_s": round(seconds, 1),
        "cpu_s": round(sum(usage.cpu.values()), 1),
        "peak_mib": round(usage.peaks["peak"] / MIB),
        "resting_mib": round(resting.peaks["peak"] / MIB),
        "processes": processes,
        "plain_python_us": plain_python(),
        "load": os.getloadavg()[0],
    }


def _check_rows(folder: Path, tables: list[str], rows: int) -> None:
    for table in tables:
        manifest = json.loads((folder / "archive" / table / "manifest.json").read_bytes())
        found = sum(artifact.get("row_count") or 0 for artifact in manifest["artifacts"])
        if found != rows:
            raise PathNotTakenError(f"table {table} was ready with {found} of {rows} rows")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--tables", type=int, nargs="+", default=[1, 2, 20])
    parser.add_argument("--results", type=Path, default=Path("bench/results/weight.json"))
    given = parser.parse_args()
    results = []
    print(
        "| tables | rows of each | s until ready | CPU s | MiB at most | MiB at rest | processes |"
    )
    print("|---|---|---|---|---|---|---|")
    for tables in given.tables:
        with tempfile.TemporaryDirectory(prefix="bench-weight-") as folder:
            found = run(given.rows, tables, Path(folder))
        results.append(found)
        print(
            f"| {tables} | {given.rows:,} | {found['ready_s']} | {found['cpu_s']} "
            f"| {found['peak_mib']} | {found['resting_mib']} | {found['processes']} |",
            flush=True,
        )
    print(f"load {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores")
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
