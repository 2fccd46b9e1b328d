"""Run the long proofs with fresh seeds: python -m tests.prove [--short] [--publish] [NAME…]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from tests.prove.proofs import PROOFS
from tests.prove.published import publish
from tests.prove.results import ProofResult, markdown_table, terminal_table
from tests.prove.runner import ROOT, run_proofs


def main() -> int:
    names = [proof.name for proof in PROOFS]
    parser = argparse.ArgumentParser(
        prog="python -m tests.prove",
        description=__doc__,
        epilog=f"Proofs: {', '.join(names)}.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--short", action="store_true", help="sizes that take minutes, not hours")
    parser.add_argument("--seed", type=int, help="default: a fresh one for each, which is printed")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "prove", help="for logs")
    parser.add_argument(
        "--publish", action="store_true", help="write the figures into docs/guarantees.md"
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no proof {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    if options.publish and options.short:
        parser.error("--publish takes the figures of long runs: leave out --short")
    chosen = [proof for proof in PROOFS if not options.names or proof.name in options.names]
    results: list[ProofResult] = []
    interrupted = False
    try:
        for result in run_proofs(chosen, options.folder, options.seed, options.short):
            results.append(result)
            if options.publish:
                publish([result])
    except KeyboardInterrupt:
        interrupted = True
    (options.folder / "results.json").write_bytes(msgspec.json.encode(results))
    (options.folder / "results.md").write_text(markdown_table(results))
    print(terminal_table(results))
    held = sum(result.held for result in results)
    print(f"{held} of {len(chosen)} proofs held." + (" Interrupted." if interrupted else ""))
    return 130 if interrupted else int(held < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
