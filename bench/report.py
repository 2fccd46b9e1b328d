"""Keeps what was measured in docs/benchmarks/: a JSON file for each benchmark, a page and a plot of it.

`python -m bench.report` writes the pages and plots again from the JSON files.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

FOLDER = Path(__file__).parent.parent / "docs" / "benchmarks"


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one subject reached, in every repetition."""

    subject: str
    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One measure of Streamfold, which is the first sample, and of others in the same run."""

    measure: str
    unit: str
    samples: list[Sample]
    #: Whether a larger value is the better one.
    more: bool = True

    def ratio(self, other: Sample) -> float:
        """How many times better than `other`: more of what is wanted, or less of what is not."""
        ours, theirs = self.samples[0].median, other.median
        better, worse = (ours, theirs) if self.more else (theirs, ours)
        if better == worse:
            return 1.0
        return better / worse if worse else float("inf")


class Curve(msgspec.Struct, frozen=True):
    """How a measure changes as there is more of something: sizes, and the value at each."""

    measure: str
    grows: str
    points: list[tuple[float, float]]


class Series(msgspec.Struct, frozen=True):
    """How a measure went over the minutes of one run, and where its phases began."""

    measure: str
    points: list[tuple[float, float]]
    phases: list[tuple[float, str]]


class Headline(msgspec.Struct, frozen=True):
    """A row that the first page shows, in words, and the subject it is compared with there."""

    words: str
    benchmark: str
    measure: str
    unit: str
    subject: str
    subject_name: str


#: What somebody who skims should see, the worst included.
HEADLINES = (
    Headline(
        "append p99 at a steady 20 MiB/s", "s2", "steady 20 MiB/s of 1 KiB for 45 s, ack p99",
        "ms", "s2-lite", "s2-lite",
    ),
    Headline(
        "fold 20 million changes into a table", "fold", "re-base of 20,000,000 changes",
        "s", "duckdb", "DuckDB",
    ),
    Headline(
        "catch-up read of 1 KiB records", "s2", "catch-up, 1024 B records",
        "MiB/s", "s2-lite", "s2-lite",
    ),
    Headline(
        "256-byte appends to 500 streams, S2", "s2",
        "256 B appends, 500 streams, protobuf, h2", "acks/s", "s2-lite", "s2-lite",
    ),
    Headline(
        "256-byte appends to 500 streams, Durable Streams", "durable",
        "256 B appends to 500 streams, 100 connections", "acks/s", "Rust server",
        "the official Rust server",
    ),
)  # fmt: skip


class Benchmark(msgspec.Struct, frozen=True, omit_defaults=True):
    """One page: its rows, and the machine and conditions under which they were measured."""

    name: str
    title: str
    about: str
    command: str
    conditions: list[str]
    rows: list[Row]
    curves: list[Curve] = []
    series: list[Series] = []


def publish(benchmark: Benchmark, folder: Path = FOLDER) -> None:
    """Write the benchmark's JSON, page and plot, and the list of all pages."""
    folder.mkdir(parents=True, exist_ok=True)
    data = msgspec.json.format(msgspec.json.encode(benchmark), indent=1)
    (folder / f"{benchmark.name}.json").write_bytes(data + b"\n")
    write_page(benchmark, folder)
    write_index(folder)


def kept(folder: Path = FOLDER) -> list[Benchmark]:
    """All benchmarks that were published, by name."""
    files = sorted(folder.glob("*.json"))
    return [msgspec.json.decode(file.read_bytes(), type=Benchmark) for file in files]


def write_page(benchmark: Benchmark, folder: Path) -> None:
    """The page and the plot of one benchmark."""
    lines = [f"# {benchmark.title}", "", benchmark.about, ""]
    lines += [f"`{benchmark.command}`", "", *table(benchmark.rows), ""]
    if compared(benchmark.rows):
        plot(benchmark, folder / f"{benchmark.name}.svg")
        lines += [f"![Ratio to the others; above 1 means better]({benchmark.name}.svg)", ""]
    if benchmark.curves:
        plot_curves(benchmark.curves, folder / f"{benchmark.name}-growth.svg")
        lines += [f"![Cost at growing sizes]({benchmark.name}-growth.svg)", ""]
    if benchmark.series:
        plot_series(benchmark.series, folder / f"{benchmark.name}-time.svg")
        lines += [f"![The run, minute by minute]({benchmark.name}-time.svg)", ""]
    lines += ["Measured under these conditions:", ""]
    lines += [f"- {condition}" for condition in benchmark.conditions]
    (folder / f"{benchmark.name}.md").write_text("\n".join(lines) + "\n")


def headline_rows(benchmarks: Sequence[Benchmark]) -> list[tuple[Headline, Row, Sample]]:
    """The rows of the first page, and the samples they are compared with, as far as measured."""
    return [
        (headline, row, sample)
        for headline in HEADLINES
        for benchmark in benchmarks
        if benchmark.name == headline.benchmark
        for row in benchmark.rows
        if (row.measure, row.unit) == (headline.measure, headline.unit)
        for sample in row.samples[1:]
        if sample.subject == headline.subject
    ]


def headlines(benchmarks: Sequence[Benchmark], folder: Path) -> list[str]:
    """One chart and its figures."""
    rows = headline_rows(benchmarks)
    if not rows:
        return []
    bars = [
        (f"{headline.words}  ·  {headline.subject_name}", row.ratio(sample))
        for headline, row, sample in rows
    ]
    plot_ratios(bars, folder / "headlines.svg")
    lines = ["![Ratio to the others; above 1 means better](headlines.svg)", ""]
    lines += ["| | Streamfold | other | ratio |", "|---|---|---|---|"]
    lines += [
        f"| {headline.words} | {number(row.samples[0].median)} {row.unit} | "
        f"{headline.subject_name} {number(sample.median)} {row.unit} | "
        f"[{row.ratio(sample):.2f}]({headline.benchmark}.md) |"
        for headline, row, sample in rows
    ]
    return [*lines, ""]


def write_index(folder: Path) -> None:
    """The page that lists the others, below one chart and its figures."""
    benchmarks = kept(folder)
    lines = [
        "# Benchmarks",
        "",
        *headlines(benchmarks, folder),
        "`make bench` writes these pages; each names its date and machine. Machines differ, and shared",
        "ones are noisy, so a figure and what it is compared with come from the same run: read the",
        "ratios. A ratio above 1 means that Streamfold is better, for rates and for times alike.",
        "",
        *(f"- [{one.title}]({one.name}.md)" for one in benchmarks),
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def table(rows: Sequence[Row]) -> list[str]:
    """Medians with their spread, and ratios to every other subject."""
    others = list(dict.fromkeys(s.subject for row in rows for s in row.samples[1:]))
    head = ["measure", "Streamfold", *(f"{name} | / {name}" for name in others)]
    lines = [f"| {' | '.join(head)} |", "|---" * (2 + 2 * len(others)) + "|"]
    for row in rows:
        beside = {sample.subject: sample for sample in row.samples[1:]}
        cells = [row.measure, f"{spread(row.samples[0])} {row.unit}"]
        for name in others:
            other = beside.get(name)
            cells += [spread(other), f"**{row.ratio(other):.2f}**"] if other else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def spread(sample: Sample) -> str:
    """The median, and the smallest and the largest value when there are several."""
    text = number(sample.median)
    if len(sample.values) > 1:
        text += f" ({number(min(sample.values))}-{number(max(sample.values))})"
    return text


def number(value: float) -> str:
    """Three digits that count."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def compared(rows: Sequence[Row]) -> list[tuple[str, str, float]]:
    """Measure, other subject and ratio, of all rows that have one."""
    return [
        (row.measure, other.subject, row.ratio(other))
        for row in rows
        for other in row.samples[1:]
        if other.median and row.samples[0].median
    ]


def plot(benchmark: Benchmark, target: Path) -> None:
    """A bar for each ratio of a benchmark."""
    bars = compared(benchmark.rows)
    plot_ratios([(f"{measure}  ·  {subject}", ratio) for measure, subject, ratio in bars], target)


def plot_ratios(bars: Sequence[tuple[str, float]], target: Path) -> None:
    """A bar for each ratio, from the top, on a logarithmic axis with 1 in the middle."""
    pyplot = drawing()
    labels, ratios = zip(*bars[::-1], strict=True)
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.32 * len(bars)))
    colours = ["#2a7de1" if ratio >= 1 else "#b8bec8" for ratio in ratios]
    axes.barh(labels, [ratio - 1 for ratio in ratios], left=1, color=colours)
    axes.axvline(1, color="#404854", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.set_xlabel("times better than the other; below 1, worse")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, target)


def plot_curves(curves: Sequence[Curve], target: Path) -> None:
    """A picture for each measure, both axes logarithmic: what grows in proportion is a diagonal."""
    pyplot = drawing()
    columns = 2 if len(curves) > 1 else 1
    count = -(-len(curves) // columns)
    figure, axes = pyplot.subplots(count, columns, figsize=(9, 2.6 * count), squeeze=False)
    for one, curve in zip(axes.flat, curves, strict=False):
        sizes, values = zip(*curve.points, strict=True)
        one.plot(sizes, values, marker="o", color="#2a7de1")
        one.set_xscale("log")
        one.set_yscale("log")
        one.set_ylim(min(values) / 10, max(values) * 10)
        one.set_title(curve.measure, fontsize=9)
        one.set_xlabel(curve.grows, fontsize=8)
        one.spines[["top", "right"]].set_visible(False)
    for one in axes.flat[len(curves) :]:
        one.set_axis_off()
    save(figure, target)


def plot_series(series: Sequence[Series], target: Path) -> None:
    """A picture for each measure over the minutes of the run; a line marks where a phase begins."""
    pyplot = drawing()
    count = -(-len(series) // 2)
    figure, axes = pyplot.subplots(count, 2, figsize=(11, 2.3 * count), squeeze=False)
    for one, measured in zip(axes.flat, series, strict=False):
        minutes, values = zip(*measured.points, strict=True)
        one.plot(minutes, values, color="#2a7de1", linewidth=0.9)
        one.set_ylim(bottom=0)
        if max(values) > 50 * statistics.median(values) > 0:
            one.set_yscale("symlog", linthresh=2 * statistics.median(values))
        for minute, phase in measured.phases:
            one.axvline(minute, color="#b8bec8", linewidth=0.8)
            one.annotate(phase, (minute, 1.0), xycoords=("data", "axes fraction"), fontsize=6)
        one.set_title(measured.measure, fontsize=9, pad=10)
        one.set_xlabel("minutes", fontsize=8)
        one.spines[["top", "right"]].set_visible(False)
    for one in axes.flat[len(series) :]:
        one.set_axis_off()
    save(figure, target)


def drawing() -> Any:
    """matplotlib, set so that the same figures give the same file."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "streamfold"
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, target: Path) -> None:
    figure.tight_layout()
    figure.savefig(target, format="svg", metadata={"Date": None})
    drawing().close(figure)


def main() -> None:
    for benchmark in kept():
        write_page(benchmark, FOLDER)
    write_index(FOLDER)


if __name__ == "__main__":
    main()
