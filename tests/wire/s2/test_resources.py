"""Requests and listings of basins and streams."""

from __future__ import annotations

import json
from typing import Any

import pytest
from s2_sdk import _mappers as sdk

from streamfold.errors import InvalidError
from streamfold.model.configs import BasinConfig, Cipher, StorageClass, StreamConfigLayer
from streamfold.model.names import BasinName, StreamName
from streamfold.model.resources import BasinInfo, Page, StreamInfo
from streamfold.wire.s2.errors import BadJsonError
from streamfold.wire.s2.resources import (
    CreateBasin,
    CreateStream,
    EnsureBasin,
    decode_create_basin,
    decode_create_stream,
    decode_ensure_basin,
    encode_basin_info,
    encode_basin_page,
    encode_stream_info,
    encode_stream_page,
)

BASIN = BasinInfo(BasinName("my-basin"), 1_700_000_000_123, None)
STREAM = StreamInfo(StreamName("a/b ü"), 1_700_000_000_000, 1_700_000_001_001, Cipher.AEGIS_256)


def raw(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_a_basin_is_asked_for_by_name_alone() -> None:
    request = decode_create_basin(raw({"basin": "my-basin", "config": None, "location": None}))
    assert request == CreateBasin(BasinName("my-basin"), BasinConfig(), None)


def test_a_basin_is_asked_for_with_everything() -> None:
    request = decode_create_basin(
        raw(
            {
                "basin": "my-basin",
                "location": "aws:us-east-1",
                "config": {
                    "default_stream_config": {"storage_class": "standard"},
                    "stream_cipher": "aegis-256",
                    "create_stream_on_append": True,
                    "create_stream_on_read": None,
                },
            }
        )
    )
    layer = StreamConfigLayer(storage_class=StorageClass.STANDARD)
    assert request.config == BasinConfig(layer, Cipher.AEGIS_256, True, False)
    assert request.location == "aws:us-east-1"


@pytest.mark.parametrize("body", [b"", b"{}", b"null", b'{"config":null}'])
def test_a_basin_may_be_ensured_without_saying_more(body: bytes) -> None:
    assert decode_ensure_basin(body) == EnsureBasin()


def test_a_stream_is_asked_for_with_its_configuration() -> None:
    request = decode_create_stream(raw({"stream": "a/b ü", "config": {"storage_class": "express"}}))
    assert request == CreateStream(
        StreamName("a/b ü"), StreamConfigLayer(storage_class=StorageClass.EXPRESS)
    )
    assert decode_create_stream(raw({"stream": "s"})).config == StreamConfigLayer()


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"basin": None},
        {"basin": "short"},
        {"basin": "Upper-Case"},
        {"basin": "-my-basin"},
        {"basin": "b" * 49},
        {"basin": "my-basin", "location": ""},
        {"basin": "my-basin", "location": "not a place"},
        {"basin": "my-basin", "location": "x" * 65},
        {"basin": "my-basin", "config": {"stream_cipher": "rot13"}},
        {"basin": "my-basin", "config": []},
    ],
)
def test_a_basin_that_cannot_be_named_so_is_malformed(value: Any) -> None:
    with pytest.raises(BadJsonError):
        decode_create_basin(raw(value))


@pytest.mark.parametrize(
    "value", [{}, {"stream": ""}, {"stream": "."}, {"stream": "x" * 513}, {"stream": "a\0b"}]
)
def test_a_stream_that_cannot_be_named_so_is_malformed(value: Any) -> None:
    with pytest.raises(BadJsonError):
        decode_create_stream(raw(value))


def test_a_configuration_that_breaks_a_rule_is_invalid() -> None:
    bad = {"retention_policy": {"age": 0}}
    with pytest.raises(InvalidError):
        decode_create_stream(raw({"stream": "s", "config": bad}))
    with pytest.raises(InvalidError):
        decode_create_basin(raw({"basin": "my-basin", "config": {"default_stream_config": bad}}))


def test_a_basin_is_shown_with_every_member() -> None:
    assert json.loads(encode_basin_info(BASIN)) == {
        "name": "my-basin",
        "location": None,
        "created_at": "2023-11-14T22:13:20.123000Z",
        "deleted_at": None,
        "state": "active",
    }


def test_a_basin_on_its_way_out_says_so() -> None:
    shown = json.loads(encode_basin_info(BasinInfo(BASIN.name, 0, 1_700_000_000_000)))
    assert shown["state"] == "deleting"
    assert shown["deleted_at"] == "2023-11-14T22:13:20Z"
    assert shown["created_at"] == "1970-01-01T00:00:00Z"


def test_a_stream_is_shown_with_every_member() -> None:
    assert json.loads(encode_stream_info(STREAM)) == {
        "name": "a/b ü",
        "created_at": "2023-11-14T22:13:20Z",
        "deleted_at": "2023-11-14T22:13:21.001000Z",
        "cipher": "aegis-256",
    }


def test_pages_say_whether_more_follows() -> None:
    basins = json.loads(encode_basin_page(Page((BASIN,), True)))
    assert basins == {"basins": [json.loads(encode_basin_info(BASIN))], "has_more": True}
    streams = json.loads(encode_stream_page(Page((STREAM, STREAM), False)))
    assert streams == {"streams": [json.loads(encode_stream_info(STREAM))] * 2, "has_more": False}
    assert encode_stream_page(Page((), False)) == b'{"streams":[],"has_more":false}'


def test_the_official_client_reads_moments_to_the_millisecond() -> None:
    basin = sdk.basin_info_from_json(json.loads(encode_basin_info(BASIN)))
    assert basin.created_at.timestamp() * 1000 == BASIN.created_at
    stream = sdk.stream_info_from_json(json.loads(encode_stream_info(STREAM)))
    assert stream.deleted_at.timestamp() * 1000 == STREAM.deleted_at
