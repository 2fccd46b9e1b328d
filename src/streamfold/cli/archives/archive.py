"""`streamfold archive`: inspect, verify, restore, follow, prune and copy tables published as files."""

from __future__ import annotations

import click

from streamfold.cli.archives.maintenance import export, gc, pin
from streamfold.cli.archives.reading import diff, follow, ls, restore, show, verify
from streamfold.cli.groups import VerbGroup


@click.group(cls=VerbGroup)
def archive() -> None:
    """Tables published as files: a base, the diffs after it, and a manifest.

    URI is the folder of one table: s3://, gs://, az://, file:/// or a path. Storage takes its
    settings from the environment, S3 as AWS tools do.
    """


for command in (ls, show, verify, restore, diff, follow, gc, pin, export):
    archive.add_command(command)
