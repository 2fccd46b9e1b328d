"""Verbs that show the usage of an account, a basin or a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from streamfold.cli import json_output
from streamfold.cli.connection import verb
from streamfold.cli.json_output import rfc3339
from streamfold.cli.output import Output
from streamfold.cli.parameters import Moment, basin_argument, stream_argument
from streamfold.model.names import StreamRef

if TYPE_CHECKING:
    from s2_sdk import S2, Accumulation, Gauge, Label, Scalar

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
            click.option("--end", type=Moment(), help="Up to this time.  [default: now]"),
            click.option(
                "--start",
                type=Moment(),
                help="From this time on (ms, or RFC 3339).  [default: an hour before the end]",
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
    """Return the span as the SDK takes it: whole seconds, with an exclusive end.

    The end is rounded up, so that the current second is included.
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
    lines = [f"{name} ({unit})"]
    for second, value in values:
        lines.append(f"  {rfc3339(datetime.fromtimestamp(second, UTC))}  {value:.12g}")
    return "\n".join(lines)
