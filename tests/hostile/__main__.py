"""Feeds hostile input to every decoder and route, and judges the results.

    python -m tests.hostile --inputs 1000000 --seed 7 --report FILE

Decoders (see `tests/hostile/catalogue.py`) are fuzzed in processes of their own, guided by coverage
where atheris is installed. A tenth of the inputs are requests to a real server. A decoder may return a
value or raise one of the errors that it names. The server may not answer 500, crash, log an error, hold
its loop for more than 50 ms of processor time, or keep the memory; and an ordinary client beside the
attack must be served.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.hostile.attack import REPOSITORY, Outcome, attack
from tests.hostile.coverage import available
from tests.hostile.decoder import Finding

_EXECUTED = re.compile(r"stat::number_of_executed_units: +(\d+)")


class Fuzzed(NamedTuple):
    """What became of one decoder."""

    name: str
    inputs: int
    findings: list[str]


def fuzz_decoders(inputs: int, seed: int, jobs: int, only: str = "") -> list[Fuzzed]:
    """Fuzz all decoders in processes of their own."""
    with tempfile.TemporaryDirectory(prefix="streamfold-fuzz-") as text:
        folder = Path(text)
        command = [
            sys.executable,
            "-m",
            "tests.hostile.coverage",
            str(inputs),
            str(seed),
            str(jobs),
            text,
        ]
        done = subprocess.run([*command, only], cwd=REPOSITORY, check=False)
        places = sorted(folder.iterdir(), key=lambda place: int(place.name))
        if done.returncode or not places:
            raise RuntimeError(f"the fuzzer ended with status {done.returncode}")
        return [_fuzzed(place) for place in places]


def _fuzzed(place: Path) -> Fuzzed:
    name, findings = (place / "name").read_text(), []
    if (place / "findings").exists():
        for line in (place / "findings").read_text().splitlines():
            values = json.loads(line)
            data = base64.b64decode(values.pop("data"))
            findings.append(str(Finding(data=data, **values)))
    findings += [
        f"{name}: {end.name.partition('-')[0]} by {end.read_bytes()[:2_000]!r}"
        for kind in ("crash", "timeout", "oom")
        for end in place.glob(f"{kind}-*")
    ]
    stats = (place / "stats").read_text(errors="replace")
    executed = _EXECUTED.search(stats)
    if executed is None and not findings:
        findings.append(f"{name}: the fuzzer ended early: {stats[-1_000:]}")
    return Fuzzed(name, int(executed[1]) if executed else 0, findings)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hostile",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--routes", type=int, help="requests among them; default: a tenth")
    parser.add_argument("--seed", type=int, help="default: a fresh one, which is printed")
    parser.add_argument("--jobs", type=int, default=2, help="decoders at once")
    parser.add_argument("--only", default="", help="decoders whose name has this in it")
    parser.add_argument("--settle", type=float, default=120.0, help="seconds for memory to return")
    parser.add_argument("--list", action="store_true", help="print the decoders and stop")
    parser.add_argument("--report", type=Path, help="file that gets a line of JSON")
    options = parser.parse_args()
    if options.list:
        _print_catalogue()
        return 0
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    requests = options.inputs // 10 if options.routes is None else options.routes
    print(
        f"seed {seed}; {'guided by coverage' if available() else 'atheris is not installed: no guide'}"
    )
    began = time.monotonic()
    fuzzed = fuzz_decoders(options.inputs - requests, seed, options.jobs, options.only)
    for one in fuzzed:
        print(f"{one.inputs:9,} {one.name}" + "".join(f"\n{finding}" for finding in one.findings))
    outcome = asyncio.run(attack(requests, seed, options.settle)) if requests else Outcome()
    _show(outcome)
    findings = sum(len(one.findings) for one in fuzzed) + len(outcome.findings)
    inputs = sum(one.inputs for one in fuzzed) + outcome.sent
    seconds = time.monotonic() - began
    print(f"seed {seed}: {findings} findings in {inputs:,} inputs, {seconds:.0f} s")
    if options.report is not None:
        _report(options, seed, fuzzed, outcome, findings, seconds)
    return min(findings, 1)


def _show(outcome: Outcome) -> None:
    warm, most, after = outcome.memory
    statuses = ", ".join(f"{status}: {n:,}" for status, n in sorted(outcome.statuses.items()))
    print(
        f"{outcome.sent:9,} requests to {outcome.routes} routes, each {outcome.least_per_route} times "
        f"or more\n  answers (0 is a closed connection): {statuses}\n  longest step "
        f"{outcome.worst_lag:.1f} ms of processor; memory {warm:.0f} MiB once warm, {most:.0f} at "
        f"most, {after:.0f} afterwards; {outcome.ordinary} appends of an ordinary client beside it"
    )
    for finding in outcome.findings:
        print(f"FINDING {finding}")


def _report(
    options: argparse.Namespace,
    seed: int,
    fuzzed: list[Fuzzed],
    outcome: Outcome,
    findings: int,
    seconds: float,
) -> None:
    decoded = sum(one.inputs for one in fuzzed)
    figures = {
        "inputs": decoded + outcome.sent,
        "decoders": len(fuzzed),
        "decoder inputs": decoded,
        "routes": outcome.routes,
        "requests": outcome.sent,
        "longest step ms": outcome.worst_lag,
        "memory mib once warm": round(outcome.memory[0]),
        "memory mib afterwards": round(outcome.memory[2]),
        "appends beside": outcome.ordinary,
    }
    line = {
        "proof": "hostile input",
        "violations": findings,
        "seconds": round(seconds, 1),
        "figures": figures,
        "command": f"python -m tests.hostile --inputs {options.inputs} --seed {seed}",
    }
    with options.report.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def _print_catalogue() -> None:
    from tests.hostile.catalogue import decoders

    for decoder in decoders():
        errors = ", ".join(error.__name__ for error in decoder.errors)
        print(f"{decoder.name}: {len(decoder.seeds)} seeds, raises {errors}")


if __name__ == "__main__":
    sys.exit(main())
