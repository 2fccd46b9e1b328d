"""Basins and streams as JSON: requests to create or ensure them, and listings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal

import msgspec
from msgspec import Struct

from streamfold.model import resources as model
from streamfold.model.configs import BasinConfig, Cipher, StreamConfigLayer
from streamfold.model.names import BasinName, StreamName, parse_basin_name, parse_stream_name
from streamfold.wire.s2.configs import BasinConfigJson, StreamConfigJson
from streamfold.wire.s2.errors import BadJsonError
from streamfold.wire.s2.json_body import decode_json, names_in_body, rfc3339

_LOCATION = re.compile(r"[A-Za-z0-9:.-]{1,64}")


@dataclass(frozen=True, slots=True)
class CreateBasin:
    """A request for a basin that may not exist yet."""

    name: BasinName
    config: BasinConfig
    location: str | None


@dataclass(frozen=True, slots=True)
class EnsureBasin:
    """A request for a basin with this configuration, whether or not it exists."""

    config: BasinConfig = field(default_factory=BasinConfig)
    location: str | None = None


@dataclass(frozen=True, slots=True)
class CreateStream:
    """A request for a stream that may not exist yet."""

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
    """What a basin should be; an empty body asks for the defaults."""
    request = (decode_json(_ENSURE_BASIN, body) if body else None) or _EnsureBasin()
    config = (request.config or BasinConfigJson()).to_model()
    return EnsureBasin(config, check_location(request.location))


def decode_create_stream(body: bytes) -> CreateStream:
    request = decode_json(_CREATE_STREAM, body)
    with names_in_body():
        name = parse_stream_name(request.stream)
    return CreateStream(name, (request.config or StreamConfigJson()).to_model())


def encode_basin_info(info: model.BasinInfo) -> bytes:
    return msgspec.json.encode(_basin(info))


def encode_stream_info(info: model.StreamInfo) -> bytes:
    return msgspec.json.encode(_stream(info))


def encode_basin_page(page: model.Page[model.BasinInfo]) -> bytes:
    return msgspec.json.encode(_BasinPage(list(map(_basin, page.items)), page.has_more))


def encode_stream_page(page: model.Page[model.StreamInfo]) -> bytes:
    return msgspec.json.encode(_StreamPage(list(map(_stream, page.items)), page.has_more))


def check_location(name: str | None) -> str | None:
    """Return `name` if it could name a location, or refuse the body it was in."""
    if name is not None and not _LOCATION.fullmatch(name):
        raise BadJsonError(
            f"location {name[:80]!r} must have 1 to 64 letters, digits, colons, dots and hyphens"
        )
    return name


def _basin(info: model.BasinInfo) -> _BasinInfo:
    return _BasinInfo(
        info.name,
        info.location,
        rfc3339(info.created_at),
        _moment(info.deleted_at),
        "active" if info.deleted_at is None else "deleting",
    )


def _stream(info: model.StreamInfo) -> _StreamInfo:
    return _StreamInfo(info.name, rfc3339(info.created_at), _moment(info.deleted_at), info.cipher)


def _moment(ms: int | None) -> datetime | None:
    return None if ms is None else rfc3339(ms)
