"""Reads a server's Prometheus metrics and busiest streams, and compares two readings."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import httpx
import msgspec

from streamfold.cli.exit_status import VerbFailedError
from streamfold.cli.json_output import Shape
from streamfold.cli.target import Target
from streamfold.http_client import build_request, cause_of, open_transport
from streamfold.wording import reason_of

#: Seconds for a server to respond, and maximum bytes of a response.
_TIMEOUT, _ANSWER_MAX = 5.0, 8 << 20
_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ACK: Final = "s2_append_ack_latency_seconds"
_FLUSH: Final = "streamfold_flush_duration_seconds"
#: Members of a view that are the value of a single series.
_GAUGES: Final = {
    "followers": "streamfold_followers",
    "connections": "streamfold_connections",
    "queue_bytes": "streamfold_flush_queue_bytes",
    "queue_waiting": "streamfold_flush_queue_waiting",
    "unread_bytes": "streamfold_unread_bytes",
    "memory_bytes": "process_resident_memory_bytes",
    "storage_free_bytes": "streamfold_storage_free_bytes",
    "storage_full": "streamfold_storage_full",
    "storage_open": "streamfold_storage_open",
}

#: Values of series by name and labels.
Series = Mapping[tuple[str, str], float]


class StreamRate(msgspec.Struct, frozen=True):
    """A stream with the rates of its appends."""

    basin: str
    stream: str
    records_per_second: float
    bytes_per_second: float


class _Busiest(msgspec.Struct, frozen=True):
    streams: tuple[StreamRate, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """All series at one moment."""

    at: float
    series: Series
    #: The busiest streams first; None if the server does not support or does not show them.
    busiest: Sequence[StreamRate] | None = None

    def value(self, name: str, labels: str = "") -> float | None:
        return self.series.get((name, labels))


def parse_metrics(text: str) -> Series:
    """Parse Prometheus' text format. Labels become sorted `name=value` pairs."""
    series = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _LINE.fullmatch(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        joined = ",".join(f"{key}={text}" for key, text in sorted(_LABEL.findall(labels or "")))
        try:
            series[name, joined] = float(value)
        except ValueError:
            continue
    return series


def read_metrics(target: Target) -> Reading:
    """Query the server once. Raises VerbFailedError with a remedy if it does not return metrics."""
    headers = {"authorization": f"Bearer {target.token}"} if target.token else {}
    try:
        origin = httpx.URL(target.account)
        with open_transport(origin) as transport:
            status, body = _get(transport, origin, "/metrics", headers)
            busiest_status, named = _get(transport, origin, "/v1/busiest-streams", headers)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise VerbFailedError(
            "unreachable",
            f"the server at {target.account} cannot be reached: {reason_of(cause_of(error))}; "
            "is it running? `streamfold doctor` looks further",
        ) from None
    if status in (401, 403):
        raise VerbFailedError(
            "permission_denied",
            f"{target.account} needs a token that may see the account's metrics: give one with "
            "`--op-group-perms account=r`",
        )
    series = parse_metrics(body.decode(errors="replace")) if status == 200 else {}
    if not any(name == f"{_ACK}_count" for name, _ in series):
        raise VerbFailedError(
            "metrics_missing",
            f"{target.account}/metrics (status {status}) has no metrics of appends: "
            "top needs Streamfold or s2-lite",
        )
    return Reading(time.time(), series, _streams(named) if busiest_status == 200 else None)


def _get(
    transport: httpx.BaseTransport, origin: httpx.URL, path: str, headers: Mapping[str, str]
) -> tuple[int, bytes]:
    """Return a response's status and body. Stops reading a body that is too long."""
    response = transport.handle_request(
        build_request("GET", origin, path, headers, timeout=_TIMEOUT)
    )
    body = b""
    for piece in response.iter_raw():
        body += piece
        if len(body) > _ANSWER_MAX:
            break
    response.close()
    return response.status_code, body


def _streams(answer: bytes) -> Sequence[StreamRate] | None:
    """Return the streams in a response, or None if it is not Streamfold's."""
    try:
        return msgspec.json.decode(answer, type=_Busiest).streams
    except msgspec.DecodeError:
        return None


def view(before: Reading, now: Reading) -> Shape:
    """Describe a server's activity between two readings, and its state. Unknown values are null."""
    shape: Shape = {
        "at": round(now.at, 3),
        "seconds": round(now.at - before.at, 3),
        "uptime_seconds": _since(now, "process_start_time_seconds"),
        "appends_per_second": _rate(before, now, "s2_append_batch_records_count"),
        "records_per_second": _rate(before, now, "s2_append_batch_records_sum"),
        "bytes_per_second": _rate(before, now, "s2_append_batch_bytes_sum"),
        "commits_per_second": _rate(before, now, f"{_FLUSH}_count"),
        "cpu": _rate(before, now, "process_cpu_seconds_total"),
        "ack_ms": _quantiles(before, now, _ACK),
        "flush_ms": _quantiles(before, now, _FLUSH),
    }
    shape |= {name: _whole(now.value(series)) for name, series in _GAUGES.items()}
    for state in ("live", "dead", "disk"):
        stored = now.value("streamfold_store_bytes", f"state={state}")
        shape[f"stored_{state}_bytes"] = _whole(stored)
    shape["busiest"] = (
        None if now.busiest is None else [msgspec.structs.asdict(each) for each in now.busiest]
    )
    return shape


def _whole(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else round(value)


def _since(now: Reading, name: str) -> float | None:
    began = now.value(name)
    return None if began is None else round(now.at - began, 1)


def _rate(before: Reading, now: Reading, name: str) -> float | None:
    """Return a counter's increase per second. After a restart, a counter has started from 0."""
    first, last = before.value(name), now.value(name)
    if first is None or last is None or now.at <= before.at:
        return None
    return round((last - first if last >= first else last) / (now.at - before.at), 3)


def _quantiles(before: Reading, now: Reading, name: str) -> dict[str, float] | None:
    """Return quantiles, in milliseconds, of a histogram's observations between the readings."""
    buckets = sorted(
        (float(labels.removeprefix("le=").replace("+Inf", "inf")), labels)
        for series, labels in now.series
        if series == f"{name}_bucket"
    )
    counted = [
        (
            bound,
            now.series[f"{name}_bucket", labels] - (before.value(f"{name}_bucket", labels) or 0),
        )
        for bound, labels in buckets
    ]
    if not counted or counted[-1][1] <= 0:
        return None
    return {
        f"p{percent}": round(_quantile(counted, percent / 100) * 1000, 3)
        for percent in (50, 90, 99)
    }


def _quantile(counted: list[tuple[float, float]], share: float) -> float:
    rank, low, below = share * counted[-1][1], 0.0, 0.0
    for bound, count in counted:
        if count >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / max(1.0, count - below)
        low, below = bound, count
    return low
