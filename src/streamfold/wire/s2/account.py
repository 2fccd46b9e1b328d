"""Access tokens, metrics and locations as JSON. Their meaning is defined elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from streamfold.model.access_tokens import (
    NOTHING,
    AccessToken,
    OperationGroups,
    Permission,
    ResourceSet,
    Right,
    Scope,
    parse_token_id,
)
from streamfold.model.metrics import Metric
from streamfold.wire.s2.errors import BadJsonError
from streamfold.wire.s2.json_body import decode_json, names_in_body, rfc3339
from streamfold.wire.s2.resources import check_location

_EPOCH = datetime.fromtimestamp(0, UTC)
#: An RFC 3339 time with its time zone.
_Moment: TypeAlias = Annotated[datetime, msgspec.Meta(tz=True)]


class _ResourceSet(Struct, frozen=True):
    exact: str | UnsetType = UNSET
    prefix: str | UnsetType = UNSET

    def parsed(self) -> ResourceSet:
        if isinstance(self.prefix, str) and self.exact is UNSET:
            return ResourceSet.prefix(self.prefix)
        if isinstance(self.exact, str) and self.prefix is UNSET:
            return ResourceSet.exact(self.exact)
        raise BadJsonError("a set of resources must have either exact or prefix")


class _Permission(Struct, frozen=True):
    read: bool | None = False
    write: bool | None = False


class _OperationGroups(Struct, frozen=True):
    account: _Permission | None = None
    basin: _Permission | None = None
    stream: _Permission | None = None


class _Scope(Struct, frozen=True):
    basins: _ResourceSet | None = None
    streams: _ResourceSet | None = None
    access_tokens: _ResourceSet | None = None
    op_groups: _OperationGroups | None = None
    ops: tuple[Right, ...] | None = None


class _AccessToken(Struct, frozen=True):
    id: str
    scope: _Scope
    auto_prefix_streams: bool | None = False
    expires_at: str | None = None


class LocationInfo(Struct, frozen=True, omit_defaults=True):
    name: str
    is_private: bool
    storage_classes: tuple[str, ...] | None = None
    default_storage_class: str | None = None


_ACCESS_TOKEN: Final = msgspec.json.Decoder(_AccessToken)
_STRING: Final = msgspec.json.Decoder(str)


def decode_issue_access_token(body: bytes) -> AccessToken:
    """Decode the requested token and check the format of its id and resource sets."""
    asked = decode_json(_ACCESS_TOKEN, body)
    with names_in_body():
        parse_token_id(asked.id)
    return AccessToken(
        asked.id,
        _parse_scope(asked.scope),
        bool(asked.auto_prefix_streams),
        _milliseconds(asked.expires_at),
        asked.expires_at,
    )


def encode_issued_access_token(secret: str) -> bytes:
    return msgspec.json.encode({"access_token": secret})


def encode_access_token_page(tokens: Sequence[AccessToken], *, has_more: bool) -> bytes:
    """Encode a page of tokens. Permissions and operations are always spelled out."""
    return msgspec.json.encode({"access_tokens": list(map(_shown, tokens)), "has_more": has_more})


def decode_default_location(body: bytes) -> str:
    """Decode a location name from a bare JSON string."""
    name = decode_json(_STRING, body)
    check_location(name)
    return name


def encode_location(location: LocationInfo) -> bytes:
    return msgspec.json.encode(location)


def encode_locations(locations: Sequence[LocationInfo]) -> bytes:
    return msgspec.json.encode(locations)


def encode_metrics(metrics: Sequence[Metric]) -> bytes:
    """Encode a MetricSetResponse, with each metric under the name of its kind."""
    return msgspec.json.encode(
        {"values": [{type(metric).__name__.lower(): metric} for metric in metrics]}
    )


def _parse_scope(scope: _Scope) -> Scope:
    groups = scope.op_groups or _OperationGroups()
    return Scope(
        basins=scope.basins.parsed() if scope.basins else NOTHING,
        streams=scope.streams.parsed() if scope.streams else NOTHING,
        access_tokens=scope.access_tokens.parsed() if scope.access_tokens else NOTHING,
        op_groups=OperationGroups(
            *map(_parse_permission, (groups.account, groups.basin, groups.stream))
        ),
        ops=frozenset(scope.ops or ()),
    )


def _parse_permission(permission: _Permission | None) -> Permission:
    return Permission(bool(permission and permission.read), bool(permission and permission.write))


def _milliseconds(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        moment = msgspec.convert(text, _Moment)
    except msgspec.ValidationError:
        raise BadJsonError(
            f"expires_at {text[:40]!r} is not a time: write it like 2026-01-31T12:00:00Z"
        ) from None
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def _expiry_text(token: AccessToken) -> str | None:
    if token.expires_at is None or token.expires_at_text is not None:
        return token.expires_at_text
    text: str = msgspec.to_builtins(rfc3339(token.expires_at))
    return text


def _shown(token: AccessToken) -> _AccessToken:
    scope = token.scope
    groups = (scope.op_groups.account, scope.op_groups.basin, scope.op_groups.stream)
    return _AccessToken(
        token.id,
        _Scope(
            basins=_shown_set(scope.basins),
            streams=_shown_set(scope.streams),
            access_tokens=_shown_set(scope.access_tokens),
            op_groups=_OperationGroups(*(_Permission(one.read, one.write) for one in groups)),
            ops=tuple(operation for operation in Right if operation in scope.ops),
        ),
        token.auto_prefix_streams,
        _expiry_text(token),
    )


def _shown_set(names: ResourceSet) -> _ResourceSet | None:
    if names.is_prefix:
        return _ResourceSet(prefix=names.text)
    return None if names == NOTHING else _ResourceSet(exact=names.text)
