"""Basins and streams from a JSON file, for a server's start and for `streamfold apply`.

    {"basins": [{"name": ..., "config": {...}, "streams": [{"name": ..., "config": {...}}]}]}

Entries are ensured, so the file can be applied repeatedly. Applying it again resets configurations
that were changed in between. Durations are human-readable, such as "7d" or "1h 30m".
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
from streamfold.undecodable import UNDECODABLE


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


class StreamSpec(Struct, forbid_unknown_fields=True):
    """A stream in the file."""

    name: str
    config: _StreamConfig | None = None

    def to_model(self) -> model.StreamConfigLayer:
        """Return the configuration. Omitted members inherit from the basin."""
        return (self.config or _StreamConfig()).to_model()


class BasinSpec(Struct, forbid_unknown_fields=True):
    """A basin in the file, with its listed streams."""

    name: str
    config: _BasinConfig | None = None
    streams: list[StreamSpec] = []

    def to_model(self) -> model.BasinConfig:
        """Return the configuration, or the default one if omitted."""
        return (self.config or _BasinConfig()).to_model()


class ResourceSpec(Struct, forbid_unknown_fields=True):
    """The file's contents. All names and values are legal."""

    basins: list[BasinSpec] = []


def read_resource_spec(path: Path, what: str) -> ResourceSpec:
    """Read and check the file. Errors name the invalid entry. `what`: the file's purpose."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidError(
            f"{what} {path} cannot be read: {error.strerror}; check its path"
        ) from None
    return parse_resource_spec(content, f"{what} {path}")


def parse_resource_spec(content: bytes, source: str) -> ResourceSpec:
    """Check a file's contents. Errors name `source` and the invalid entry."""
    try:
        spec = msgspec.json.decode(content, type=ResourceSpec)
    except UNDECODABLE as error:
        raise InvalidError(
            f"{source}: {error}: correct it; docs/reference/cli.md#apply-and-diff has an example"
        ) from None
    try:
        _check(spec)
    except InvalidError as error:
        raise InvalidError(f"{source}: {error.message}") from None
    return spec


def _seconds(text: str) -> int:
    try:
        return parse_seconds(text)
    except ValueError:
        raise InvalidError(
            f'{text[:80]!r} is not a duration: write it like "90s", "7d" or "1h 30m"'
        ) from None


def _check(spec: ResourceSpec) -> None:
    """Find errors before anything is created."""
    _check_unique("basin", (basin.name for basin in spec.basins))
    for basin in spec.basins:
        parse_basin_name(basin.name)
        basin.to_model()
        _check_unique(f"stream of basin {basin.name!r}", (each.name for each in basin.streams))
        for stream in basin.streams:
            parse_stream_name(stream.name)
            stream.to_model()


def _check_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidError(f"{what} {name!r} appears twice: keep one of them")
        seen.add(name)


def _retention(text: str | None) -> Retention | None:
    return text if text is None or text == model.INFINITE else _seconds(text)  # type: ignore[return-value]
