"""A violation as a script that a person can read: what happened to the affected stream, in order."""

from __future__ import annotations

import re

from streamfold.testing.adversary.ledger import BrokenPromiseError, Ledger

#: Lines of a script; the oldest ones go first, except those about the affected appends.
_LINES = 120


def script(ledger: Ledger, violation: BrokenPromiseError, seed: int) -> str:
    """The steps that led to a violation: of the affected stream, and of servers and storage."""
    history = violation.history
    lines = list(ledger.events)
    affected: set[str] = set()
    if history is not None:
        for life in history.lives:
            for ancestor in life.ancestors():
                lines += ancestor.history.lines if ancestor.history is not history else []
        lines += history.lines
        affected = set(re.findall(r"append \d+|snapshot \d+", str(violation)))
    lines = sorted(set(lines))
    named = [line for line in lines if any(re.search(rf"\b{name}\b", line[1]) for name in affected)]
    recent = lines[-_LINES:]
    shown = sorted(set(named) | set(recent))
    where = f" (stream {history})" if history is not None else ""
    head = [
        f"VIOLATION{where}: {violation}",
        f"seed {seed}, after {ledger.totals}",
        f"{len(lines)} steps concern it, {len(shown)} are shown; * names it:",
    ]
    marked = set(named)
    return "\n".join(
        [*head, *(f"{'*' if line in marked else ' '} t{line[0]}: {line[1]}" for line in shown)]
    )
