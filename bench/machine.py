"""Whether this machine is quiet enough to measure on, and what it is: `python -m bench.machine`.

`make bench` begins with this, and the pages of the benchmarks say what it found.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench.store import bare_sync_loop, plain_python, processor_times, stolen_share

#: Part of all processors that others may use; seconds of one look; looks until it is given up.
BUSY_MAX, LOOK, LOOKS = 0.10, 3.0, 40
KEPT = Path(__file__).parent / "results" / "machine.json"


class NotQuietError(Exception):
    """Other processes use the machine: what would be measured is not ours."""


def wait_until_quiet() -> float:
    """Wait until the processors are idle; returns the part in use, or raises `NotQuietError`."""
    for _ in range(LOOKS):
        since = processor_times()
        busy: float = psutil.cpu_percent(LOOK) / 100 + stolen_share(since)
        if busy <= BUSY_MAX:
            return busy
    raise NotQuietError(
        f"{busy:.0%} of the processors were in use for {LOOK * LOOKS:.0f} s, and more than "
        f"{BUSY_MAX:.0%} would change the figures: stop what runs beside this, or give --noisy"
    )


def conditions(folder: Path, busy: float | None, extra: Sequence[str] = ()) -> list[str]:
    """What a reader needs to judge the figures."""
    memory = psutil.virtual_memory().total / (1 << 30)
    bare = bare_sync_loop(folder)
    day = time.strftime("%Y-%m-%d", time.gmtime())
    state = f"was {busy or 0.0:.0%} busy before the first measurement"
    if busy is None:
        state = f"was not quiet, with a load average of {os.getloadavg()[0]:.1f} before the run"
    return [
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, "
        f"Python {platform.python_version()}, {day}; the machine {state}",
        f"a bare write + fsync + fsync of the folder took {bare['p50_ms']:.2f} ms (p50), "
        f"{bare['p99_ms']:.2f} ms (p99); sum(range(1000)) in plain Python {plain_python():.1f} µs",
        *extra,
    ]


def load_after(busy: float | None) -> list[str]:
    """What else a reader needs where others were at work: nothing if it was quiet before."""
    if busy is not None:
        return []
    load = max(os.getloadavg())
    return [
        f"others worked on the machine meanwhile: a load average of up to {load:.1f}, its own included"
    ]


def kept_conditions() -> list[str]:
    """What `python -m bench.machine` found before the benchmarks ran."""
    found: list[str] = json.loads(KEPT.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--noisy", action="store_true", help="measure although others are at work")
    busy = None if parser.parse_args().noisy else wait_until_quiet()
    with tempfile.TemporaryDirectory(prefix="streamfold-bench-") as folder:
        found = conditions(Path(folder), busy)
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps(found, indent=1))
    print("\n".join(found))


if __name__ == "__main__":
    main()
