"""Basins and streams that a server ensures when it starts, from a JSON file.

{"basins": [{"name": ..., "config": {...}, "streams": [{"name": ..., "config": {...}}]}]}

Each entry is ensured, so that the file may be applied at every start, and a configuration that was
changed since then returns to what the file says. Durations are written for people: "7d", "1h 30m".
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from streamfold.errors import InvalidError
from streamfold.model import configs as model
from streamfold.model.configs import Cipher, Retention, StorageClass, TimestampMode
from streamfold.model.names import parse_basin_name, parse_stream_name
from streamfold.model.units import parse_seconds
from streamfold.store.store import StreamStore


class _Timestamping(Struct, forbid_unknown_fields=True):
    mode: TimestampMode | None = None
    uncapped: bool | None = None


class _DeleteOnEmpty(Struct, forbid_unknown_fields=True):
    min_age: str | None = None


class _StreamConfig(Struct, forbid_unknown_fields=True):
    storage_class: StorageClass | None = None
    retention_policy: str | None = None
    timestamping: _Timestamping | None = None
    delete_on_empty: _DeleteOnEmpty | None = None
    trim_on_snapshot: bool | None = None

    def to_model(self) -> model.StreamConfigLayer:
        timestamping = self.timestamping or _Timestamping()
        min_age = self.delete_on_empty.min_age if self.delete_on_empty else None
        return model.StreamConfigLayer(
            storage_class=self.storage_class,
            retention=_retention(self.retention_policy),
            timestamp_mode=timestamping.mode,
            timestamp_uncapped=timestamping.uncapped,
            delete_on_empty_secs=None if min_age is None else _seconds(min_age),
            trim_on_snapshot=self.trim_on_snapshot,
        )


class _BasinConfig(Struct, forbid_unknown_fields=True):
    default_stream_config: _StreamConfig | None = None
    stream_cipher: Cipher | None = None
    create_stream_on_append: bool | None = None
    create_stream_on_read: bool | None = None

    def to_model(self) -> model.BasinConfig:
        return model.BasinConfig(
            (self.default_stream_config or _StreamConfig()).to_model(),
            self.stream_cipher,
            bool(self.create_stream_on_append),
            bool(self.create_stream_on_read),
        )


class _Stream(Struct, forbid_unknown_fields=True):
    name: str
    config: _StreamConfig | None = None


class _Basin(Struct, forbid_unknown_fields=True):
    name: str
    config: _BasinConfig | None = None
    streams: list[_Stream] = []


class ResourceSpec(Struct, forbid_unknown_fields=True):
    """What the file says; every name and value in it is legal."""

    basins: list[_Basin] = []


def read_init_file(path: Path) -> ResourceSpec:
    """Read and check the file; an error names the entry that is wrong."""
    try:
        spec = msgspec.json.decode(path.read_bytes(), type=ResourceSpec)
    except OSError as error:
        raise InvalidError(f"init file {path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidError(f"init file {path}: {error}") from None
    try:
        _check(spec)
    except InvalidError as error:
        raise InvalidError(f"init file {path}: {error.message}") from None
    return spec


async def apply_spec(store: StreamStore, spec: ResourceSpec) -> None:
    """Ensure everything in `spec`, in its order."""
    for basin in spec.basins:
        await store.ensure_basin(basin.name, (basin.config or _BasinConfig()).to_model())
        for stream in basin.streams:
            config = (stream.config or _StreamConfig()).to_model()
            await store.ensure_stream(basin.name, stream.name, config)


def _seconds(text: str) -> int:
    try:
        return parse_seconds(text)
    except ValueError:
        raise InvalidError(
            f'{text[:80]!r} is not a duration: write it like "90s", "7d" or "1h 30m"'
        ) from None


def _check(spec: ResourceSpec) -> None:
    """Find what is wrong before anything is created."""
    _check_unique("basin", (basin.name for basin in spec.basins))
    for basin in spec.basins:
        parse_basin_name(basin.name)
        (basin.config or _BasinConfig()).to_model()
        _check_unique(f"stream of basin {basin.name!r}", (each.name for each in basin.streams))
        for stream in basin.streams:
            parse_stream_name(stream.name)
            (stream.config or _StreamConfig()).to_model()


def _check_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidError(f"{what} {name!r} appears twice: keep one of them")
        seen.add(name)


def _retention(text: str | None) -> Retention | None:
    return text if text is None or text == model.INFINITE else _seconds(text)  # type: ignore[return-value]
