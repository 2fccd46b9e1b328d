"""The last figures of each proof, as docs/guarantees.md shows them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from tests.prove.proofs import PROOFS
from tests.prove.results import ProofResult, markdown_table
from tests.prove.runner import ROOT

FIGURES = ROOT / "docs" / "proofs.json"
PAGE = ROOT / "docs" / "guarantees.md"
BEGIN, END = "<!-- figures of make prove: begin -->\n", "<!-- figures of make prove: end -->\n"


def read_published(figures: Path = FIGURES) -> list[ProofResult]:
    """Return what was published last, of each proof."""
    if not figures.exists():
        return []
    return msgspec.json.decode(figures.read_bytes(), type=list[ProofResult])


def publish(results: Iterable[ProofResult], figures: Path = FIGURES, page: Path = PAGE) -> None:
    """Replace the rows of these proofs; the rows of others keep their date and commit."""
    rows = {row.proof: row for row in read_published(figures)}
    rows.update((result.proof, result) for result in results)
    order = {proof.name: place for place, proof in enumerate(PROOFS)}
    ordered = sorted(rows.values(), key=lambda row: (order.get(row.proof, len(order)), row.proof))
    figures.write_bytes(msgspec.json.format(msgspec.json.encode(ordered)) + b"\n")
    page.write_text(with_table(page.read_text(), ordered))


def with_table(text: str, results: Iterable[ProofResult]) -> str:
    """Return the page with this table between its marks."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no marks {BEGIN.strip()!r} and {END.strip()!r}")
    return f"{head}{BEGIN}\n{markdown_table(results)}\n{END}{tail}"
