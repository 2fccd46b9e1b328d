"""Verbs on streams, apart from their records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from streamfold.cli import json_output
from streamfold.cli.connection import open_basin, verb
from streamfold.cli.output import Output, confirm, yes_option
from streamfold.cli.parameters import basin_argument, stream_argument
from streamfold.cli.resources import config_options
from streamfold.cli.resources.listings import config_text, show_basins, show_streams, stream_text
from streamfold.model.names import StreamRef

if TYPE_CHECKING:
    from s2_sdk import S2


@verb("create-stream", changes=True)
@stream_argument
@click.option(
    "--ensure", is_flag=True, help="If it exists, give it this configuration and succeed."
)
@config_options.stream_config_options
async def create_stream(s2: S2, output: Output, ref: StreamRef, ensure: bool, **given: Any) -> None:
    """Create a stream; what is not configured comes from its basin."""
    config, status = config_options.stream_config(given), "created"
    basin = open_basin(s2, ref.basin)
    if ensure:
        ensured = await basin.ensure_stream(ref.stream, config=config)
        info, status = ensured.stream, ensured.status.value
    else:
        info = await basin.create_stream(ref.stream, config=config)
    output.show({**json_output.stream(info), "status": status}, f"{stream_text(info)}  {status}")


@verb("list-streams")
@basin_argument
@click.option("--prefix", default="", help="Only names that begin with this.")
@click.option("--start-after", default="", metavar="NAME", help="Only names after this one.")
@click.option("--limit", type=click.IntRange(min=1), help="At most this many.")
async def list_streams(
    s2: S2, output: Output, basin: str, prefix: str, start_after: str, limit: int | None
) -> None:
    """List streams, in the order of their names, those being deleted too."""
    await show_streams(s2, output, basin, prefix, start_after, limit)


@verb("ls")
@click.argument("where", default="", metavar="[S2://BASIN[/PREFIX]]")
async def ls(s2: S2, output: Output, where: str) -> None:
    """List basins, or the streams of one whose names begin with a prefix."""
    basin, _, prefix = where.removeprefix("s2://").partition("/")
    if basin:
        await show_streams(s2, output, basin, prefix)
    else:
        await show_basins(s2, output)


@verb("delete-stream", changes=True)
@stream_argument
@yes_option
async def delete_stream(s2: S2, output: Output, ref: StreamRef, yes: bool) -> None:
    """Delete a stream.

    It stops at once; storage is freed in the background. Asks first, unless --yes is given.
    """
    confirm(f"delete the stream s2://{ref.basin}/{ref.stream}", yes=yes)
    await open_basin(s2, ref.basin).delete_stream(ref.stream)
    output.show({"name": ref.stream, "status": "deleting"}, f"{ref.stream}  deleting")


@verb("get-stream-config")
@stream_argument
async def get_stream_config(s2: S2, output: Output, ref: StreamRef) -> None:
    """Show the configuration of a stream."""
    shape = json_output.stream_config(await open_basin(s2, ref.basin).get_stream_config(ref.stream))
    output.show(shape, config_text(shape))


@verb("reconfigure-stream", changes=True)
@stream_argument
@config_options.stream_config_options
async def reconfigure_stream(s2: S2, output: Output, ref: StreamRef, **given: Any) -> None:
    """Change the configuration of a stream; what is not given stays as it is."""
    config = config_options.stream_config(given)
    config_options.require_some(config)
    changed = await open_basin(s2, ref.basin).reconfigure_stream(ref.stream, config=config)
    shape = json_output.stream_config(changed)
    output.show(shape, config_text(shape))
