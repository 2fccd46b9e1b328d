"""README and landing page show the figures that docs/benchmarks has."""

from __future__ import annotations

import pytest
from bench.report import FOLDER, Row, kept

from tests.docs.test_reading import ROOT

BENCHMARKS = {benchmark.name: benchmark for benchmark in kept(FOLDER)}
STEADY, FOLD = "steady 20 MiB/s of 1 KiB for 45 s, ack p99", "re-base of 20,000,000 changes"
MANY = "256 B appends, 500 streams, protobuf, h2"


def row(name: str, measure: str, unit: str) -> Row:
    [found] = [row for row in BENCHMARKS[name].rows if (row.measure, row.unit) == (measure, unit)]
    return found


def ours(row: Row) -> float:
    return row.samples[0].median


def theirs(row: Row, subject: str) -> tuple[float, float]:
    """The value of another subject, and how many times better ours is."""
    [sample] = [sample for sample in row.samples if sample.subject == subject]
    return sample.median, row.ratio(sample)


def figures() -> list[str]:
    steady, many = row("s2", STEADY, "ms"), row("s2", MANY, "acks/s")
    seconds, memory = row("fold", FOLD, "s"), row("fold", FOLD, "MiB")
    p99, lower = theirs(steady, "s2-lite")
    rate, share = theirs(many, "s2-lite")
    duck_seconds, faster = theirs(seconds, "duckdb")
    duck_memory, less = theirs(memory, "duckdb")
    return [
        f"{ours(steady):.0f} ms, s2-lite {p99:.0f} ms",
        f"[{lower:.1f}x lower]",
        f"{ours(seconds):.1f} s in {ours(memory) / 1024:.1f} GiB, "
        f"DuckDB {duck_seconds:.0f} s in {duck_memory / 1024:.1f} GiB",
        f"[{faster:.1f}x faster, {less:.1f}x less memory]",
        f"{ours(many):,.0f}/s, s2-lite {rate:,.0f}/s",
        f"[{share:.2f}x: ",
    ]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_pages_show_the_published_figures(page: str) -> None:
    text = (ROOT / page).read_text()
    assert [figure for figure in figures() if figure not in text] == []
