"""Reads the proofs' reports and writes them as one table."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path

import msgspec

Figures = dict[str, int | float]


class ReportLine(msgspec.Struct, frozen=True):
    """What a program says of one run, as one line of JSON."""

    proof: str
    violations: int
    seconds: float
    figures: Figures
    command: str


class ProofResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one proof showed, where and when."""

    proof: str
    #: None where it cannot be told: the proof did not run, or ended without a report.
    violations: int | None
    seconds: float
    figures: Figures
    command: str
    date: str
    commit: str
    cores: int
    #: Why the proof is not one that held, beyond violations.
    failure: str = ""

    @property
    def held(self) -> bool:
        return self.violations == 0 and not self.failure


class NoReportError(Exception):
    """A proof ended without saying what it did."""


def read_report(report: Path) -> tuple[int, Figures]:
    """Return violations and figures of a proof, from its JSON lines or from pytest's XML."""
    text = report.read_text() if report.exists() else ""
    if not text.strip():
        raise NoReportError("ended without a report")
    try:
        if text.lstrip().startswith("<"):
            return _read_junit(text)
        return _read_lines(text)
    except (msgspec.DecodeError, ET.ParseError) as error:
        raise NoReportError(f"left a report that cannot be read: {error}") from error


def _read_lines(text: str) -> tuple[int, Figures]:
    violations, figures = 0, Figures()
    for line in text.splitlines():
        report = msgspec.json.decode(line, type=ReportLine)
        violations += report.violations
        _add(figures, report.figures)
    return violations, figures


def _read_junit(text: str) -> tuple[int, Figures]:
    """A failed test is a violation; a test may add figures of its own by `record_property`."""
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    figures = Figures()
    root = ET.fromstring(text)
    for suite in root.iter("testsuite"):
        for name in totals:
            totals[name] += int(suite.get(name, 0))
    for recorded in root.iter("property"):
        _add(figures, {recorded.get("name", ""): int(recorded.get("value", ""))})
    if totals["tests"] == 0:
        raise NoReportError("ran no test")
    figures = {"tests": totals["tests"] - totals["skipped"], **figures}
    if totals["skipped"]:
        figures["tests skipped"] = totals["skipped"]
    return totals["failures"] + totals["errors"], figures


def _add(figures: Figures, more: Figures) -> None:
    for name, value in more.items():
        figures[name] = figures.get(name, 0) + value


def markdown_table(results: Iterable[ProofResult]) -> str:
    """Write the table that docs/guarantees.md has."""
    results = list(results)
    if not results:
        return "No run has been published yet.\n"
    lines = [
        "| proof | violations | figures | time | date, commit, cores | command |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        run = f"{result.date}, {result.commit}, {result.cores} cores"
        row = [
            result.proof,
            _verdict(result),
            _list_figures(result.figures),
            _duration(result.seconds),
            run,
            f"`{result.command}`",
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines) + "\n"


def terminal_table(results: Iterable[ProofResult]) -> str:
    """Write the table for a terminal, the longest column last."""
    rows = [("proof", "violations", "time", "figures")]
    commands = [""]
    for result in results:
        rows.append(
            (
                result.proof,
                _verdict(result),
                _duration(result.seconds),
                _list_figures(result.figures),
            )
        )
        commands.append(result.command)
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = []
    for row, command in zip(rows, commands, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)]
        lines.append("  ".join([*cells, row[3]]).rstrip())
        if command:
            lines.append(f"{'':{widths[0]}}  $ {command}")
    return "\n".join(lines)


def _verdict(result: ProofResult) -> str:
    if result.failure:
        return (
            result.failure
            if result.violations is None
            else f"{result.violations}, {result.failure}"
        )
    return str(result.violations)


def _list_figures(figures: Figures) -> str:
    return ", ".join(
        f"{value:,} {name}" if isinstance(value, int) else f"{value:,.1f} {name}"
        for name, value in figures.items()
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
