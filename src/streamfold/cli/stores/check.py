"""`streamfold check`: read a whole store, and name what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from streamfold.cli.exit_status import ExitStatus, VerbFailedError
from streamfold.cli.output import Output
from streamfold.cli.stores.options import Bar, human_size, store_verb
from streamfold.cli.terminal import inert, styled
from streamfold.wording import noun

if TYPE_CHECKING:
    from streamfold.store.inspection import CheckFinding, CheckReport


@store_verb("check", failed=ExitStatus.USAGE)
@click.argument("store")
async def check(output: Output, store: str) -> None:
    """Read a whole store, verify everything in it, and name what is damaged.

    STORE is the folder of a server's --local-root, or s3://bucket/prefix. The server may run meanwhile:
    the check sees one moment of the store and changes nothing, but the server deletes files later.
    Records of encrypted streams are checked up to their encryption.

    Exits with status 0 if the store is sound, 1 if something is damaged, 2 if it cannot be checked.
    """
    from streamfold.server.store_check import check_store

    bar = Bar("checking")
    try:
        report = await check_store(store, progress=bar)
    finally:
        bar.close()
    output.show(report_shape(report), report_text(report))
    if not report.sound:
        damaged = sum(finding.severity == "damage" for finding in report.findings)
        damaged += report.unlisted
        raise VerbFailedError(
            "store_damaged",
            f"{damaged} {noun(damaged, 'place')} of the store {noun(damaged, 'is', 'are')} damaged: "
            "see docs/operations/damaged-records.md",
        )


def report_shape(report: CheckReport) -> dict[str, object]:
    import msgspec

    return {
        "store": report.store,
        "sound": report.sound,
        "format": report.format,
        "counts": msgspec.to_builtins(report.counts),
        "findings": [_finding_shape(finding) for finding in report.findings],
        "unlisted": report.unlisted,
        "seconds": report.seconds,
    }


def _finding_shape(finding: CheckFinding) -> dict[str, object]:
    return {
        name: getattr(finding, name)
        for name in (
            "code",
            "severity",
            "message",
            "basin",
            "stream",
            "stream_id",
            "first_seq_num",
            "next_seq_num",
            "file",
        )
    }


def report_text(report: CheckReport) -> str:
    lines = [_finding_text(finding) for finding in report.findings]
    if report.unlisted:
        lines.append(f"and {report.unlisted:,} findings more")
    lines += _count_lines(report)
    verdict = styled("sound", "ok") if report.sound else styled("damaged", "failure")
    lines.append(f"{inert(report.store)} is {verdict}, read in {report.seconds:.1f} s")
    return "\n".join(lines)


def _finding_text(finding: CheckFinding) -> str:
    meaning = "failure" if finding.severity == "damage" else "warning"
    mark = styled(f"{finding.severity.upper():<7}", meaning)
    return f"{mark}  {finding.code}: {inert(finding.message)}"


def _count_lines(report: CheckReport) -> list[str]:
    counts = report.counts
    sealed = f", {counts.sealed_chunks:,} of them encrypted" if counts.sealed_chunks else ""
    groups = {
        "streams": f"{counts.streams:,} in {_counted(counts.basins, 'basin')}, "
        + _counted(counts.forks, "fork"),
        "records": f"{counts.records:,} in {_counted(counts.chunks, 'chunk')}{sealed}",
        "files": ", ".join(
            (
                _sized(counts.tables, "table", counts.table_bytes),
                _sized(counts.chunk_files, "chunk file", counts.chunk_file_bytes),
                _counted(counts.log_files, "log file"),
            )
        ),
        "snapshots": f"{counts.snapshots:,} ({human_size(counts.snapshot_bytes)})",
        "others": ", ".join(
            (
                _counted(counts.producers, "producer"),
                _counted(counts.access_tokens, "access token"),
                _counted(counts.documents, "document"),
            )
        ),
    }
    if counts.staged_parts:
        groups["snapshots"] += f", {_counted(counts.staged_parts, 'part')} not published"
    if counts.unnamed_files:
        unnamed = _sized(counts.unnamed_files, "file", counts.unnamed_bytes)
        groups["left over"] = f"{unnamed} that no row names"
    return [f"{name:<9}  {text}" for name, text in groups.items()]


def _sized(count: int, name: str, size: int) -> str:
    return f"{_counted(count, name)} ({human_size(size)})" if count else _counted(count, name)


def _counted(count: int, name: str) -> str:
    return f"{count:,} {noun(count, name)}"
