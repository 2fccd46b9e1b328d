"""`streamfold apply` and `diff`: create and configure what a file specifies, or compare with it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

import click
import msgspec

from streamfold.cli.connection import send_json, verb
from streamfold.cli.exit_status import ExitStatus, VerbFailedError
from streamfold.cli.output import Output, ProgressBar
from streamfold.cli.terminal import inert, styled
from streamfold.model.configs import BasinConfig, StreamConfig, StreamConfigLayer, resolve
from streamfold.model.resource_spec import (
    BasinSpec,
    ResourceSpec,
    parse_resource_spec,
    read_resource_spec,
)
from streamfold.model.units import duration_text
from streamfold.wire.s2.resources import BasinConfigJson, StreamConfigJson

if TYPE_CHECKING:
    from s2_sdk import S2

#: Number of resources from which a bar is drawn, because each takes a request or two.
_MANY = 20
_SIGNS = {"create": ("+", "added"), "update": ("~", "changed"), "none": ("=", "faint")}
_WORDS = {"create": "created", "update": "updated", "none": "unchanged"}
_MISSING = {"create": "would be created", "update": "would be updated", "none": "unchanged"}

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class MemberChange:
    """A configuration member's current value and the file's value. None where nothing is set."""

    member: str
    before: object
    after: object


@dataclass(frozen=True, slots=True)
class ResourceChange:
    """The change that makes one basin or stream match the file."""

    kind: str
    #: A basin, or basin/stream.
    name: str
    #: One of create, update and none.
    action: str
    members: tuple[MemberChange, ...]
    #: The request that makes the change.
    path: str
    body: object
    basin: str | None


_FILE = click.argument(
    "file", required=False, type=click.Path(dir_okay=False, allow_dash=True, path_type=Path)
)
_FILE_OPTION = click.option(
    "--file", "-f", "named", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="The same as FILE.",
)  # fmt: skip


@verb("apply", changes=True)
@_FILE
@_FILE_OPTION
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
async def apply(
    s2: S2, output: Output, file: Path | None, named: Path | None, dry_run: bool
) -> None:
    """Create and configure basins and streams from a file.

    FILE is JSON, as for `serve --init-file` and S2's own `apply`; - is standard input. Missing
    resources are created, and existing ones get the file's configuration. Resources that the file does
    not name stay as they are, and nothing is ever deleted. A second run changes nothing.
    """
    spec = _read(file, named)
    with ProgressBar("apply", _count(spec), "resources", least=_MANY) as bar:
        async for change in compare(s2, spec):
            if not dry_run and change.action != "none":
                await send_json(s2, "PUT", change.path, change.body, basin=change.basin)
            bar.update(1)
            _show(output, change, applied=not dry_run)


@verb("diff")
@_FILE
@_FILE_OPTION
async def diff(s2: S2, output: Output, file: Path | None, named: Path | None) -> None:
    """Compare basins and streams with a file; status 7 if they differ.

    Shows what `streamfold apply` would change. Resources that the file does not name are not compared.
    """
    spec, differing = _read(file, named), 0
    with ProgressBar("diff", _count(spec), "resources", least=_MANY) as bar:
        async for change in compare(s2, spec):
            bar.update(1)
            if change.action != "none":
                differing += 1
                _show(output, change, applied=False)
    if differing:
        raise VerbFailedError(
            "differs",
            f"{differing} of {_count(spec)} resources differ from the file: "
            "`streamfold apply` makes them what it says",
            ExitStatus.DIFFERS,
        )


async def compare(s2: S2, spec: ResourceSpec) -> AsyncIterator[ResourceChange]:
    """Yield a change for each basin and stream in the file, in its order."""
    for basin in spec.basins:
        change = await _compare_basin(s2, basin)
        yield change
        for stream in basin.streams:
            layer = stream.to_model()
            path = f"/v1/streams/{quote(stream.name, safe='')}"
            stored = None
            if change.action != "create":
                stored = await _get(s2, path, StreamConfigJson, basin.name)
            after = resolve(layer, basin.to_model().default_stream_config)
            before = None if stored is None else stored.to_model()
            yield ResourceChange(
                "stream",
                f"{basin.name}/{stream.name}",
                *_difference(before, _stream_members(before), _stream_members(after)),
                path,
                _body(StreamConfigJson.of(layer)),
                basin.name,
            )


async def _compare_basin(s2: S2, basin: BasinSpec) -> ResourceChange:
    path = f"/v1/basins/{quote(basin.name, safe='')}"
    stored = await _get(s2, path, BasinConfigJson)
    after, before = basin.to_model(), None if stored is None else stored.to_model()
    body = {"config": _body(BasinConfigJson.of(after))}
    difference = _difference(before, _basin_members(before), _basin_members(after))
    return ResourceChange("basin", basin.name, *difference, path, body, None)


async def _get(s2: S2, path: str, kind: type[Config], basin: str | None = None) -> Config | None:
    """Return a configuration, or None if the basin or stream does not exist."""
    from s2_sdk import S2ServerError

    try:
        return msgspec.json.decode(await send_json(s2, "GET", path, basin=basin), type=kind)
    except S2ServerError as error:
        if error.status_code == 404:
            return None
        raise


def _difference(
    stored: object, before: dict[str, object], after: dict[str, object]
) -> tuple[str, tuple[MemberChange, ...]]:
    """Return the action and the differing members; for a new resource, the members with a value."""
    members = tuple(
        MemberChange(name, before.get(name), value)
        for name, value in after.items()
        if before.get(name) != value
    )
    action = "create" if stored is None else "update" if members else "none"
    return action, members


def _stream_members(
    config: StreamConfig | StreamConfigLayer | None, prefix: str = ""
) -> dict[str, object]:
    if config is None:
        return {}
    values = {
        "storage_class": config.storage_class,
        "retention_policy": config.retention,
        "timestamping.mode": config.timestamp_mode,
        "timestamping.uncapped": config.timestamp_uncapped,
        "delete_on_empty.min_age": config.delete_on_empty_secs,
        "trim_on_snapshot": config.trim_on_snapshot,
    }
    return {f"{prefix}{name}": value for name, value in values.items()}


def _basin_members(config: BasinConfig | None) -> dict[str, object]:
    if config is None:
        return {}
    return {
        **_stream_members(config.default_stream_config, "default_stream_config."),
        "stream_cipher": config.stream_cipher,
        "create_stream_on_append": config.create_stream_on_append,
        "create_stream_on_read": config.create_stream_on_read,
    }


def _body(config: object) -> object:
    """Return a request's content: only members that are set, as S2's own clients send them."""
    return _without_null(msgspec.to_builtins(config))


def _without_null(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    return value


def _read(file: Path | None, named: Path | None) -> ResourceSpec:
    path = file or named
    if path is None or (file and named):
        raise click.UsageError("give one file: FILE or --file FILE")
    if str(path) == "-":
        return parse_resource_spec(sys.stdin.buffer.read(), "standard input")
    return read_resource_spec(path, "resource file")


def _count(spec: ResourceSpec) -> int:
    return sum(1 + len(basin.streams) for basin in spec.basins)


def _show(output: Output, change: ResourceChange, *, applied: bool) -> None:
    members = [
        {"member": one.member, "before": one.before, "after": one.after} for one in change.members
    ]
    shape = {
        "kind": change.kind,
        "name": change.name,
        "action": change.action,
        "applied": applied,
        "changes": members,
    }
    sign, meaning = _SIGNS[change.action]
    words = _WORDS if applied else _MISSING
    lines = [f"{sign} {change.kind} {inert(change.name)}  {words[change.action]}"]
    for one in change.members:
        old = "" if change.action == "create" else f"{_plain(one.before)} -> "
        lines.append(f"    {one.member}: {old}{_plain(one.after)}")
    output.show(shape, "\n".join(styled(line, meaning) for line in lines))


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):  # all numbers in a configuration are durations in seconds
        return duration_text(timedelta(seconds=value))
    return "-" if value is None else str(value)
