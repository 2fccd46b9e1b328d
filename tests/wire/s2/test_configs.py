"""Configurations: layers in, resolved values out, and tri-state changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from s2_sdk import _mappers as sdk

from streamfold.errors import InvalidError
from streamfold.model.configs import (
    UNSET,
    BasinConfig,
    BasinReconfiguration,
    Cipher,
    StorageClass,
    StreamConfig,
    StreamConfigLayer,
    StreamReconfiguration,
    TimestampMode,
)
from streamfold.wire.s2.errors import BadJsonError
from streamfold.wire.s2.resources import (
    decode_basin_reconfiguration,
    decode_ensure_basin,
    decode_stream_config,
    decode_stream_reconfiguration,
    encode_basin_config,
    encode_stream_config,
)

ALL_NULL: dict[str, Any] = {
    "storage_class": None,
    "retention_policy": None,
    "timestamping": None,
    "delete_on_empty": None,
}


def config(value: Any) -> StreamConfigLayer:
    return decode_stream_config(json.dumps(value).encode())


def stream_change(value: Any) -> StreamReconfiguration:
    return decode_stream_reconfiguration(json.dumps(value).encode())


def basin_change(value: Any) -> BasinReconfiguration:
    return decode_basin_reconfiguration(json.dumps(value).encode())


def test_a_full_configuration_is_understood() -> None:
    assert config(
        {
            "storage_class": "standard",
            "retention_policy": {"age": 60},
            "timestamping": {"mode": "client-require", "uncapped": True},
            "delete_on_empty": {"min_age_secs": 5},
        }
    ) == StreamConfigLayer(StorageClass.STANDARD, 60, TimestampMode.CLIENT_REQUIRE, True, 5)


@pytest.mark.parametrize("value", [{}, None, ALL_NULL, {"timestamping": {}}, {"colour": 1}])
def test_what_is_absent_or_null_is_left_to_the_layer_below(value: Any) -> None:
    assert config(value) == StreamConfigLayer()


def test_an_empty_body_asks_for_nothing() -> None:
    assert decode_stream_config(b"") == StreamConfigLayer()


def test_retention_may_be_infinite() -> None:
    assert config({"retention_policy": {"infinite": {}}}).retention == "infinite"


def test_deletion_on_empty_without_an_age_is_off() -> None:
    assert config({"delete_on_empty": {}}).delete_on_empty_secs == 0


def test_a_retention_of_zero_is_invalid() -> None:
    with pytest.raises(InvalidError, match="positive"):
        config({"retention_policy": {"age": 0}})
    with pytest.raises(InvalidError, match="positive"):
        stream_change({"retention_policy": {"age": 0}})
    with pytest.raises(InvalidError, match="positive"):
        basin_change({"default_stream_config": {"retention_policy": {"age": 0}}})


@pytest.mark.parametrize(
    ("value", "choices"),
    [
        ({"storage_class": "cheap"}, "choose from standard, express"),
        (
            {"timestamping": {"mode": "late"}},
            "choose from client-prefer, client-require, arrival",
        ),
    ],
)
def test_an_unknown_choice_is_refused_with_those_that_there_are(value: Any, choices: str) -> None:
    for decode in (config, stream_change):
        with pytest.raises(BadJsonError, match=choices):
            decode(value)
    with pytest.raises(BadJsonError, match="choose from aegis-256, aes-256-gcm"):
        basin_change({"stream_cipher": "rot13"})


@pytest.mark.parametrize(
    "value",
    [
        [],
        "express",
        {"storage_class": "cheap"},
        {"storage_class": 1},
        {"retention_policy": {}},
        {"retention_policy": {"age": 1, "infinite": {}}},
        {"retention_policy": {"age": -1}},
        {"retention_policy": {"age": 2**64}},
        {"retention_policy": {"age": "7d"}},
        {"retention_policy": "infinite"},
        {"timestamping": {"mode": "sometimes"}},
        {"timestamping": {"uncapped": "yes"}},
        {"delete_on_empty": {"min_age_secs": -1}},
        {"delete_on_empty": {"min_age_secs": 2**64}},
    ],
)
def test_what_does_not_fit_is_malformed(value: Any) -> None:
    with pytest.raises(BadJsonError):
        config(value)
    with pytest.raises(BadJsonError):
        stream_change(value)
    with pytest.raises(BadJsonError):
        basin_change({"default_stream_config": value})


def test_a_streams_configuration_is_fully_resolved() -> None:
    assert json.loads(encode_stream_config(StreamConfig())) == {
        "storage_class": "express",
        "retention_policy": {"age": 604800},
        "timestamping": {"mode": "client-prefer", "uncapped": False},
        "delete_on_empty": {"min_age_secs": 0},
    }


def test_infinite_retention_is_an_empty_object() -> None:
    written = json.loads(encode_stream_config(StreamConfig(retention="infinite")))
    assert written["retention_policy"] == {"infinite": {}}


def test_a_basin_without_defaults_says_null() -> None:
    assert json.loads(encode_basin_config(BasinConfig())) == {
        "default_stream_config": None,
        "stream_cipher": None,
        "create_stream_on_append": False,
        "create_stream_on_read": False,
    }


def test_a_basins_defaults_have_only_what_was_set() -> None:
    basin = BasinConfig(StreamConfigLayer(timestamp_uncapped=True), Cipher.AES_256_GCM, True, False)
    assert json.loads(encode_basin_config(basin)) == {
        "default_stream_config": ALL_NULL | {"timestamping": {"mode": None, "uncapped": True}},
        "stream_cipher": "aes-256-gcm",
        "create_stream_on_append": True,
        "create_stream_on_read": False,
    }


LAYERS = st.builds(
    StreamConfigLayer,
    storage_class=st.none() | st.sampled_from(StorageClass),
    retention=st.none() | st.just("infinite") | st.integers(1, 2**64 - 1),
    timestamp_mode=st.none() | st.sampled_from(TimestampMode),
    timestamp_uncapped=st.none() | st.booleans(),
    delete_on_empty_secs=st.none() | st.integers(0, 2**64 - 1),
)
BASINS = st.builds(
    BasinConfig, LAYERS, st.none() | st.sampled_from(Cipher), st.booleans(), st.booleans()
)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(BASINS)
def test_what_a_basin_shows_can_be_sent_back(basin: BasinConfig) -> None:
    shown = encode_basin_config(basin)
    assert decode_ensure_basin(b'{"config":' + shown + b"}").config == basin


@settings(derandomize=True, max_examples=150, deadline=None)
@given(BASINS)
def test_the_official_client_reads_and_resends_what_a_basin_shows(basin: BasinConfig) -> None:
    theirs = sdk.basin_config_from_json(json.loads(encode_basin_config(basin)))
    resent = json.dumps({"config": sdk.basin_config_to_json(theirs)}).encode()
    assert decode_ensure_basin(resent).config == basin


def test_a_change_that_mentions_nothing_changes_nothing() -> None:
    assert stream_change({}) == StreamReconfiguration()
    assert basin_change({}) == BasinReconfiguration()


def test_null_resets_every_member_of_a_stream() -> None:
    assert stream_change(ALL_NULL) == StreamReconfiguration(None, None, None, None, None)


def test_nested_members_are_changed_one_by_one() -> None:
    assert stream_change({"timestamping": {"uncapped": True}}) == StreamReconfiguration(
        timestamp_uncapped=True
    )
    assert stream_change({"timestamping": {"mode": None}}) == StreamReconfiguration(
        timestamp_mode=None
    )
    assert stream_change({"delete_on_empty": {}}) == StreamReconfiguration()
    assert stream_change({"delete_on_empty": {"min_age_secs": None}}) == StreamReconfiguration(
        delete_on_empty_secs=None
    )


def test_a_change_sets_values() -> None:
    assert stream_change(
        {
            "storage_class": "express",
            "retention_policy": {"infinite": {}},
            "timestamping": {"mode": "arrival", "uncapped": False},
            "delete_on_empty": {"min_age_secs": 0},
        }
    ) == StreamReconfiguration(StorageClass.EXPRESS, "infinite", TimestampMode.ARRIVAL, False, 0)


def test_null_clears_a_basins_defaults_and_cipher() -> None:
    assert basin_change(
        {"default_stream_config": None, "stream_cipher": None}
    ) == BasinReconfiguration(None, None, UNSET, UNSET)


def test_null_leaves_a_basins_switches_as_they_are() -> None:
    assert (
        basin_change({"create_stream_on_append": None, "create_stream_on_read": None})
        == BasinReconfiguration()
    )


def test_a_change_to_a_basin_sets_values() -> None:
    assert basin_change(
        {
            "default_stream_config": {"storage_class": None, "retention_policy": {"age": 1}},
            "stream_cipher": "aegis-256",
            "create_stream_on_append": True,
            "create_stream_on_read": False,
        }
    ) == BasinReconfiguration(
        StreamReconfiguration(storage_class=None, retention=1), Cipher.AEGIS_256, True, False
    )


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{", b'{"stream_cipher":"rot13"}'])
def test_a_change_that_is_not_an_object_is_malformed(body: bytes) -> None:
    with pytest.raises(BadJsonError):
        decode_basin_reconfiguration(body)
