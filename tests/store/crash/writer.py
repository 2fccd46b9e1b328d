"""The process that gets killed: python -m tests.store.crash.writer <url> <run> <seed> <ledger file>

Opens the store and compares it with the ledger; without a ledger, takes the store over from the process
that has it. Then writes until it is killed, or until another writer takes the store over. Every event
is one line of JSON on standard output, written at once.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

import msgspec

from streamfold.store.settings import StoreSettings
from streamfold.store.store import open_store, wall_clock
from tests.store.crash.ledger import Event, Ledger
from tests.store.crash.load import Load, prepare
from tests.store.crash.verify import verify
from tests.store.small_tables import use_small_tables

#: Short, so that trimmed records are deleted and restore points are made as well. Seconds.
_SETTINGS = StoreSettings(
    upkeep_interval=0.2, trim_grace=0, reclaim_after=0.2, chunk_file_bytes=1500
)


def report(event: Event) -> None:
    """Write one line: all of it, or as much as the process lives to write."""
    line = msgspec.json.encode(event) + b"\n"
    while line:
        line = line[os.write(1, line) :]


async def write(url: str, run: str, seed: int, ledger: Ledger | None) -> None:
    skew = random.Random(f"{seed}.{run}").randint(-3_600_000, 3_600_000)  # clocks are set back, too
    opening = open_store(url, _SETTINGS, now=lambda: wall_clock() + skew, take_over=ledger is None)
    async with opening as store:
        if ledger is not None:
            for event in await verify(store, ledger):
                report(event)
        await prepare(store)
        await Load(store, run, seed, report).run()


def main() -> None:
    url, run, seed, ledger_file = sys.argv[1:]
    use_small_tables()  # they come and go within the life of a writer
    ledger = Path(ledger_file).read_bytes() if ledger_file else None
    reported = msgspec.json.decode(ledger, type=Ledger) if ledger else None
    asyncio.run(write(url, run, int(seed), reported))


if __name__ == "__main__":
    main()
