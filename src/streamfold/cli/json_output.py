"""The JSON that commands print. Members may be added, but are never renamed, removed or retyped.

Resources have times in RFC 3339 (UTC). Records have timestamps in milliseconds since the Unix
epoch.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from s2_sdk import (
        AccessTokenInfo,
        Accumulation,
        AppendAck,
        BasinConfig,
        BasinInfo,
        ExactMatch,
        Gauge,
        Label,
        PrefixMatch,
        Scalar,
        SequencedRecord,
        StreamConfig,
        StreamInfo,
        StreamPosition,
    )

Shape: TypeAlias = dict[str, object]


def rfc3339(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _when(moment: datetime | None) -> str | None:
    return None if moment is None else rfc3339(moment)


def basin(info: BasinInfo) -> Shape:
    return {
        "name": info.name,
        "location": info.location,
        "created_at": _when(info.created_at),
        "deleted_at": _when(info.deleted_at),
    }


def stream(info: StreamInfo) -> Shape:
    return {
        "name": info.name,
        "created_at": _when(info.created_at),
        "deleted_at": _when(info.deleted_at),
        "cipher": info.cipher and info.cipher.value,
    }


def stream_config(config: StreamConfig) -> Shape:
    timestamping = config.timestamping
    mode = timestamping.mode if timestamping else None
    return {
        "storage_class": config.storage_class,
        "retention_policy": config.retention_policy,
        "timestamping": {
            "mode": mode and mode.value,
            "uncapped": timestamping.uncapped if timestamping else None,
        },
        "delete_on_empty_min_age": config.delete_on_empty_min_age,
    }


def basin_config(config: BasinConfig) -> Shape:
    default = config.default_stream_config
    return {
        "default_stream_config": None if default is None else stream_config(default),
        "stream_cipher": config.stream_cipher and config.stream_cipher.value,
        "create_stream_on_append": config.create_stream_on_append,
        "create_stream_on_read": config.create_stream_on_read,
    }


def position(stream_position: StreamPosition) -> Shape:
    return {"seq_num": stream_position.seq_num, "timestamp": stream_position.timestamp}


def ack(acknowledged: AppendAck) -> Shape:
    return {
        "start": position(acknowledged.start),
        "end": position(acknowledged.end),
        "tail": position(acknowledged.tail),
    }


def record(read: SequencedRecord) -> Shape:
    """Format a record as text, or in base64 with a mark if part of it is not UTF-8."""
    try:
        return _record(read, bytes.decode)
    except UnicodeDecodeError:
        return {**record_in_base64(read), "encoding": "base64"}


def record_in_base64(read: SequencedRecord) -> Shape:
    """Format a record without loss: body, header names and header values in base64."""
    return _record(read, lambda data: b64encode(data).decode())


def _record(read: SequencedRecord, text: Callable[[bytes], str]) -> Shape:
    return {
        "seq_num": read.seq_num,
        "timestamp": read.timestamp,
        "headers": [[text(name), text(value)] for name, value in read.headers],
        "body": text(read.body),
    }


def access_token(info: AccessTokenInfo) -> Shape:
    scope, groups = info.scope, info.scope.op_groups
    permissions = {
        name: permission and permission.value
        for name in ("account", "basin", "stream")
        for permission in [getattr(groups, name, None)]
    }
    return {
        "id": info.id,
        "expires_at": _when(info.expires_at),
        "auto_prefix_streams": info.auto_prefix_streams,
        "scope": {
            "basins": _matching(scope.basins),
            "streams": _matching(scope.streams),
            "access_tokens": _matching(scope.access_tokens),
            "op_groups": permissions,
            "ops": sorted(operation.value for operation in scope.ops),
        },
    }


def _matching(names: ExactMatch | PrefixMatch | None) -> Shape | None:
    if names is None:
        return None
    # Compares the class's name, so that importing this module does not load the SDK.
    kind = "exact" if type(names).__name__ == "ExactMatch" else "prefix"
    return {kind: names.value}


def metric(value: Scalar | Accumulation | Gauge | Label) -> Shape:
    shape: Shape = {"kind": type(value).__name__.lower(), "name": value.name}
    for member in ("unit", "interval"):
        if hasattr(value, member):
            chosen = getattr(value, member)
            shape[member] = chosen and chosen.value
    if hasattr(value, "value"):
        shape["value"] = value.value
    else:
        shape["values"] = value.values
    return shape
