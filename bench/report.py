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
        lines += [f"![How many times better than others]({benchmark.name}.svg)", ""]
    if benchmark.curves:
        plot_curves(benchmark.curves, folder / f"{benchmark.name}-growth.svg")
        lines += [f"![Cost as there is more of it]({benchmark.name}-growth.svg)", ""]
    if benchmark.series:
        plot_series(benchmark.series, folder / f"{benchmark.name}-time.svg")
        lines += [f"![The run, minute by minute]({benchmark.name}-time.svg)", ""]
    lines += ["Measured under these conditions:", ""]
    lines += [f"- {condition}" for condition in benchmark.conditions]
    (folder / f"{benchmark.name}.md").write_text("\n".join(lines) + "\n")


def write_index(folder: Path) -> None:
    """The page that lists the others."""
    lines = [
        "# Benchmarks",
        "",
        "`make bench` writes these pages; each names its date and its machine. Machines differ and",
        "shared ones are noisy, so anything that a figure is compared with was measured in the same",
        "run: read the ratios. A ratio above 1 means that Streamfold is better, whether more or less",
        "is wanted.",
        "",
        *(f"- [{one.title}]({one.name}.md)" for one in kept(folder)),
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
    """A bar for each ratio, on a logarithmic axis with 1 in the middle."""
    pyplot = drawing()
    bars = compared(benchmark.rows)[::-1]
    labels = [f"{measure}  ·  {subject}" for measure, subject, _ in bars]
    ratios = [ratio for _, _, ratio in bars]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.32 * len(bars)))
    colours = ["#2a7de1" if ratio >= 1 else "#b8bec8" for ratio in ratios]
    axes.barh(labels, [ratio - 1 for ratio in ratios], left=1, color=colours)
    axes.axvline(1, color="#404854", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.set_xlabel("Streamfold / other, in what is better")
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
