"""Access tokens, metrics and locations have the shapes that official clients send and read."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
import s2_sdk
from s2_sdk import _mappers as sdk

from streamfold.model.access_tokens import (
    NOTHING,
    AccessToken,
    Permission,
    ResourceSet,
    Right,
    Scope,
)
from streamfold.model.metrics import Accumulation, Gauge, Interval, Label, Scalar, Unit
from streamfold.wire.s2.account import (
    LocationInfo,
    decode_default_location,
    decode_issue_access_token,
    encode_access_token_page,
    encode_issued_access_token,
    encode_location,
    encode_locations,
    encode_metrics,
)
from streamfold.wire.s2.errors import BadJsonError


def request(**members: Any) -> bytes:
    return json.dumps({"id": "token", "scope": {}, **members}).encode()


def test_operations_are_those_of_the_official_client() -> None:
    assert {operation.value for operation in s2_sdk.Operation} <= set(Right)
    assert len(Right) == 24


def test_a_request_of_the_official_client_is_understood() -> None:
    expires = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    scope = s2_sdk.AccessTokenScope(
        basins=s2_sdk.ExactMatch("my-basin"),
        streams=s2_sdk.PrefixMatch(""),
        op_groups=s2_sdk.OperationGroupPermissions(stream=s2_sdk.Permission.READ),
        ops=[s2_sdk.Operation.APPEND],
    )
    body = json.dumps(sdk.access_token_info_to_json("token", scope, True, expires)).encode()
    token = decode_issue_access_token(body)
    assert (token.id, token.auto_prefix_streams) == ("token", True)
    assert token.expires_at == expires.timestamp() * 1000
    assert token.scope.basins == ResourceSet.exact("my-basin")
    assert token.scope.streams == ResourceSet.prefix("")
    assert token.scope.access_tokens == NOTHING
    assert token.scope.op_groups.stream == Permission(read=True)
    assert token.scope.ops == {Right.APPEND}


def test_absent_and_null_members_are_the_same() -> None:
    assert decode_issue_access_token(request()).scope == Scope()
    null = dict.fromkeys(("basins", "streams", "access_tokens", "op_groups", "ops"))
    assert decode_issue_access_token(request(scope=null, expires_at=None)).scope == Scope()


@pytest.mark.parametrize(
    "members",
    [
        {"id": ""},
        {"id": "."},
        {"id": ".."},
        {"id": "x" * 97},
        {"id": "é" * 49},
        {"id": "a\0b"},
        {"scope": None},
        {"scope": {"basins": {}}},
        {"scope": {"streams": {"exact": "a", "prefix": "b"}}},
        {"scope": {"ops": ["fly"]}},
        {"expires_at": "tomorrow"},
        {"expires_at": "2030-01-02T03:04:05"},
    ],
)
def test_a_token_that_does_not_fit_is_malformed(members: dict[str, Any]) -> None:
    with pytest.raises(BadJsonError):
        decode_issue_access_token(request(**members))


def test_an_id_of_the_longest_length_is_accepted() -> None:
    assert decode_issue_access_token(request(id="é" * 48)).id == "é" * 48


def test_an_issued_token_is_shown_once() -> None:
    assert encode_issued_access_token("s3cret") == b'{"access_token":"s3cret"}'


def test_a_listing_spells_permissions_out() -> None:
    page = json.loads(
        encode_access_token_page(
            [AccessToken("token", Scope(ResourceSet.exact("b")))], has_more=False
        )
    )
    off = {"read": False, "write": False}
    assert page == {
        "access_tokens": [
            {
                "id": "token",
                "scope": {
                    "basins": {"exact": "b"},
                    "streams": None,
                    "access_tokens": None,
                    "op_groups": {"account": off, "basin": off, "stream": off},
                    "ops": [],
                },
                "auto_prefix_streams": False,
                "expires_at": None,
            }
        ],
        "has_more": False,
    }


def test_the_official_client_reads_a_listing() -> None:
    expires = datetime(2030, 1, 2, tzinfo=UTC)
    scope = Scope(streams=ResourceSet.prefix("p"), ops=frozenset({Right.READ}))
    token = AccessToken("token", scope, True, int(expires.timestamp() * 1000))
    [shown] = json.loads(encode_access_token_page([token], has_more=False))["access_tokens"]
    theirs = sdk.access_token_info_from_json(shown)
    assert (theirs.id, theirs.auto_prefix_streams, theirs.expires_at) == ("token", True, expires)
    assert theirs.scope.streams == s2_sdk.PrefixMatch("p")
    assert theirs.scope.ops == [s2_sdk.Operation.READ]


def test_an_empty_name_is_the_set_of_none_and_listed_as_such() -> None:
    token = decode_issue_access_token(request(scope={"basins": {"exact": ""}}))
    assert token.scope.basins == NOTHING
    [shown] = json.loads(encode_access_token_page([token], has_more=False))["access_tokens"]
    assert shown["scope"]["basins"] is None


def test_what_a_listing_shows_can_be_asked_for_again() -> None:
    asked = request(
        scope={
            "basins": {"prefix": ""},
            "streams": {"exact": "s"},
            "op_groups": {"account": {"read": True}, "basin": None},
            "ops": ["trim", "append"],
        },
        expires_at="2030-01-02T03:04:05.678Z",
    )
    token = decode_issue_access_token(asked)
    [shown] = json.loads(encode_access_token_page([token], has_more=False))["access_tokens"]
    assert decode_issue_access_token(json.dumps(shown).encode()) == token


def test_the_official_client_reads_every_kind_of_metric() -> None:
    body = encode_metrics(
        [
            Scalar("a", Unit.USD, 1.5),
            Accumulation("b", Unit.OPERATIONS, Interval.HOUR, ((60, 2.0),)),
            Gauge("c", Unit.BYTES, ((120, 3.0),)),
            Label("d", ("x", "y")),
        ]
    )
    scalar, accumulation, gauge, label = sdk.metric_set_from_json(json.loads(body))
    assert (scalar.name, scalar.value) == ("a", 1.5)
    assert (accumulation.interval.value, accumulation.values) == ("hour", [(60, 2.0)])
    assert (gauge.unit.value, gauge.values) == ("bytes", [(120, 3.0)])
    assert label.values == ["x", "y"]


def test_locations_leave_out_what_is_unknown() -> None:
    plain = LocationInfo("here", False)
    full = LocationInfo("aws:us-east-1", True, ("express",), "express")
    assert encode_location(plain) == b'{"name":"here","is_private":false}'
    shown = map(sdk.location_info_from_json, json.loads(encode_locations([plain, full])))
    assert [location.storage_classes for location in shown] == [None, ["express"]]


def test_the_default_location_is_a_bare_string() -> None:
    assert decode_default_location(b'"aws:us-east-1"') == "aws:us-east-1"


@pytest.mark.parametrize("body", [b"", b"null", b"here", b'""', b'"not a place"', b'{"name":"x"}'])
def test_text_that_is_not_a_location_is_malformed(body: bytes) -> None:
    with pytest.raises(BadJsonError):
        decode_default_location(body)
