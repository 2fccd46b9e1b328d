"""The outcome of a run: a table for people, and Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.mutants.trial import Verdict

_HEADER = ("mutation", "promise that it breaks", "caught by", "seed", "seconds")


def caught(verdicts: Sequence[Verdict]) -> int:
    """Mutations that their checks found."""
    return sum(verdict.failure is None for verdict in verdicts)


def text_table(verdicts: Sequence[Verdict]) -> str:
    """The table with columns of equal width."""
    lines = [_HEADER, *map(_cells, verdicts)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def markdown_table(verdicts: Sequence[Verdict]) -> str:
    """The table for the documentation."""
    lines = [_HEADER, ("---",) * len(_HEADER), *map(_cells, verdicts)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def replace_table(page: Path, verdicts: Sequence[Verdict]) -> None:
    """Put the table in place of the one on `page`, which begins with the same header."""
    lines = page.read_text().splitlines(keepends=True)
    header = f"| {' | '.join(_HEADER)} |\n"
    first = lines.index(header)
    last = first
    while last < len(lines) and lines[last].startswith("|"):
        last += 1
    page.write_text("".join([*lines[:first], markdown_table(verdicts), *lines[last:]]))


def _cells(verdict: Verdict) -> tuple[str, str, str, str, str]:
    mutation = verdict.mutation
    check = mutation.check.name if verdict.failure is None else "NOT CAUGHT"
    return mutation.name, mutation.promise, check, verdict.seed or "-", f"{verdict.seconds:.0f}"
