"""Runs many seeds: python -m streamfold.testing.simulation --first 1 --seeds 1000"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections import Counter

from streamfold.testing.proof_report import ProofReport
from streamfold.testing.simulation.books import SimulationReport
from streamfold.testing.simulation.ledger import ViolationError
from streamfold.testing.simulation.plan import (
    SimulationPlan,
    draw_plan,
    format_numbers,
    parse_numbers,
)
from streamfold.testing.simulation.program import shrink, simulate

#: Report fields to sum over all runs, and how to print them.
_FIGURES = {
    "steps": "steps",
    "calls": "calls",
    "requests": "requests through the faces",
    "acked": "records acknowledged",
    "refused": "records refused",
    "unknown": "appends of unknown outcome",
    "compared": "records compared by readers",
    "vanished": "clients vanished",
    "broken": "answers broken off",
    "stops": "stops",
    "crashes": "crashes",
    "replacements": "take-overs",
}


def main() -> int:
    options = _parse()
    logging.disable(logging.CRITICAL)  # storage fails on purpose here
    gc.collect()
    gc.freeze()
    report = ProofReport("simulation", options.report)
    figures: Counter[str] = Counter()
    began, violation, plan, seeds = time.monotonic(), None, None, 0
    for seed in range(options.first, options.first + options.seeds):
        if options.seconds is not None and time.monotonic() - began > options.seconds:
            break
        seeds += 1
        plan = _plan(seed, options)
        try:
            _add(figures, simulate(seed, plan=plan), trace=options.trace)
        except ViolationError as error:
            violation = str(error)
            break
    seconds = time.monotonic() - began
    if violation is not None and plan is not None:
        _tell(plan, violation, seconds, options)
    else:
        listed = ", ".join(f"{value} {name}" for name, value in figures.items())
        print(
            f"{seeds} programs from seed {options.first}, {seconds:.0f} s: {listed}; 0 violations"
        )
    report.write(int(violation is not None), {"programs": seeds, **figures})
    return 1 if violation is not None else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--seconds", type=float, help="stop after this many seconds")
    parser.add_argument("--store-only", action="store_true", help="leave the faces out")
    parser.add_argument("--keep", help="run only these operations of the program, as in 3,17,40-44")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="KIND",
        help="leave operations of a kind out, such as 'delete basin'; may be repeated",
    )
    parser.add_argument("--trace", action="store_true", help="print every call of each run")
    parser.add_argument("--no-shrink", action="store_true", help="report a violation as it is")
    ProofReport.add_option(parser)
    return parser.parse_args()


def _plan(seed: int, options: argparse.Namespace) -> SimulationPlan:
    plan = draw_plan(seed, faces=not options.store_only)
    numbers = {call.number for call in plan.operations if call.kind not in options.without}
    return plan.keep(numbers if options.keep is None else parse_numbers(options.keep))


def _add(figures: Counter[str], report: SimulationReport, *, trace: bool) -> None:
    if trace:
        print("\n".join(report.trace))
    for name, shown in _FIGURES.items():
        figures[shown] += getattr(report, name)
    for kind, count in report.faults.items():
        figures[kind] += count


def _tell(
    plan: SimulationPlan, violation: str, seconds: float, options: argparse.Namespace
) -> None:
    """Print a violation, the command that reproduces it, and a shrunk program that violates too."""
    command = f"python -m streamfold.testing.simulation --first {plan.seed} --seeds 1"
    if options.store_only:
        command += " --store-only"
    for kind in options.without:
        command += f" --without '{kind}'"
    print(f"after {seconds:.1f} s: {violation}\nRepeat it: {command} --no-shrink")
    if options.no_shrink:
        return
    began = time.monotonic()
    smaller, story = shrink(plan)
    numbers = format_numbers([operation.number for operation in smaller.operations])
    print(
        f"\nShrunk from {len(plan.operations)} operations to {len(smaller.operations)} in "
        f"{time.monotonic() - began:.1f} s: {story}\n"
        f"The operations: {'; '.join(smaller.describe())}\n"
        f"Repeat it: {command} --no-shrink --trace --keep {numbers}"
    )


if __name__ == "__main__":
    sys.exit(main())
