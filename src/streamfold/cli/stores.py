"""`streamfold check`, `streamfold backup` and `streamfold restore`: commands on a whole store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from streamfold.cli.exit_status import ExitStatus, VerbFailedError
from streamfold.cli.json_output import rfc3339
from streamfold.cli.output import ListingOutput, Output, ProgressBar
from streamfold.cli.target import JSON_OPTION
from streamfold.cli.terminal import inert, styled
from streamfold.errors import InvalidError, NotFoundError, StreamfoldError
from streamfold.wording import noun

if TYPE_CHECKING:
    from streamfold.store.backup import BackupManifest
    from streamfold.store.inspection import CheckFinding, CheckReport

StoreVerb: TypeAlias = Callable[..., Awaitable[None]]
#: Bytes from which a progress bar is shown.
_BAR_FROM = 8 << 20


def store_verb(name: str, failed: ExitStatus) -> Callable[[StoreVerb], click.Command]:
    """Return a decorator that makes an async function a command.

    The function's first argument is the Output. `failed` is the status of failures without a status
    of their own.
    """

    def decorate(function: StoreVerb) -> click.Command:
        @wraps(function)
        def run(as_json: bool, **options: Any) -> None:
            try:
                with _quiet_log():
                    asyncio.run(_finished(function(Output(as_json=as_json), **options)))
            except VerbFailedError:
                raise
            except StreamfoldError as error:
                raise VerbFailedError(error.code, error.message, _status(error, failed)) from error
            except KeyboardInterrupt:
                raise click.exceptions.Abort from None

        command = click.command(name)(run)
        command.params.append(JSON_OPTION)
        return command

    return decorate


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Keep log messages off the terminal, because the command reports what the store would log."""
    log = logging.getLogger("streamfold")
    nowhere, propagate = logging.NullHandler(), log.propagate
    log.addHandler(nowhere)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(nowhere)
        log.propagate = propagate


async def _finished(call: Awaitable[None]) -> None:
    await call


def _status(error: StreamfoldError, failed: ExitStatus) -> ExitStatus:
    if failed is not ExitStatus.FAILURE:
        return failed
    if isinstance(error, NotFoundError):
        return ExitStatus.NOT_FOUND
    return ExitStatus.USAGE if isinstance(error, InvalidError) else ExitStatus.FAILURE


class Bar:
    """A progress bar whose total may be known only later."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: ProgressBar | None = None
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = ProgressBar(self._label, total, least=_BAR_FROM)
        self._bar.total = max(total, self._bar.total)
        self._bar.update(done - self._done)
        self._done = done

    def close(self) -> None:
        if self._bar is not None:
            self._bar.__exit__()
            self._bar = None


def human_size(size: float) -> str:
    """Format bytes for people: 12.3 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


@store_verb("backup", failed=ExitStatus.FAILURE)
@click.argument("store")
@click.argument("target", required=False)
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    metavar="N",
    help="Afterwards delete all but the N newest backups in the target.",
)
@click.option("--list", "listing", is_flag=True, help="List the backups in a target instead.")
async def backup(
    output: Output, store: str, target: str | None, keep: int | None, listing: bool
) -> None:
    """Copy a store to a folder or a bucket, as it is at this moment.

    STORE is the folder of a server's --local-root, or s3://bucket/prefix; its server may run meanwhile.
    TARGET is a folder, or s3://, gs:// or az:// with bucket and prefix, for backups of this store only.
    Files that an earlier backup in the target has are not copied again. An interrupted backup leaves
    nothing that restore would use, and the next one continues it.

    --list TARGET lists the backups that restore can use.
    """
    from streamfold.store.backup import back_up

    if listing:
        if target is not None or keep is not None:
            raise click.UsageError("--list takes the target alone: streamfold backup --list TARGET")
        await _list(output, store)
        return
    if target is None:
        raise click.UsageError("Missing argument 'TARGET': name a folder or bucket for the backup")
    bar = Bar("backup")
    try:
        report = await back_up(store, target, keep=keep, progress=bar)
    finally:
        bar.close()
    copied = f"{report.copied_files:,} {noun(report.copied_files, 'file')}"
    text = (
        f"backup {report.manifest.id}: {human_size(report.manifest.size)} in "
        f"{len(report.manifest.files):,} files; copied {copied} ({human_size(report.copied_bytes)})"
    )
    if report.deleted:
        text += f"; deleted {len(report.deleted)} older {noun(len(report.deleted), 'backup')}"
    shape = {
        **_shape(report.manifest),
        "copied_files": report.copied_files,
        "copied_bytes": report.copied_bytes,
        "deleted": list(report.deleted),
    }
    output.show(shape, text)


async def _list(output: Output, target: str) -> None:
    from streamfold.store.backup import list_backups, open_backups

    headings = ("ID", "BEGAN AT", "SIZE", "FILES", "")
    table = ListingOutput(output, *headings, empty=f"No complete backup in {target}.")
    for manifest in await list_backups(await open_backups(target)):
        began = rfc3339(datetime.fromtimestamp(manifest.began_at / 1000, UTC))
        size = human_size(manifest.size)
        table.add(_shape(manifest), manifest.id, began, size, f"{len(manifest.files):,}", "")
    table.close()


def _shape(manifest: BackupManifest) -> dict[str, object]:
    return {
        "id": manifest.id,
        "began_at": rfc3339(datetime.fromtimestamp(manifest.began_at / 1000, UTC)),
        "store": manifest.store,
        "format": manifest.store_format,
        "files": len(manifest.files),
        "size_bytes": manifest.size,
    }


@store_verb("restore", failed=ExitStatus.FAILURE)
@click.argument("backups")
@click.argument("target")
@click.option("--at", metavar="ID", help="The backup to restore.  [default: the newest]")
async def restore(output: Output, backups: str, target: str, at: str | None) -> None:
    """Create a store from a backup.

    BACKUPS is the target that streamfold backup was given. TARGET is an empty folder, or s3:// with a
    bucket and an unused prefix: give it to serve afterwards. Every byte is compared with the checksum
    that the backup has of it. The new store shares nothing with the original.
    """
    from streamfold.store.backup import restore_backup

    bar = Bar("restore")
    try:
        report = await restore_backup(backups, target, at=at, progress=bar)
    finally:
        bar.close()
    manifest = report.manifest
    text = (
        f"restored backup {manifest.id} to {report.store}: {human_size(manifest.size)} in "
        f"{len(manifest.files):,} files"
    )
    output.show({**_shape(manifest), "target": report.store}, text)


@store_verb("check", failed=ExitStatus.USAGE)
@click.argument("store")
async def check(output: Output, store: str) -> None:
    """Verify everything in a store, and report damage.

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
