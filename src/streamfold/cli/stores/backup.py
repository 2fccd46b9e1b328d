"""`streamfold backup` and `streamfold restore`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from streamfold.cli.exit_status import ExitStatus
from streamfold.cli.json_output import rfc3339
from streamfold.cli.output import Output, Table
from streamfold.cli.stores.options import Bar, human_size, store_verb
from streamfold.wording import noun

if TYPE_CHECKING:
    from streamfold.store.backup import BackupManifest


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

    table = Table(output, "ID", "BEGAN AT", "SIZE", "FILES", "")
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
    """Make a store from a backup.

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
