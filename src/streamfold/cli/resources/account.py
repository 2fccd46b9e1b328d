"""Commands for access tokens, and for the usage of an account, a basin or a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from streamfold.cli import json_output
from streamfold.cli.connection import verb
from streamfold.cli.json_output import rfc3339
from streamfold.cli.output import ListingOutput, Output, nothing_listed
from streamfold.cli.parameters import Duration, TimeType, basin_argument, stream_argument
from streamfold.cli.resources.streams import first
from streamfold.model.names import StreamRef

if TYPE_CHECKING:
    from s2_sdk import (
        S2,
        AccessTokenScope,
        Accumulation,
        ExactMatch,
        Gauge,
        Label,
        Operation,
        OperationGroupPermissions,
        PrefixMatch,
        Scalar,
    )

_PERMISSIONS = {"r": "read", "w": "write", "rw": "read-write"}


@verb("issue-access-token", changes=True)
@click.argument("token_id", metavar="ID")
@click.option("--basins", metavar="SET", help="Basins that the token may use.")
@click.option("--streams", metavar="SET", help="Streams that the token may use.")
@click.option("--access-tokens", metavar="SET", help="Access tokens that the token may manage.")
@click.option(
    "--op-group-perms",
    metavar="GROUP=r|w|rw,...",
    help="Operations it allows, by group (account, basin, stream): stream=rw,basin=r.",
)
@click.option(
    "--ops", metavar="OP,...", help="Operations it allows, one by one: append,check-tail."
)
@click.option("--expires-in", type=Duration(), metavar="AGE", help="For how long: 30d.")
@click.option("--expires-at", type=TimeType(), help="Until when.")
@click.option(
    "--auto-prefix-streams",
    is_flag=True,
    help="Have the prefix of --streams added to names in requests, and removed in listings.",
)
async def issue_access_token(
    s2: S2,
    output: Output,
    token_id: str,
    basins: str | None,
    streams: str | None,
    access_tokens: str | None,
    op_group_perms: str | None,
    ops: str | None,
    expires_in: int | None,
    expires_at: int | None,
    auto_prefix_streams: bool,
) -> None:
    """Issue an access token and print it; it cannot be shown again.

    A SET is a prefix of names, or one name written =NAME; '' is all names. A set that you omit is
    empty.
    """
    from s2_sdk import AccessTokenScope

    expiry = _expiry(expires_in, expires_at)
    if op_group_perms is None and ops is None:
        raise click.UsageError(
            "the token would allow nothing: give --op-group-perms, as in stream=rw, or --ops"
        )
    scope = AccessTokenScope(
        basins=_matching(basins),
        streams=_matching(streams),
        access_tokens=_matching(access_tokens),
        op_groups=_groups(op_group_perms),
        ops=_operations(ops),
    )
    token = await s2.issue_access_token(
        token_id,
        scope=scope,
        expires_at=expiry,
        auto_prefix_streams=auto_prefix_streams,
    )
    output.show({"id": token_id, "access_token": token}, token)


@verb("list-access-tokens")
@click.option("--prefix", default="", help="Only ids that begin with this.")
@click.option("--start-after", default="", metavar="ID", help="Only ids after this one.")
@click.option("--limit", type=click.IntRange(min=1), help="At most this many.")
async def list_access_tokens(
    s2: S2, output: Output, prefix: str, start_after: str, limit: int | None
) -> None:
    """List access tokens, without their secrets, in the order of their ids."""
    items = s2.list_all_access_tokens(prefix=prefix, start_after=start_after)
    nothing = nothing_listed("access tokens", prefix, start_after, names="ids")
    table = ListingOutput(output, "id", "expiry", "scope", "", empty=nothing)
    async for info in first(items, limit):
        expiry = f"expires {rfc3339(info.expires_at)}" if info.expires_at else "does not expire"
        table.add(json_output.access_token(info), info.id, expiry, _scope_text(info.scope), "")
    table.close()


@verb("revoke-access-token", changes=True)
@click.argument("token_id", metavar="ID")
async def revoke_access_token(s2: S2, output: Output, token_id: str) -> None:
    """Revoke an access token; it is refused from then on."""
    await s2.revoke_access_token(token_id)
    output.show({"id": token_id, "status": "revoked"}, f"{token_id}  revoked")


def _scope_text(scope: AccessTokenScope) -> str:
    parts = []
    for kind in ("basins", "streams", "access_tokens"):
        if (names := getattr(scope, kind)) is not None:
            exact = "=" if type(names).__name__ == "ExactMatch" else ""
            parts.append(f"{kind}:{exact}{names.value or '*'}")
    parts.extend(
        f"{group}:{permission.value}"
        for group in ("account", "basin", "stream")
        if (permission := getattr(scope.op_groups, group, None))
    )
    parts += sorted(operation.value for operation in scope.ops)
    return " ".join(parts)


def _matching(text: str | None) -> ExactMatch | PrefixMatch | None:
    from s2_sdk import ExactMatch, PrefixMatch

    if text is None:
        return None
    return ExactMatch(text[1:]) if text.startswith("=") else PrefixMatch(text)


def _groups(text: str | None) -> OperationGroupPermissions | None:
    from s2_sdk import OperationGroupPermissions, Permission

    if text is None:
        return None
    chosen = {}
    for part in text.split(","):
        group, _, letters = part.partition("=")
        if group not in ("account", "basin", "stream") or letters not in _PERMISSIONS:
            raise click.UsageError(
                f"--op-group-perms {part!r} is not understood: write it like stream=rw,basin=r"
            )
        chosen[group] = Permission(_PERMISSIONS[letters])
    return OperationGroupPermissions(**chosen)


def _operations(text: str | None) -> list[Operation]:
    from s2_sdk import Operation

    operations = {operation.value: operation for operation in Operation}
    names = text.split(",") if text else []
    for name in names:
        if name not in operations:
            raise click.UsageError(
                f"--ops {name!r} is unknown: choose from {', '.join(operations)}"
            )
    return [operations[name] for name in names]


def _expiry(seconds: int | None, moment: int | None) -> datetime | None:
    if seconds is not None and moment is not None:
        raise click.UsageError("--expires-in and --expires-at exclude each other: give one")
    if seconds is None and moment is None:
        return None
    try:
        return datetime.fromtimestamp(
            time.time() + seconds if seconds is not None else (moment or 0) / 1000, UTC
        )
    except (ValueError, OverflowError, OSError):  # the exception type depends on the system
        raise click.UsageError(
            "an expiry after the year 9999 cannot be kept: give an earlier one, or none"
        ) from None


Function = TypeVar("Function", bound=Callable[..., Any])

#: Seconds.
_HOUR = 3600
_ACCOUNT_SETS = ("active-basins", "account-ops", "estimated-billable-usage")
_BASIN_SETS = (
    "storage", "append-ops", "read-ops", "read-throughput", "append-throughput", "basin-ops",
)  # fmt: skip
_STREAM_SETS = ("storage",)


def _question(sets: Iterable[str]) -> Callable[[Function], Function]:
    """Add the argument for the set of metrics, and the options for the time span."""

    def add(function: Function) -> Function:
        for option in (
            click.option("--interval", type=click.Choice(["minute", "hour", "day"])),
            click.option("--end", type=TimeType(), help="Up to this time.  [default: now]"),
            click.option(
                "--start",
                type=TimeType(),
                help="Start of the period (ms, or RFC 3339).  [default: an hour before the end]",
            ),
            click.argument("metric_set", type=click.Choice(list(sets)), metavar="SET"),
        ):
            function = option(function)
        return function

    return add


@verb("get-account-metrics")
@_question(_ACCOUNT_SETS)
async def get_account_metrics(s2: S2, output: Output, metric_set: str, **span: Any) -> None:
    """Show the usage of the whole account.

    SET is active-basins, account-ops or estimated-billable-usage.
    """
    from s2_sdk import AccountMetricSet

    _show(output, await s2.account_metrics(set=AccountMetricSet(metric_set), **_span(**span)))


@verb("get-basin-metrics")
@basin_argument
@_question(_BASIN_SETS)
async def get_basin_metrics(
    s2: S2, output: Output, basin: str, metric_set: str, **span: Any
) -> None:
    """Show the usage of a basin.

    SET is storage, append-ops, read-ops, read-throughput, append-throughput or basin-ops.
    """
    from s2_sdk import BasinMetricSet

    _show(output, await s2.basin_metrics(basin, set=BasinMetricSet(metric_set), **_span(**span)))


@verb("get-stream-metrics")
@stream_argument
@_question(_STREAM_SETS)
async def get_stream_metrics(
    s2: S2, output: Output, ref: StreamRef, metric_set: str, **span: Any
) -> None:
    """Show the usage of a stream.

    SET is storage.
    """
    from s2_sdk import StreamMetricSet

    chosen = StreamMetricSet(metric_set)
    _show(output, await s2.stream_metrics(*ref, set=chosen, **_span(**span)))


def _span(start: int | None, end: int | None, interval: str | None) -> dict[str, Any]:
    """Return the span as the SDK expects it: whole seconds, with an exclusive end.

    The end is rounded up to include the current second.
    """
    from s2_sdk import TimeseriesInterval

    until = int(time.time()) + 1 if end is None else -(-end // 1000)
    return {
        "start": until - _HOUR if start is None else start // 1000,
        "end": until,
        "interval": None if interval is None else TimeseriesInterval(interval),
    }


def _show(output: Output, metrics: Iterable[Scalar | Accumulation | Gauge | Label]) -> None:
    for value in metrics:
        shape = json_output.metric(value)
        output.show(shape, _text(shape))


def _text(shape: json_output.Shape) -> str:
    name, unit = shape["name"], shape.get("unit") or ""
    values = shape.get("values")
    if not isinstance(values, list):
        return f"{name}  {shape['value']:.12g} {unit}"
    if shape["kind"] == "label":
        return f"{name}  {', '.join(values) or '-'}"
    lines = [f"{name} ({unit})"] if values else [f"{name} ({unit})  no values in this time"]
    for second, value in values:
        lines.append(f"  {rfc3339(datetime.fromtimestamp(second, UTC))}  {value:.12g}")
    return "\n".join(lines)
