"""Basins, streams and configurations as people read them, and listings page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count
from typing import TYPE_CHECKING, TypeVar

from streamfold.cli import json_output
from streamfold.cli.connection import open_basin
from streamfold.cli.json_output import Shape, rfc3339
from streamfold.cli.output import Output

if TYPE_CHECKING:
    from s2_sdk import S2, BasinInfo, StreamInfo

Item = TypeVar("Item")


async def show_basins(
    s2: S2, output: Output, prefix: str = "", start_after: str = "", limit: int | None = None
) -> None:
    """Print basins as pages arrive."""
    items = s2.list_all_basins(prefix=prefix, start_after=start_after, include_deleted=True)
    async for info in first(items, limit):
        output.show(json_output.basin(info), basin_text(info))


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
    async for info in first(items, limit):
        output.show(json_output.stream(info), stream_text(info))


async def first(items: AsyncIterator[Item], limit: int | None) -> AsyncIterator[Item]:
    """Yield the first `limit` of `items`, or all, without fetching a page too many."""
    numbers = count(1)
    async for item in items:
        yield item
        if next(numbers) == limit:
            return


def basin_text(info: BasinInfo) -> str:
    notes = [info.location or "", "deleting" if info.deleted_at else ""]
    return _columns(info.name, rfc3339(info.created_at), *notes)


def stream_text(info: StreamInfo) -> str:
    notes = [info.cipher.value if info.cipher else "", "deleting" if info.deleted_at else ""]
    return _columns(info.name, rfc3339(info.created_at), *notes)


def _columns(name: str, *others: str) -> str:
    return "  ".join([f"{name:<32}", *(text for text in others if text)])


def config_text(shape: Shape, path: str = "") -> str:
    """Format a configuration, one `member = value` per line."""
    lines = []
    for name, value in shape.items():
        if isinstance(value, dict):
            lines.append(config_text(value, f"{path}{name}."))
        else:
            lines.append(f"{path}{name} = {_plain(value)}")
    return "\n".join(lines)


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)
