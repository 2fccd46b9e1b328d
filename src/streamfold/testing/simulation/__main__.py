"""Runs many seeds: python -m streamfold.testing.simulation --first 1 --seeds 1000"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from streamfold.testing.simulation import ViolationError, simulate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--trace", action="store_true", help="print every step of each run")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # failing storage is what these runs are about
    sys.unraisablehook = lambda _: None  # a crash leaves tasks behind that never end
    calls = acked = unknown = stops = crashes = 0
    began = time.monotonic()
    for seed in range(options.first, options.first + options.seeds):
        try:
            report = simulate(seed)
        except ViolationError as violation:
            print(f"after {time.monotonic() - began:.1f} s: {violation}")
            return 1
        if options.trace:
            print("\n".join(report.trace))
        calls += report.calls
        acked += report.acked
        unknown += report.unknown
        stops += report.stops
        crashes += report.crashes
    print(
        f"{options.seeds} seeds from {options.first}, {time.monotonic() - began:.0f} s: {calls} calls, "
        f"{acked} records acknowledged, {unknown} appends of unknown outcome, {stops} stops, "
        f"{crashes} crashes; 0 violations"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
