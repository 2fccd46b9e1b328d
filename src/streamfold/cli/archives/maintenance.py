"""Verbs that change what an archive keeps, and copy it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import click

from streamfold.cli.archives import json_output as shapes
from streamfold.cli.archives.options import (
    open_archive,
    open_destination,
    progress,
    reading_options,
    uri_argument,
    verb,
)
from streamfold.cli.output import Output
from streamfold.cli.parameters import Duration

if TYPE_CHECKING:
    from streamfold.archive import Collector
    from streamfold.archive.maintenance.garbage_collection import UnreachableFile


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
    with progress("looking" if dry_run else "deleting", 0) as bar:

        def expect(files: Sequence[UnreachableFile]) -> None:
            bar.length = max(1, sum(file.size_bytes for file in files))

        found = await _collector(uris).collect(
            retention,
            dry_run=dry_run,
            on_found=expect,
            on_deleted=lambda file: bar.update(file.size_bytes),
        )
    output.show(shapes.collected_shape(found), shapes.collected_text(found))


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
@reading_options
async def export(output: Output, uri: str, target: str, **reading: Any) -> None:
    """Copy an archive to another folder, or update the copy there."""
    from streamfold.archive.maintenance.export import export_archive

    found = await open_archive(uri, **reading)
    there = open_destination(target)
    sizes = {part.path: part.size_bytes for part in found.manifest.parts()}
    with progress("copying", sum(sizes.values())) as bar:
        result = await export_archive(found, there, lambda part: bar.update(part.size_bytes))
    output.show(
        {
            "uri": there.uri,
            "head_position": result.manifest.head_position,
            "files": result.files,
            "bytes": result.size_bytes,
        },
        f"{there.uri}  head {result.manifest.head_position}  {result.files} files of "
        f"{result.size_bytes:,} bytes copied",
    )


def _collector(uris: tuple[str, ...]) -> Collector:
    from streamfold.archive import Collector
    from streamfold.archive.destinations.destination import existing_folder

    return Collector(
        [open_destination(existing_folder(uri)) for uri in uris],
        now=lambda: datetime.now(UTC),
        new_id=lambda: uuid4().hex,
    )
