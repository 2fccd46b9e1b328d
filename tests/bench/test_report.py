"""Pages in docs/benchmarks/ state the conditions and the direction of each ratio."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.pages import console
from bench.report import HEADLINES, Benchmark, Row, Sample, headline_rows, kept, publish

RATE = Row(
    "appends", "acks/s", [Sample("Streamfold", [300.0, 200.0, 100.0]), Sample("peer", [50.0])]
)
LATENCY = Row("ack", "ms", [Sample("Streamfold", [2.0]), Sample("peer", [8.0])], more=False)


def benchmark(*rows: Row) -> Benchmark:
    return Benchmark("speed", "Speed", "About it.", "python -m it", ["2 cores"], list(rows))


@pytest.mark.parametrize("row", [RATE, LATENCY], ids=["more is better", "less is better"])
def test_a_ratio_above_one_means_that_ours_is_better(row: Row) -> None:
    assert row.ratio(row.samples[1]) == 4.0


def test_a_page_shows_medians_with_their_spread_and_the_ratios(tmp_path: Path) -> None:
    publish(benchmark(RATE, LATENCY), tmp_path)
    page = (tmp_path / "speed.md").read_text()
    assert "| appends | 200 (100-300) acks/s | 50 | **4.00** |" in page
    assert "| ack | 2 ms | 8 | **4.00** |" in page
    assert "- 2 cores" in page
    assert "[Speed](speed.md)" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "speed.svg").read_text().count("<svg") == 1


def test_the_first_page_begins_with_a_chart_of_its_headlines(tmp_path: Path) -> None:
    headline = HEADLINES[0]
    measured = Row(
        headline.measure,
        headline.unit,
        [Sample("Streamfold", [20.0]), Sample(headline.subject, [50.0])],
        more=False,
    )
    others = Row("appends", "acks/s", [Sample("Streamfold", [1.0]), Sample("peer", [2.0])])
    page = Benchmark(headline.benchmark, "S2", "", "", [], [others, measured])
    publish(page, tmp_path)
    lines = (tmp_path / "README.md").read_text().splitlines()
    assert lines[2] == "![Ratio to the others; above 1 means better](headlines.svg)"
    assert f"| {headline.words} | 20 ms | s2-lite 50 ms | [2.50](s2.md) |" in lines
    assert (tmp_path / "headlines.svg").read_text().count("<svg") == 1


def test_every_headline_has_a_published_figure() -> None:
    assert [one[0] for one in headline_rows(kept())] == list(HEADLINES)


def test_what_was_published_is_read_back(tmp_path: Path) -> None:
    publish(benchmark(RATE), tmp_path)
    assert kept(tmp_path) == [benchmark(RATE)]


def test_a_measure_that_the_peer_lacks_has_an_empty_cell(tmp_path: Path) -> None:
    publish(
        benchmark(RATE, Row("memory", "MiB", [Sample("Streamfold", [9.0])], more=False)), tmp_path
    )
    assert "| memory | 9 MiB |  |  |" in (tmp_path / "speed.md").read_text()


def test_the_page_of_the_console_has_each_figure_beside_another() -> None:
    found = {
        "paint_ms": [300.0, 200.0], "bare_paint_ms": [50.0],
        "visible": {"p50_ms": 40.0, "ack_p50_ms": 10.0},
        "scroll": {"records": 100_000, "longest_ms": 34.0, "rest_longest_ms": 17.0},
        "large": {"longest_ms": 60.0, "small_longest_ms": 30.0},
    }  # fmt: skip
    rows = console(found)
    assert [row.ratio(row.samples[1]) for row in rows] == [0.2, 0.25, 0.5, 0.5]
    assert rows[2].measure == "longest frame, 100,000 records scrolled"
