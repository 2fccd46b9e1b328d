"""Breaks guarantees on purpose: python -m tests.mutants [NAME …]"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from streamfold.testing.proof_report import ProofReport
from tests.mutants.mutation import StaleMutationError
from tests.mutants.mutations import MUTATIONS
from tests.mutants.results import caught, replace_table, text_table
from tests.mutants.trial import Laboratory, Verdict


def main() -> int:
    names = [mutation.name for mutation in MUTATIONS]
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--list", action="store_true", help="print the names and promises, and end")
    ProofReport.add_option(parser)
    parser.add_argument("--page", type=Path, help="replace the table on this page")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in names]:
        parser.error(f"no mutation is called {', '.join(unknown)}: --list prints all names")
    if options.list:
        print("\n".join(f"{mutation.name}: {mutation.promise}" for mutation in MUTATIONS))
        return 0
    began, report = time.monotonic(), ProofReport("mutations", options.report)
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="streamfold-mutants-") as folder:
        laboratory = Laboratory(Path(folder))
        for mutation in MUTATIONS:
            if options.names and mutation.name not in options.names:
                continue
            try:
                verdict = laboratory.try_mutation(mutation)
            except StaleMutationError as error:
                verdict = Verdict(mutation, str(error), "", "", 0.0)
            verdicts.append(verdict)
            print(f"{mutation.name}, {verdict.seconds:.1f} s: {_outcome(verdict)}", flush=True)
    seconds = time.monotonic() - began
    print(f"\n{text_table(verdicts)}\n")
    print(f"{caught(verdicts)} of {len(verdicts)} mutations were caught in {seconds:.0f} s")
    if options.page is not None:
        replace_table(options.page, verdicts)
    figures = {"mutations": len(verdicts), "caught": caught(verdicts)}
    report.write(len(verdicts) - caught(verdicts), figures)
    return 0 if caught(verdicts) == len(verdicts) else 1


def _outcome(verdict: Verdict) -> str:
    return verdict.finding if verdict.failure is None else f"NOT CAUGHT: {verdict.failure}"


if __name__ == "__main__":
    sys.exit(main())
