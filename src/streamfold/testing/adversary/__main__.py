"""Attack a server: python -m streamfold.testing.adversary --seed 7 --rounds 100 --storage local"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from streamfold.errors import InvalidError
from streamfold.testing.adversary.campaign import Campaign
from streamfold.testing.adversary.ledger import BrokenPromiseError, Totals
from streamfold.testing.adversary.report import script
from streamfold.testing.adversary.storage import FlakyBucket, LocalFolder, Storage


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m streamfold.testing.adversary", description=__doc__
    )
    parser.add_argument("--seed", type=int, help="default: a fresh one, which is printed")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--storage", choices=["local", "s3"], default="local")
    parser.add_argument("--folder", type=Path, help="kept afterwards; a temporary one by default")
    parser.add_argument("--workers", type=int, default=16, help="clients at work at once")
    parser.add_argument("--seconds", type=float, default=1.5, help="of work in one round")
    parser.add_argument("--source", help="folder with another version of the package streamfold")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # a line for each connection that broke
    folder: Path = arguments.folder or Path(tempfile.mkdtemp(prefix="streamfold-adversary-"))
    environment = {"PYTHONPATH": arguments.source} if arguments.source else {}
    started = time.monotonic()

    def progress(totals: Totals) -> None:
        print(f"… {time.monotonic() - started:.0f} s: {totals}", file=sys.stderr, flush=True)

    try:
        storage: Storage = (
            FlakyBucket() if arguments.storage == "s3" else LocalFolder(folder / "store")
        )
    except InvalidError as error:
        parser.error(error.message)
    campaign = Campaign(
        seed, folder, storage, environment, arguments.workers, arguments.seconds, progress
    )
    try:
        totals = asyncio.run(_run(campaign, arguments.rounds))
    except BrokenPromiseError as violation:
        print(script(campaign.ledger, violation, seed))
        print(f"after {time.monotonic() - started:.0f} s; the store and the log are in {folder}")
        sys.exit(1)
    print(f"seed {seed}: no violation in {time.monotonic() - started:.0f} s: {totals}")
    if arguments.folder is None:
        shutil.rmtree(folder, ignore_errors=True)


async def _run(campaign: Campaign, rounds: int) -> Totals:
    task = asyncio.current_task()
    assert task is not None
    # Ended from outside, it still ends its servers.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await campaign.run(rounds)


if __name__ == "__main__":
    main()
