"""`streamfold archive`: inspect, verify, restore, follow, prune and copy tables published as files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import click

from streamfold.cli.archives import json_output as shapes
from streamfold.cli.archives.options import (
    at_option,
    at_source_option,
    open_archive,
    open_destination,
    point_of,
    point_options,
    positive,
    reading_options,
    table_at,
    uri_argument,
    verb,
)
from streamfold.cli.archives.sql import sql
from streamfold.cli.exit_status import OutputClosedError, VerbFailedError
from streamfold.cli.menu import VerbGroup
from streamfold.cli.output import Output, ProgressBar, output_closed
from streamfold.cli.parameters import Duration
from streamfold.errors import StreamfoldError
from streamfold.wording import noun

if TYPE_CHECKING:
    from streamfold.archive import Archive, Collector
    from streamfold.archive.maintenance.garbage_collection import UnreachableFile


@verb("ls")
@uri_argument
async def ls(output: Output, uri: str) -> None:
    """List the archives in a folder and below it.

    An archive with an unusable manifest is listed with the reason, and the exit status is then 1.
    """
    from streamfold.archive.destinations.destination import existing_folder
    from streamfold.archive.read.reader import list_archives

    archives = bad = 0
    async for folder, manifest in list_archives(open_destination(existing_folder(uri))):
        archives += 1
        bad += isinstance(manifest, StreamfoldError)
        output.show(shapes.listed_shape(folder, manifest), shapes.listed_line(folder, manifest))
    if not archives:
        output.note(f"No archives below {uri}.")
    if bad:
        raise VerbFailedError(
            "manifest_invalid", f"{bad} {noun(bad, 'manifest')} cannot be used, see above"
        )


@verb("show")
@uri_argument
@point_options
async def show(output: Output, uri: str, **point: Any) -> None:
    """Show what an archive holds, and what a rebuild would read."""
    archive = await open_archive(uri)
    plan = archive.plan(**point_of(archive, **point))
    output.show(shapes.archive_shape(archive, plan), shapes.archive_text(archive, plan))


@verb("verify")
@uri_argument
@click.option(
    "--deep",
    is_flag=True,
    help="Also compare each base with what the previous epoch rebuilds to.",
)
@reading_options
async def verify(output: Output, uri: str, deep: bool, **reading: Any) -> None:
    """Check that every file exists, is readable, and has the recorded size, SHA-256 and rows.

    Exits with status 1 if anything is wrong, after reporting all of it.
    """
    archive = await open_archive(uri, **reading)
    sizes = {part.path: part.size_bytes for part in archive.manifest.parts()}
    with ProgressBar("verifying", sum(sizes.values())) as bar:
        result = await archive.verify(lambda file: bar.update(file.size_bytes), deep=deep)
    output.show(shapes.verification_shape(result), shapes.verification_text(result))
    if not result.ok:
        bad = len(result.problems)
        raise VerbFailedError(
            "artifact_corrupt", f"{bad} of {result.files} files {noun(bad, 'is', 'are')} wrong"
        )


@verb("restore")
@uri_argument
@point_options
@click.option("--column", "columns", multiple=True, metavar="NAME", help="Only these columns.")
@click.option(
    "--output",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write, whole or not at all, instead of standard output.",
)
@click.option(
    "--format",
    "kind",
    metavar="FORMAT",
    help="csv, arrow, or a format of archives; by default what the file's extension says, or jsonl.",
)
@reading_options
async def restore(
    output: Output,
    uri: str,
    columns: tuple[str, ...],
    file: Path | None,
    kind: str | None,
    **options: Any,
) -> None:
    """Rebuild the table at the head, or at any position or time, and write it."""
    from streamfold.cli.archives.table_files import Lines, kind_of, replacing

    archive = await open_archive(uri, **options)
    at = point_of(archive, **options)
    chosen = kind_of(file, kind)
    if file is None:
        if chosen != "jsonl":
            raise click.UsageError(f"{chosen} cannot go to standard output: give --output FILE")
        await _write_rows(archive, Lines(output), chosen, columns, at, prints=True)
        return
    with replacing(file) as sink:
        rows = await _write_rows(archive, sink, chosen, columns, at)
    reached = archive.plan(**at).position
    output.show(
        {"file": str(file), "position": reached, "rows": rows},
        f"{file}  {rows:,} {noun(rows, 'row')} at {reached}",
    )


async def _write_rows(
    archive: Archive,
    sink: Any,
    kind: str,
    columns: tuple[str, ...],
    at: dict[str, Any],
    *,
    prints: bool = False,
) -> int:
    from streamfold.cli.archives.table_files import write_table

    expected = archive.plan(**at).base.row_count or 0
    with ProgressBar("restoring", expected, "rows", prints=prints) as bar:
        return await write_table(kind, sink, archive.batches(columns=columns or None, **at), bar)


@verb("diff")
@uri_argument
@click.argument("since")
@click.option("--until", metavar="P", help="Position to end at instead of the head.")
@reading_options
async def diff(output: Output, uri: str, since: str, until: str | None, **reading: Any) -> None:
    """Print what changed after a position, as lines of JSON."""
    from streamfold.cli.archives.table_files import ChangePrinter

    archive = await open_archive(uri, **reading)
    printer = ChangePrinter(output, archive.key_fields)
    async for item in archive.changes(since, until=until):
        printer.changes(item)


@verb("follow")
@uri_argument
@click.option("--since", metavar="P", help="Begin with the changes after P, not with the rows.")
@click.option(
    "--poll",
    type=Duration(),
    default="5s",
    show_default=True,
    callback=positive,
    help="How often to look for changes.",
)
@reading_options
async def follow(output: Output, uri: str, since: str | None, poll: int, **reading: Any) -> None:
    """Print the table and then its changes as they are committed, until Ctrl-C.

    Rows come as a TRUNCATE and INSERTs, again whenever the diffs have a gap: applied in order, the
    lines yield the table.
    """
    archive = await open_archive(uri, **reading)
    await _while_read(_print_news(archive, output, since, timedelta(seconds=poll)))


async def _print_news(archive: Archive, output: Output, since: str | None, poll: timedelta) -> None:
    from streamfold.archive import Rows
    from streamfold.cli.archives.table_files import ChangePrinter

    printer = ChangePrinter(output, archive.key_fields)
    async for item in archive.follow(since, poll=poll):
        if isinstance(item, Rows):
            printer.rows(item)
            if item.last:
                output.note(f"all rows at {item.position} ({item.reason})")
        else:
            printer.changes(item)


async def _while_read(work: Awaitable[None]) -> None:
    """Run `work` until it is done or the reader of standard output closes it."""
    working = asyncio.ensure_future(work)
    unread = asyncio.create_task(output_closed())
    try:
        await asyncio.wait({working, unread}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise OutputClosedError("the output was closed")
        await working
    finally:
        working.cancel()
        unread.cancel()
        await asyncio.gather(working, unread, return_exceptions=True)


@verb("gc")
@click.argument("uris", nargs=-1, required=True, metavar="URI...")
@click.option(
    "--keep-epochs", type=click.IntRange(min=1), help="How many of the newest epochs stay."
)
@click.option("--max-age", type=Duration(), help="Keep epochs this long after they were replaced.")
@click.option(
    "--grace",
    type=Duration(),
    default="1d",
    show_default=True,
    help="How long to keep unreachable files: longer than any read or write takes.",
)
@click.option("--dry-run", is_flag=True, help="Only report what would be deleted.")
async def gc(
    output: Output,
    uris: tuple[str, ...],
    keep_epochs: int | None,
    max_age: int | None,
    grace: int,
    dry_run: bool,
) -> None:
    """Prune old epochs, and delete unreachable files.

    Several URIs are the destinations of one archive, the primary first.
    """
    from streamfold.archive import Retention

    age = None if max_age is None else timedelta(seconds=max_age)
    retention = Retention(keep_epochs, age, timedelta(seconds=grace))
    with ProgressBar("looking" if dry_run else "deleting", 0) as bar:

        def expect(files: Sequence[UnreachableFile]) -> None:
            bar.total = sum(file.size_bytes for file in files)

        collected = await _collector(uris).collect(
            retention,
            dry_run=dry_run,
            on_found=expect,
            on_deleted=lambda file: bar.update(file.size_bytes),
        )
    output.show(shapes.collected_shape(collected), shapes.collected_text(collected))


@verb("pin")
@uri_argument
@click.argument("pin_id", metavar="ID")
@click.option("--epoch", type=int, help="Epoch to keep; the newest by default.")
@click.option(
    "--for",
    "lifetime",
    type=Duration(),
    default="7d",
    show_default=True,
    help="How long to keep it.",
)
@click.option("--reason", help="Why the epoch is kept.")
@click.option("--remove", is_flag=True, help="Remove the pin instead.")
async def pin(
    output: Output,
    uri: str,
    pin_id: str,
    epoch: int | None,
    lifetime: int,
    reason: str | None,
    remove: bool,
) -> None:
    """Protect an epoch from pruning for a while, or end that; replaces a pin with the same id."""
    collector = _collector((uri,))
    if remove:
        await collector.unpin(pin_id)
        output.show({"id": pin_id, "removed": True}, f"{pin_id}  removed")
        return
    chosen = (await open_archive(uri)).manifest.epoch if epoch is None else epoch
    manifest = await collector.pin(pin_id, chosen, timedelta(seconds=lifetime), reason)
    [made] = [p for p in manifest.pins if p.id == pin_id]
    output.show(
        {"id": pin_id, "epoch": made.epoch, "expires_at": made.expires_at, "reason": made.reason},
        f"{pin_id}  epoch {made.epoch}  until {made.expires_at}",
    )


@verb("export")
@uri_argument
@click.argument("target")
@click.option("--delta", "kind", flag_value="delta", help="Write a Delta Lake table instead.")
@click.option("--iceberg", "kind", flag_value="iceberg", help="Write an Iceberg table instead.")
@click.option("--duckdb", "kind", flag_value="duckdb", help="Write a database of DuckDB instead.")
@at_option
@at_source_option
@click.option(
    "--column", "columns", multiple=True, metavar="NAME", help="Only these columns of the table."
)
@reading_options
async def export(
    output: Output,
    uri: str,
    target: str,
    kind: str | None,
    at: str | None,
    at_source: str | None,
    columns: tuple[str, ...],
    **reading: Any,
) -> None:
    """Copy an archive to another folder, or update the copy there.

    With --delta, --iceberg or --duckdb the table itself is copied once, with the diffs folded in, to a
    path that does not exist yet.
    """
    from streamfold.archive.maintenance.export import export_archive

    archive = await open_archive(uri, **reading)
    if kind is not None:
        point = table_at(archive, at, at_source)
        await _export_table(output, archive, kind, Path(target), point, columns)
        return
    if at is not None or at_source is not None or columns:
        raise click.UsageError("--at, --at-source and --column need --delta, --iceberg or --duckdb")
    there = open_destination(target)
    sizes = {part.path: part.size_bytes for part in archive.manifest.parts()}
    with ProgressBar("copying", sum(sizes.values())) as bar:
        result = await export_archive(archive, there, lambda part: bar.update(part.size_bytes))
    output.show(
        {
            "uri": there.uri,
            "head_position": result.manifest.head_position,
            "files": result.files,
            "bytes": result.size_bytes,
        },
        f"{there.uri}  head {result.manifest.head_position}  {result.files} "
        f"{noun(result.files, 'file')} of {result.size_bytes:,} bytes copied",
    )


async def _export_table(
    output: Output,
    archive: Archive,
    kind: str,
    target: Path,
    at: dict[str, Any],
    columns: tuple[str, ...],
) -> None:
    from streamfold.archive.engines.table_copy import copy_table

    with ProgressBar("exporting", archive.plan(**at).base.row_count or 0, "rows") as bar:
        result = await copy_table(
            archive, kind, target, **at, columns=columns or None, on_rows=bar.update
        )
    output.show(
        {"path": str(target), "kind": kind, "position": result.position, "rows": result.rows},
        f"{target}  {result.rows:,} {noun(result.rows, 'row')} at {result.position} as {kind}",
    )


def _collector(uris: tuple[str, ...]) -> Collector:
    from streamfold.archive import Collector
    from streamfold.archive.destinations.destination import existing_folder

    return Collector(
        [open_destination(existing_folder(uri)) for uri in uris],
        now=lambda: datetime.now(UTC),
        new_id=lambda: uuid4().hex,
    )


@click.group(cls=VerbGroup)
def archive() -> None:
    """Tables published as files: a base, the diffs after it, and a manifest.

    URI is the folder of one table: s3://, gs://, az://, file:/// or a path. Storage takes its
    settings from the environment, S3 as AWS tools do.
    """


for command in (ls, show, verify, restore, diff, follow, sql, gc, pin, export):
    archive.add_command(command)
