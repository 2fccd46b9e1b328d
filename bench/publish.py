"""Measures `streamfold publish`: how long a commit in PostgreSQL takes to a committed diff.

    python -m bench.publish [--changes N]

A table of a PostgreSQL of its own is published with `--diff-interval 1s`. Rows are updated one at a
time, at moments drawn by chance; an update has arrived when the manifest names a diff with a commit
after the position before it. Beside it stands half an interval, which a change waits on average.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ingest.postgres import execute, temporary_postgres

from bench.store import percentile
from streamfold.ingest.postgres.pgoutput import LSN_ZERO, Lsn, parse_lsn

ROWS = 10_000
INTERVAL = 1.0
#: Seconds between two looks at the manifest, and seconds at most until a change arrives.
LOOK, TIMEOUT = 0.005, 120.0
#: Updates before the measurement: the first ones meet a Java that has compiled nothing yet.
WARM_UP = 10
SEED = 16
RESULTS = Path(__file__).parent / "results" / "publish.json"


@contextmanager
def publishing(uri: str, folder: Path) -> Iterator[Path]:
    """Publish the table; yields the manifest's path once it has the first copy."""
    command = [sys.executable, "-m", "streamfold.cli.main", "publish", uri, "--table", "items"]
    command += ["--to", str(folder), "--diff-interval", f"{INTERVAL:g}s", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if json.loads(line).get("state") == "publishing":
                    break
            yield folder / "public.items" / "manifest.json"
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()


def archived(manifest: Path) -> Lsn:
    """The newest commit that the archive holds."""
    found = json.loads(manifest.read_bytes())["artifacts"] if manifest.exists() else []
    ranges = [one.get("source_range") for one in found]
    return max((parse_lsn(one["last"]) for one in ranges if one), default=LSN_ZERO)


def update(uri: str, manifest: Path, key: int) -> float:
    """Seconds from before the commit of an update to the manifest that holds it."""
    ((text,),) = execute(uri, "SELECT pg_current_wal_insert_lsn()::text")
    before, began = parse_lsn(text), time.monotonic()
    execute(uri, f"UPDATE items SET name = name || '.' WHERE id = {key}")
    while archived(manifest) <= before:
        if time.monotonic() > began + TIMEOUT:
            raise TimeoutError(f"an update was not published within {TIMEOUT:.0f} s")
        time.sleep(LOOK)
    return time.monotonic() - began


def run(changes: int) -> dict[str, float]:
    chance = random.Random(SEED)
    with (
        tempfile.TemporaryDirectory(prefix="bench-publish-") as folder,
        temporary_postgres() as uri,
    ):
        fill = f"INSERT INTO items SELECT n, 'item ' || n FROM generate_series(1, {ROWS}) n"
        execute(uri, "CREATE TABLE items (id int PRIMARY KEY, name text)", fill)
        with publishing(uri, Path(folder) / "archive") as manifest:
            took = []
            for _ in range(WARM_UP + changes):
                took.append(update(uri, manifest, chance.randrange(1, ROWS)))
                time.sleep(chance.uniform(0, 2 * INTERVAL))
    waits = took[WARM_UP:]
    return {
        "changes": len(waits),
        "p50_s": percentile(waits, 0.5),
        "p99_s": percentile(waits, 0.99),
        "half_an_interval_s": INTERVAL / 2,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--changes", type=int, default=60)
    found = run(parser.parse_args().changes)
    print(f"change to committed diff: p50 {found['p50_s']:.2f} s, p99 {found['p99_s']:.2f} s")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
