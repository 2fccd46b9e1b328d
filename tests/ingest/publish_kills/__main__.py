"""The long proof of `streamfold publish`: python -m tests.ingest.publish_kills --kills 30 --seed 7

Writers change two tables of a PostgreSQL database at a steady rate while the snapshotter, a Python
worker of Spark, the server or the ingester is killed with SIGKILL, again and again. Afterwards both
archives must equal the tables, row by row: as the library reads them, and as the published rules do.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from streamfold.ingest.postgres.pgoutput import Lsn, parse_lsn
from streamfold.testing.proof_report import ProofReport
from tests.ingest.postgres import execute, temporary_postgres
from tests.ingest.publish_kills.comparison import compare
from tests.ingest.publish_kills.load import LAST_CHANGE, SCHEMA, TABLES, WRITERS, write
from tests.ingest.publish_kills.publication import (
    KILLS_MAX,
    PARTS,
    Publication,
    PublishFailedError,
    artifacts_of,
    largest_pause,
)

#: Seconds after a recovery within which the next kill comes: several diffs, and a base now and then.
WINDOW: Final = 2.5


def prove(kills: int, seed: int, folder: Path, figures: Counter[str]) -> int:
    """Kill parts under load, then compare; returns the violations and adds to the figures."""
    rng, stop = random.Random(seed), threading.Event()
    parts = [part for _ in range(kills) for part in rng.sample(list(PARTS), len(PARTS))][:kills]
    with temporary_postgres() as uri, ThreadPoolExecutor(WRITERS) as pool:
        execute(uri, *SCHEMA)
        with Publication(uri, folder) as publication:
            seeds = [rng.random() for _ in range(WRITERS)]
            writers = [pool.submit(write, uri, random.Random(each), stop) for each in seeds]
            try:
                publication.configure()
                publication.wait_beyond(position_of(uri))
                for number, part in enumerate(parts, 1):
                    time.sleep(rng.uniform(0, WINDOW))  # only chooses the moment
                    kind = publication.kill(part, rng)
                    began, position = time.monotonic(), position_of(uri)
                    figures.update(("kills", f"kills of {kind}"))
                    print(f"{number}: {kind} killed, ", end="", flush=True)
                    publication.wait_beyond(position)
                    print(f"recovered after {time.monotonic() - began:.1f} s", flush=True)
            finally:
                stop.set()
            figures["transactions"] = sum(writer.result() for writer in writers)
            position = position_of(uri)
            execute(uri, LAST_CHANGE)
            publication.wait_beyond(position)
            left_behind = publication.stop()
        different = 0
        for table, query in TABLES.items():
            archive, rows = publication.archive(table), execute(uri, query)
            different += compare(table, archive, rows)
            figures["rows compared"] += 2 * len(rows)
            figures["bases"] += sum(each["kind"] == "snapshot" for each in artifacts_of(archive))
            figures["diffs"] += sum(each["kind"] == "diff" for each in artifacts_of(archive))
            pause = round(largest_pause(archive))
            figures["largest pause s"] = max(figures["largest pause s"], pause)
    figures["differences"] = different
    figures["processes left behind"] = left_behind
    figures.update({f"Spark {name}": number for name, number in publication.spark.items()})
    return different + left_behind


def position_of(uri: str) -> Lsn:
    """Return where the database's log ends."""
    ((position,),) = execute(uri, "SELECT pg_current_wal_insert_lsn()::text")
    return parse_lsn(position)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.ingest.publish_kills", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--kills", type=int, default=30, help=f"at most {KILLS_MAX}")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="kept afterwards; a temporary one by default")
    ProofReport.add_option(parser)
    options = parser.parse_args()
    if not 0 < options.kills <= KILLS_MAX:
        parser.error(f"--kills is {options.kills}: give 1 to {KILLS_MAX}")
    report, figures = ProofReport("publish-kills", options.report), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="streamfold-publish-kills-") as temporary:
        folder: Path = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            violations = prove(options.kills, options.seed, folder.absolute(), figures)
        except PublishFailedError as error:
            print(f"publish {error}")
            violations = 1
    for name, number in figures.items():
        print(f"{number:>12,} {name}")
    if violations:
        print(f"FAILED with seed {options.seed}")
    report.write(violations, figures)
    return int(violations > 0)


if __name__ == "__main__":
    sys.exit(main())
