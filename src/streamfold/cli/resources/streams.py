"""Commands for basins and streams, except their records. Lists are fetched page by page."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import click

from streamfold.cli import json_output
from streamfold.cli.connection import open_basin, verb
from streamfold.cli.json_output import Shape, rfc3339
from streamfold.cli.output import ListingOutput, Output, confirm, nothing_listed, yes_option
from streamfold.cli.parameters import basin_argument, stream_argument
from streamfold.cli.resources import config_options
from streamfold.cli.resources.config_options import RetentionInForce, of_basin, of_stream
from streamfold.model.names import StreamRef, parse_basin_name
from streamfold.model.units import duration_text

if TYPE_CHECKING:
    from s2_sdk import S2, BasinInfo, StreamInfo

Item = TypeVar("Item")
#: Members of a configuration in seconds, which are shown in the format of options.
_DURATIONS = ("retention_policy", "delete_on_empty_min_age")


async def show_basins(
    s2: S2, output: Output, prefix: str = "", start_after: str = "", limit: int | None = None
) -> None:
    """Print basins as pages arrive."""
    items = s2.list_all_basins(prefix=prefix, start_after=start_after, include_deleted=True)
    headings = ("basin", "created", "location", "state")
    table = ListingOutput(output, *headings, empty=nothing_listed("basins", prefix, start_after))
    async for info in first(items, limit):
        table.add(json_output.basin(info), *_basin_cells(info))
    table.close()


async def show_streams(
    s2: S2,
    output: Output,
    basin: str,
    prefix: str = "",
    start_after: str = "",
    limit: int | None = None,
) -> None:
    """Print the streams of a basin as pages arrive."""
    items = open_basin(s2, basin).list_all_streams(
        prefix=prefix, start_after=start_after, include_deleted=True
    )
    nothing = nothing_listed(f"streams in {basin!r}", prefix, start_after)
    table = ListingOutput(output, "stream", "created", "cipher", "state", empty=nothing)
    async for info in first(items, limit):
        table.add(json_output.stream(info), *_stream_cells(info))
    table.close()


async def first(items: AsyncIterator[Item], limit: int | None) -> AsyncIterator[Item]:
    """Yield the first `limit` of `items`, or all, without fetching one page too many."""
    numbers = count(1)
    async for item in items:
        yield item
        if next(numbers) == limit:
            return


def _basin_cells(info: BasinInfo) -> tuple[str, ...]:
    state = "deleting" if info.deleted_at else ""
    return info.name, rfc3339(info.created_at), info.location or "", state


def _stream_cells(info: StreamInfo) -> tuple[str, ...]:
    state = "deleting" if info.deleted_at else ""
    return info.name, rfc3339(info.created_at), info.cipher.value if info.cipher else "", state


def _show_created(
    output: Output,
    shape: Shape,
    cells: tuple[str, ...],
    status: str,
    retention: RetentionInForce,
) -> None:
    shown = (f"{cells[0]:<32}", *cells[1:], status, retention.text)
    shape = {**shape, "status": status, "retention_policy": retention.value}
    output.show(shape, "  ".join(cell for cell in shown if cell))


def _advise(output: Output, advice: str) -> None:
    if advice:
        output.note(advice)


def config_text(shape: Shape, path: str = "") -> str:
    """Format a configuration, one `member = value` per line."""
    lines = []
    for name, value in shape.items():
        if isinstance(value, dict):
            lines.append(config_text(value, f"{path}{name}."))
        else:
            lines.append(f"{path}{name} = {_plain(name, value)}")
    return "\n".join(lines)


def _plain(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name in _DURATIONS:
        return duration_text(timedelta(seconds=value))
    return "-" if value is None else str(value)


@verb("create-stream", changes=True)
@stream_argument
@click.option(
    "--ensure", is_flag=True, help="If it exists, give it this configuration and succeed."
)
@config_options.stream_config_options
async def create_stream(
    s2: S2, output: Output, ref: StreamRef, ensure: bool, **options: Any
) -> None:
    """Create a stream. Unset options inherit from the basin; by default records are kept for 7 days."""
    config, status = config_options.stream_config(options), "created"
    basin = open_basin(s2, ref.basin)
    if ensure:
        ensured = await basin.ensure_stream(ref.stream, config=config)
        info, status = ensured.stream, ensured.status.value
    else:
        info = await basin.create_stream(ref.stream, config=config)
    retention = await of_stream(basin.get_stream_config(ref.stream))
    _show_created(output, json_output.stream(info), _stream_cells(info), status, retention)
    if options["retention_policy"] is None:
        uri = f"s2://{ref.basin}/{ref.stream}"
        change = f"streamfold reconfigure-stream {shlex.quote(uri)}"
        _advise(output, retention.advice(f"the stream {ref.stream!r}", change))


@verb("list-streams")
@basin_argument
@click.option("--prefix", default="", help="Only names that begin with this.")
@click.option("--start-after", default="", metavar="NAME", help="Only names after this one.")
@click.option("--limit", type=click.IntRange(min=1), help="At most this many.")
async def list_streams(
    s2: S2, output: Output, basin: str, prefix: str, start_after: str, limit: int | None
) -> None:
    """List streams by name, including those being deleted."""
    await show_streams(s2, output, basin, prefix, start_after, limit)


@verb("ls")
@click.argument("where", default="", metavar="[s2://BASIN[/PREFIX]]")
async def ls(s2: S2, output: Output, where: str) -> None:
    """List basins, or the streams of a basin whose names begin with a prefix."""
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
async def reconfigure_stream(s2: S2, output: Output, ref: StreamRef, **options: Any) -> None:
    """Change the configuration of a stream; unset options stay as they are."""
    config = config_options.stream_config(options)
    config_options.require_some(config)
    changed = await open_basin(s2, ref.basin).reconfigure_stream(ref.stream, config=config)
    shape = json_output.stream_config(changed)
    output.show(shape, config_text(shape))


@verb("create-basin", changes=True)
@basin_argument
@click.option("--location", metavar="NAME", help="Location to keep its records in.")
@click.option(
    "--ensure", is_flag=True, help="If it exists, give it this configuration and succeed."
)
@config_options.basin_config_options
async def create_basin(
    s2: S2, output: Output, basin: str, location: str | None, ensure: bool, **options: Any
) -> None:
    """Create a basin.

    Its name has 8 to 48 lower-case letters, digits and hyphens. The configuration is the basin's own,
    and the default for its streams, which keep records for 7 days unless --retention-policy says
    otherwise.
    """
    parse_basin_name(basin)  # rejects the name with the rule, which the SDK does not state
    config, status = config_options.basin_config(options), "created"
    if ensure:
        ensured = await s2.ensure_basin(basin, config=config, location=location)
        info, status = ensured.basin, ensured.status.value
    else:
        info = await s2.create_basin(basin, config=config, location=location)
    retention = await of_basin(s2.get_basin_config(basin))
    _show_created(output, json_output.basin(info), _basin_cells(info), status, retention)
    if options["retention_policy"] is None:
        subject = f"streams created in {basin!r}"
        _advise(output, retention.advice(subject, f"streamfold reconfigure-basin {basin}"))


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
async def reconfigure_basin(s2: S2, output: Output, basin: str, **options: Any) -> None:
    """Change the configuration of a basin; what is not given stays as it is."""
    config = config_options.basin_config(options)
    config_options.require_some(config)
    shape = json_output.basin_config(await s2.reconfigure_basin(basin, config=config))
    output.show(shape, config_text(shape))
