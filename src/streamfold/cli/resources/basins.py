"""Verbs on basins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from streamfold.cli import json_output
from streamfold.cli.connection import verb
from streamfold.cli.output import Output, confirm, yes_option
from streamfold.cli.parameters import basin_argument
from streamfold.cli.resources import config_options
from streamfold.cli.resources.listings import basin_text, config_text, show_basins

if TYPE_CHECKING:
    from s2_sdk import S2


@verb("create-basin", changes=True)
@basin_argument
@click.option("--location", metavar="NAME", help="Location to keep its records in.")
@click.option(
    "--ensure", is_flag=True, help="If it exists, give it this configuration and succeed."
)
@config_options.basin_config_options
async def create_basin(
    s2: S2, output: Output, basin: str, location: str | None, ensure: bool, **given: Any
) -> None:
    """Create a basin.

    The configuration is the basin's own, and the default for its streams.
    """
    config, status = config_options.basin_config(given), "created"
    if ensure:
        ensured = await s2.ensure_basin(basin, config=config, location=location)
        info, status = ensured.basin, ensured.status.value
    else:
        info = await s2.create_basin(basin, config=config, location=location)
    output.show({**json_output.basin(info), "status": status}, f"{basin_text(info)}  {status}")


@verb("list-basins")
@click.option("--prefix", default="", help="Only names that begin with this.")
@click.option("--start-after", default="", metavar="NAME", help="Only names after this one.")
@click.option("--limit", type=click.IntRange(min=1), help="At most this many.")
async def list_basins(
    s2: S2, output: Output, prefix: str, start_after: str, limit: int | None
) -> None:
    """List basins, in the order of their names, those being deleted too."""
    await show_basins(s2, output, prefix, start_after, limit)


@verb("delete-basin", changes=True)
@basin_argument
@yes_option
async def delete_basin(s2: S2, output: Output, basin: str, yes: bool) -> None:
    """Delete a basin and all its streams.

    They stop at once; storage is freed in the background. Asks first, unless --yes is given.
    """
    confirm(f"delete the basin {basin!r} with all its streams", yes=yes)
    await s2.delete_basin(basin)
    output.show({"name": basin, "status": "deleting"}, f"{basin}  deleting")


@verb("get-basin-config")
@basin_argument
async def get_basin_config(s2: S2, output: Output, basin: str) -> None:
    """Show the configuration of a basin."""
    shape = json_output.basin_config(await s2.get_basin_config(basin))
    output.show(shape, config_text(shape))


@verb("reconfigure-basin", changes=True)
@basin_argument
@config_options.basin_config_options
async def reconfigure_basin(s2: S2, output: Output, basin: str, **given: Any) -> None:
    """Change the configuration of a basin; what is not given stays as it is."""
    config = config_options.basin_config(given)
    config_options.require_some(config)
    shape = json_output.basin_config(await s2.reconfigure_basin(basin, config=config))
    output.show(shape, config_text(shape))
