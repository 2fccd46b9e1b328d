"""Basins and streams as JSON: configurations, reconfigurations, requests and listings.

A stream's configuration takes three shapes here. In a request it is a layer: absent and null
members mean the same. A reconfiguration is tri-state: absent keeps a member, null resets it. An
existing stream's configuration is resolved: every member has a value.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from streamfold.model import configs
from streamfold.model.configs import (
    BasinConfig,
    Cipher,
    Retention,
    StorageClass,
    StreamConfigLayer,
    TimestampMode,
)
from streamfold.model.names import BasinName, StreamName, parse_basin_name, parse_stream_name
from streamfold.model.resources import BasinInfo, Page, StreamInfo
from streamfold.wire.s2.errors import BadJsonError
from streamfold.wire.s2.json_body import (
    Unsigned,
    check_u64,
    choose,
    decode_json,
    names_in_body,
    rfc3339,
)

T = TypeVar("T")
E = TypeVar("E", bound=enum.StrEnum)
_LOCATION = re.compile(r"[A-Za-z0-9:.-]{1,64}")


class _Infinite(Struct):
    pass


class RetentionJson(Struct):
    """`{"age": seconds}` or `{"infinite": {}}`."""

    age: Unsigned | UnsetType = UNSET
    infinite: _Infinite | UnsetType = UNSET

    def to_model(self) -> Retention:
        if (self.age is UNSET) == (self.infinite is UNSET):
            raise BadJsonError("retention_policy must have either an age or infinite")
        if isinstance(self.age, UnsetType):
            return configs.INFINITE
        check_u64(self.age, "retention age")
        return self.age

    @staticmethod
    def of(retention: Retention) -> RetentionJson:
        if isinstance(retention, int):
            return RetentionJson(age=retention)
        return RetentionJson(infinite=_Infinite())


class TimestampingJson(Struct):
    mode: str | None = None
    uncapped: bool | None = None


class DeleteOnEmptyJson(Struct):
    min_age_secs: Unsigned = 0


class StreamConfigJson(Struct):
    """A stream's requested configuration, or a basin's stream defaults."""

    storage_class: str | None = None
    retention_policy: RetentionJson | None = None
    timestamping: TimestampingJson | None = None
    delete_on_empty: DeleteOnEmptyJson | None = None
    #: Specific to Streamfold. Omitted unless set, so that S2's clients see only S2's members.
    trim_on_snapshot: bool | UnsetType | None = UNSET

    def to_model(self) -> configs.StreamConfigLayer:
        """Return the requested layer. Raises for ages that the model rejects."""
        timestamping = self.timestamping or TimestampingJson()
        min_age = None if self.delete_on_empty is None else self.delete_on_empty.min_age_secs
        trims = self.trim_on_snapshot
        check_u64(min_age, "min_age_secs")
        return configs.StreamConfigLayer(
            storage_class=_chosen(StorageClass, self.storage_class, "storage_class"),
            retention=None if self.retention_policy is None else self.retention_policy.to_model(),
            timestamp_mode=_chosen(TimestampMode, timestamping.mode, "timestamping.mode"),
            timestamp_uncapped=timestamping.uncapped,
            delete_on_empty_secs=min_age,
            trim_on_snapshot=None if isinstance(trims, UnsetType) else trims,
        )

    @staticmethod
    def of(config: configs.StreamConfig | configs.StreamConfigLayer) -> StreamConfigJson:
        """Return every member of `config` that has a value. A group without values is null."""
        timestamping = TimestampingJson(config.timestamp_mode, config.timestamp_uncapped)
        min_age = config.delete_on_empty_secs
        return StreamConfigJson(
            config.storage_class,
            None if config.retention is None else RetentionJson.of(config.retention),
            None if timestamping == TimestampingJson() else timestamping,
            None if min_age is None else DeleteOnEmptyJson(min_age),
            UNSET if config.trim_on_snapshot is None else config.trim_on_snapshot,
        )


class BasinConfigJson(Struct):
    default_stream_config: StreamConfigJson | None = None
    stream_cipher: str | None = None
    create_stream_on_append: bool | None = None
    create_stream_on_read: bool | None = None

    def to_model(self) -> configs.BasinConfig:
        return configs.BasinConfig(
            (self.default_stream_config or StreamConfigJson()).to_model(),
            _chosen(Cipher, self.stream_cipher, "stream_cipher"),
            bool(self.create_stream_on_append),
            bool(self.create_stream_on_read),
        )

    @staticmethod
    def of(config: configs.BasinConfig) -> BasinConfigJson:
        streams = StreamConfigJson.of(config.default_stream_config)
        return BasinConfigJson(
            None if streams == StreamConfigJson() else streams,
            config.stream_cipher,
            config.create_stream_on_append,
            config.create_stream_on_read,
        )


class _TimestampingChange(Struct):
    mode: str | UnsetType | None = UNSET
    uncapped: bool | UnsetType | None = UNSET


class _DeleteOnEmptyChange(Struct):
    min_age_secs: Unsigned | UnsetType | None = UNSET


class _StreamChange(Struct):
    storage_class: str | UnsetType | None = UNSET
    retention_policy: RetentionJson | UnsetType | None = UNSET
    timestamping: _TimestampingChange | UnsetType | None = UNSET
    delete_on_empty: _DeleteOnEmptyChange | UnsetType | None = UNSET
    trim_on_snapshot: bool | UnsetType | None = UNSET

    def to_model(self) -> configs.StreamReconfiguration:
        retention = self.retention_policy
        timestamping = _group(
            self.timestamping, keep=_TimestampingChange(), reset=_TimestampingChange(None, None)
        )
        min_age = _group(
            self.delete_on_empty, keep=_DeleteOnEmptyChange(), reset=_DeleteOnEmptyChange(None)
        ).min_age_secs
        if isinstance(min_age, int):
            check_u64(min_age, "min_age_secs")
        return configs.StreamReconfiguration(
            storage_class=_change_to(StorageClass, self.storage_class, "storage_class"),
            retention=_change(
                retention.to_model() if isinstance(retention, RetentionJson) else retention
            ),
            timestamp_mode=_change_to(TimestampMode, timestamping.mode, "timestamping.mode"),
            timestamp_uncapped=_change(timestamping.uncapped),
            delete_on_empty_secs=_change(min_age),
            trim_on_snapshot=_change(self.trim_on_snapshot),
        )


class _BasinChange(Struct):
    default_stream_config: _StreamChange | UnsetType | None = UNSET
    stream_cipher: str | UnsetType | None = UNSET
    #: null means the same as absent: a basin has no defaults to fall back to.
    create_stream_on_append: bool | UnsetType | None = UNSET
    create_stream_on_read: bool | UnsetType | None = UNSET

    def to_model(self) -> configs.BasinReconfiguration:
        streams = self.default_stream_config
        return configs.BasinReconfiguration(
            _change(streams.to_model() if isinstance(streams, _StreamChange) else streams),
            _change_to(Cipher, self.stream_cipher, "stream_cipher"),
            _switch(self.create_stream_on_append),
            _switch(self.create_stream_on_read),
        )


_STREAM_CONFIG: Final = msgspec.json.Decoder(StreamConfigJson | None)
_STREAM_CHANGE: Final = msgspec.json.Decoder(_StreamChange)
_BASIN_CHANGE: Final = msgspec.json.Decoder(_BasinChange)


def decode_stream_config(body: bytes) -> configs.StreamConfigLayer:
    """Decode a requested stream configuration. An empty body leaves everything to the defaults."""
    config = decode_json(_STREAM_CONFIG, body) if body else None
    return (config or StreamConfigJson()).to_model()


def decode_stream_reconfiguration(body: bytes) -> configs.StreamReconfiguration:
    return decode_json(_STREAM_CHANGE, body).to_model()


def decode_basin_reconfiguration(body: bytes) -> configs.BasinReconfiguration:
    return decode_json(_BASIN_CHANGE, body).to_model()


def encode_stream_config(config: configs.StreamConfig) -> bytes:
    """Encode a resolved configuration: all four S2 members, plus any of ours that are set."""
    return msgspec.json.encode(StreamConfigJson.of(config))


def encode_basin_config(config: configs.BasinConfig) -> bytes:
    """Encode a basin's configuration.

    Its stream defaults contain only members that were set explicitly, and are null if none were.
    """
    return msgspec.json.encode(BasinConfigJson.of(config))


def _chosen(choices: type[E], text: str | None, what: str) -> E | None:
    return None if text is None else choose(choices, text, what)


def _change_to(
    choices: type[E], text: str | UnsetType | None, what: str
) -> E | configs.Unset | None:
    return _change(choose(choices, text, what) if isinstance(text, str) else text)


def _group(group: T | UnsetType | None, *, keep: T, reset: T) -> T:
    """Resolve a group: null resets all its members, an absent group keeps them all."""
    if group is None:
        return reset
    return keep if isinstance(group, UnsetType) else group


def _change(value: T | UnsetType | None) -> T | configs.Unset | None:
    return configs.UNSET if isinstance(value, UnsetType) else value


def _switch(value: bool | UnsetType | None) -> bool | configs.Unset:
    return configs.UNSET if value is None or isinstance(value, UnsetType) else value


@dataclass(frozen=True, slots=True)
class CreateBasin:
    """A request to create a basin."""

    name: BasinName
    config: BasinConfig
    location: str | None


@dataclass(frozen=True, slots=True)
class EnsureBasin:
    """A request for a basin with this configuration, whether or not it exists yet."""

    config: BasinConfig = field(default_factory=BasinConfig)
    location: str | None = None


@dataclass(frozen=True, slots=True)
class CreateStream:
    """A request to create a stream."""

    name: StreamName
    config: StreamConfigLayer


class _CreateBasin(Struct):
    basin: str
    config: BasinConfigJson | None = None
    location: str | None = None


class _EnsureBasin(Struct):
    config: BasinConfigJson | None = None
    location: str | None = None


class _CreateStream(Struct):
    stream: str
    config: StreamConfigJson | None = None


class _BasinInfo(Struct):
    name: str
    location: str | None
    created_at: datetime
    deleted_at: datetime | None
    state: Literal["active", "deleting"]


class _StreamInfo(Struct):
    name: str
    created_at: datetime
    deleted_at: datetime | None
    cipher: Cipher | None


class _BasinPage(Struct):
    basins: list[_BasinInfo]
    has_more: bool


class _StreamPage(Struct):
    streams: list[_StreamInfo]
    has_more: bool


_CREATE_BASIN: Final = msgspec.json.Decoder(_CreateBasin)
_ENSURE_BASIN: Final = msgspec.json.Decoder(_EnsureBasin | None)
_CREATE_STREAM: Final = msgspec.json.Decoder(_CreateStream)


def decode_create_basin(body: bytes) -> CreateBasin:
    request = decode_json(_CREATE_BASIN, body)
    with names_in_body():
        name = parse_basin_name(request.basin)
    config = (request.config or BasinConfigJson()).to_model()
    return CreateBasin(name, config, check_location(request.location))


def decode_ensure_basin(body: bytes) -> EnsureBasin:
    """Decode the basin's desired configuration. An empty body asks for the defaults."""
    request = (decode_json(_ENSURE_BASIN, body) if body else None) or _EnsureBasin()
    config = (request.config or BasinConfigJson()).to_model()
    return EnsureBasin(config, check_location(request.location))


def decode_create_stream(body: bytes) -> CreateStream:
    request = decode_json(_CREATE_STREAM, body)
    with names_in_body():
        name = parse_stream_name(request.stream)
    return CreateStream(name, (request.config or StreamConfigJson()).to_model())


def encode_basin_info(info: BasinInfo) -> bytes:
    return msgspec.json.encode(_basin(info))


def encode_stream_info(info: StreamInfo) -> bytes:
    return msgspec.json.encode(_stream(info))


def encode_basin_page(page: Page[BasinInfo]) -> bytes:
    return msgspec.json.encode(_BasinPage(list(map(_basin, page.items)), page.has_more))


def encode_stream_page(page: Page[StreamInfo]) -> bytes:
    return msgspec.json.encode(_StreamPage(list(map(_stream, page.items)), page.has_more))


def check_location(name: str | None) -> str | None:
    """Return `name` if it could name a location. Raises BadJsonError otherwise."""
    if name is not None and not _LOCATION.fullmatch(name):
        raise BadJsonError(
            f"location {name[:80]!r} must have 1 to 64 letters, digits, colons, dots and hyphens"
        )
    return name


def _basin(info: BasinInfo) -> _BasinInfo:
    return _BasinInfo(
        info.name,
        info.location,
        rfc3339(info.created_at),
        _moment(info.deleted_at),
        "active" if info.deleted_at is None else "deleting",
    )


def _stream(info: StreamInfo) -> _StreamInfo:
    return _StreamInfo(info.name, rfc3339(info.created_at), _moment(info.deleted_at), info.cipher)


def _moment(ms: int | None) -> datetime | None:
    return None if ms is None else rfc3339(ms)
