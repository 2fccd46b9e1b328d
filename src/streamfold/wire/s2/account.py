"""Access tokens, metrics and locations as JSON: shapes only, whoever enforces them is elsewhere."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from streamfold.errors import InvalidError
from streamfold.wire.s2.failures import BadJsonError
from streamfold.wire.s2.json_body import decode_json, names_in_body
from streamfold.wire.s2.resources import check_location

#: Bytes of UTF-8.
TOKEN_ID_MAX = 96


class Operation(enum.StrEnum):
    """What a token may allow, one by one."""

    LIST_BASINS = "list-basins"
    CREATE_BASIN = "create-basin"
    DELETE_BASIN = "delete-basin"
    RECONFIGURE_BASIN = "reconfigure-basin"
    GET_BASIN_CONFIG = "get-basin-config"
    ISSUE_ACCESS_TOKEN = "issue-access-token"  # noqa: S105 - an operation, not a secret
    REVOKE_ACCESS_TOKEN = "revoke-access-token"  # noqa: S105
    LIST_ACCESS_TOKENS = "list-access-tokens"
    LIST_STREAMS = "list-streams"
    CREATE_STREAM = "create-stream"
    DELETE_STREAM = "delete-stream"
    GET_STREAM_CONFIG = "get-stream-config"
    RECONFIGURE_STREAM = "reconfigure-stream"
    CHECK_TAIL = "check-tail"
    APPEND = "append"
    READ = "read"
    TRIM = "trim"
    FENCE = "fence"
    ACCOUNT_METRICS = "account-metrics"
    BASIN_METRICS = "basin-metrics"
    STREAM_METRICS = "stream-metrics"
    LIST_LOCATIONS = "list-locations"
    GET_DEFAULT_LOCATION = "get-default-location"
    SET_DEFAULT_LOCATION = "set-default-location"


class ResourceSet(Struct, frozen=True):
    """Names that a token covers: exactly one, or all with a prefix. An empty `exact` is none."""

    exact: str | UnsetType = UNSET
    prefix: str | UnsetType = UNSET


class Permission(Struct, frozen=True):
    read: bool | None = False
    write: bool | None = False


class OperationGroups(Struct, frozen=True):
    account: Permission | None = None
    basin: Permission | None = None
    stream: Permission | None = None


class Scope(Struct, frozen=True):
    """What a token is good for; a set that is absent covers nothing."""

    basins: ResourceSet | None = None
    streams: ResourceSet | None = None
    access_tokens: ResourceSet | None = None
    op_groups: OperationGroups | None = None
    ops: tuple[Operation, ...] | None = None


class AccessToken(Struct, frozen=True):
    """A token as it is asked for and as it is listed; the secret itself is not part of it."""

    id: str
    scope: Scope
    auto_prefix_streams: bool | None = False
    expires_at: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class Unit(enum.StrEnum):
    BYTES = "bytes"
    OPERATIONS = "operations"
    USD = "usd"


class Interval(enum.StrEnum):
    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"


#: Unix seconds and the value then.
Point: TypeAlias = tuple[int, float]


class Scalar(Struct, frozen=True):
    name: str
    unit: Unit
    value: float


class Accumulation(Struct, frozen=True):
    """Amounts per interval."""

    name: str
    unit: Unit
    interval: Interval
    values: tuple[Point, ...]


class Gauge(Struct, frozen=True):
    """Levels at moments."""

    name: str
    unit: Unit
    values: tuple[Point, ...]


class Label(Struct, frozen=True):
    name: str
    values: tuple[str, ...]


Metric: TypeAlias = Scalar | Accumulation | Gauge | Label


class Location(Struct, frozen=True, omit_defaults=True):
    name: str
    is_private: bool
    storage_classes: tuple[str, ...] | None = None
    default_storage_class: str | None = None


_ACCESS_TOKEN: Final = msgspec.json.Decoder(AccessToken)
_STRING: Final = msgspec.json.Decoder(str)


def decode_issue_access_token(body: bytes) -> AccessToken:
    """The token that a request asks for, with the form of its id and of its sets checked."""
    token = decode_json(_ACCESS_TOKEN, body)
    with names_in_body():
        parse_token_id(token.id)
    scope = token.scope
    for resources in (scope.basins, scope.streams, scope.access_tokens):
        if resources and (resources.exact is UNSET) == (resources.prefix is UNSET):
            raise BadJsonError("a set of resources must have either exact or prefix")
    return token


def encode_issued_access_token(secret: str) -> bytes:
    return msgspec.json.encode({"access_token": secret})


def encode_access_token_page(tokens: Sequence[AccessToken], *, has_more: bool) -> bytes:
    """A listing, in which permissions and operations are always spelled out."""
    return msgspec.json.encode(
        {"access_tokens": list(map(_spelled_out, tokens)), "has_more": has_more}
    )


def decode_default_location(body: bytes) -> str:
    """The location that a bare JSON string names."""
    name = decode_json(_STRING, body)
    check_location(name)
    return name


def encode_location(location: Location) -> bytes:
    return msgspec.json.encode(location)


def encode_locations(locations: Sequence[Location]) -> bytes:
    return msgspec.json.encode(locations)


def encode_metrics(metrics: Sequence[Metric]) -> bytes:
    """A MetricSetResponse: each metric under the name of its kind."""
    return msgspec.json.encode(
        {"values": [{type(metric).__name__.lower(): metric} for metric in metrics]}
    )


def parse_token_id(text: str) -> str:
    """Return `text` as the id of an access token, or refuse it with the rule it breaks."""
    size = len(text.encode(errors="replace"))
    if not 1 <= size <= TOKEN_ID_MAX or text in (".", "..") or "\0" in text:
        raise InvalidError(
            f"access token id {text[:TOKEN_ID_MAX]!r} must have 1 to {TOKEN_ID_MAX} bytes of "
            "UTF-8 without NUL, and not be '.' or '..'"
        )
    return text


def _spelled_out(token: AccessToken) -> AccessToken:
    scope, groups = token.scope, token.scope.op_groups or OperationGroups()
    explicit = OperationGroups(*map(_booleans, (groups.account, groups.basin, groups.stream)))
    return msgspec.structs.replace(
        token,
        auto_prefix_streams=bool(token.auto_prefix_streams),
        scope=msgspec.structs.replace(scope, op_groups=explicit, ops=scope.ops or ()),
    )


def _booleans(permission: Permission | None) -> Permission:
    return Permission(bool(permission and permission.read), bool(permission and permission.write))
