"""The long proof: python -m tests.store.crash --kills 150 --seed 7"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from streamfold.testing.proof_report import ProofReport
from tests.store.crash.killer import Killer, Summary, WriterFailedError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.store.crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=150)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="kept afterwards; a temporary one by default")
    ProofReport.add_option(parser)
    arguments = parser.parse_args()
    report = ProofReport("kills", arguments.report)
    with tempfile.TemporaryDirectory(prefix="streamfold-crash-") as temporary:
        folder: Path = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        killer = Killer(folder, arguments.seed)
        try:
            print(asyncio.run(killer.run(arguments.kills, _progress)))
        except WriterFailedError:
            report.write(1, killer.summary.figures())
            raise
        report.write(0, killer.summary.figures())


def _progress(summary: Summary) -> None:
    if summary.kills % 10 == 0:
        print(f"… {summary.kills} kills, {summary.acked_batches} acks", file=sys.stderr)


if __name__ == "__main__":
    main()
