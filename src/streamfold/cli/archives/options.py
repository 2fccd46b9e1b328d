"""Defines archive commands and their options, and opens archives. Needs no server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamfold.cli.exit_status import exit_statuses
from streamfold.cli.output import Output
from streamfold.cli.parameters import ByteSize, TimeType
from streamfold.extras import needing_extra

if TYPE_CHECKING:
    from streamfold.archive import Archive, Destination

Verb = Callable[..., Coroutine[Any, Any, None]]


def verb(name: str) -> Callable[[Verb], click.Command]:
    """Return a decorator that makes a command of a coroutine function.

    The function's first argument is the output.
    """

    def command_of(function: Verb) -> click.Command:
        @wraps(function)
        def run(as_json: bool, **options: Any) -> None:
            with needing_extra("archive"), exit_statuses():
                asyncio.run(function(Output(as_json=as_json), **options))

        command = click.command(name)(run)
        command.params.append(
            click.Option(["--json", "as_json"], is_flag=True, help="Print JSON lines.")
        )
        return command

    return command_of


def positive(context: click.Context, option: click.Parameter, value: int) -> int:
    """Reject a duration of zero."""
    if value <= 0:
        raise click.BadParameter("it must be at least 1s", context, option)
    return value


uri_argument = click.argument("uri")
# The options that `show` and `restore` had before `--at`, which are still accepted.
_position_option = click.option("--position", metavar="P", hidden=True)
_time_option = click.option("--time", "moment", type=TimeType(), hidden=True)
at_source_option = click.option(
    "--at-source",
    metavar="LSN",
    help="The newest table without a change that PostgreSQL committed after this LSN.",
)
at_option = click.option(
    "--at", metavar="P|TIME", help="The table at this position, or as published at this time."
)
_format = click.option(
    "--read",
    "formats",
    multiple=True,
    metavar="FORMAT",
    help="Formats to prefer, best first, if an artifact has several.",
)
_key = click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="COLUMN",
    help="Key fields, for archives whose manifest has none.",
)
_cache = click.option(
    "--cache", type=click.Path(file_okay=False, path_type=Path), help="Keep remote files here."
)
_cache_size = click.option(
    "--cache-size", type=ByteSize(), default="10GiB", show_default=True, help="Limit of the cache."
)


def point_options(function: Verb) -> Verb:
    """Add the options for the point at which the table is rebuilt."""
    for option in (_time_option, _position_option, at_source_option, at_option):
        function = option(function)
    return function


def reading_options(function: Verb) -> Verb:
    """Add the options for reading files."""
    for option in (_cache_size, _cache, _key, _format):
        function = option(function)
    return function


async def open_archive(uri: str, **reading: Any) -> Archive:
    """Open the archive at `uri` with the values of `reading_options`."""
    from streamfold import archive

    folder = reading.get("cache")
    return await archive.open(
        uri,
        cache=archive.Cache(folder, reading["cache_size"]) if folder else None,
        formats=reading.get("formats") or None,
        key_fields=reading.get("keys") or None,
    )


def open_destination(uri: str) -> Destination:
    """Open the folder at `uri`, without contacting storage yet."""
    from streamfold.archive import Destination
    from streamfold.archive.destinations.destination import folder_url

    return Destination.open(folder_url(uri))


def moment_of(moment: int | None) -> datetime | None:
    """Return the time of an option of type `TimeType`."""
    try:
        return None if moment is None else datetime.fromtimestamp(moment / 1000, UTC)
    except (OSError, OverflowError, ValueError):  # the exception type depends on the system
        raise click.UsageError(
            f"{moment} ms since 1970 is not a time: write one of the years 1 to 9999"
        ) from None


def table_at(archive: Archive, at: str | None, at_source: str | None) -> dict[str, Any]:
    """Return the position or time that `--at` names, or the position of the table at `--at-source`."""
    if at is not None and at_source is not None:
        raise click.UsageError("--at and --at-source exclude each other: give one of them")
    if at_source is not None:
        return {"position": archive.plan(at_source=at_source).position}
    return {} if at is None else _position_or_time(archive, at)


def point_of(archive: Archive, **options: Any) -> dict[str, Any]:
    """Return the arguments for a rebuild, from the options of `show` and `restore`."""
    names = {"at": "--at", "at_source": "--at-source", "position": "--position", "moment": "--time"}
    points = {name: value for name in names if (value := options[name]) is not None}
    if len(points) > 1:
        listed = " and ".join(names[name] for name in points)
        raise click.UsageError(f"{listed} exclude each other: give one of them")
    if "at" in points:
        return _position_or_time(archive, points["at"])
    if "moment" in points:
        return {"time": moment_of(points["moment"])}
    return points


def _position_or_time(archive: Archive, at: str) -> dict[str, Any]:
    """Return what `--at` names: a position if the text is one in the table's order, else a time."""
    from streamfold.archive import PositionInvalidError

    try:
        archive.order.rank(at)
    except PositionInvalidError as error:
        try:
            if at.strip().isdigit():  # a mistyped position, more likely than milliseconds
                raise click.BadParameter(at)
            return {"time": moment_of(TimeType().convert(at, None, None))}
        except click.BadParameter:
            raise click.UsageError(f"--at {at!r} is not a time, and {error.message}") from None
    return {"position": at}
