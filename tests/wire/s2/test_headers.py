"""Header values, content negotiation, and names in paths."""

from __future__ import annotations

import base64
import copy
import pickle

import pytest
import s2_sdk
from s2_sdk import _mappers as sdk

from streamfold.model.configs import Cipher, StorageClass, StreamConfigLayer, TimestampMode
from streamfold.wire.compression import Compression, compress
from streamfold.wire.s2 import headers, urls
from streamfold.wire.s2.errors import (
    BadHeaderError,
    BadJsonError,
    BadPathError,
    BadProtoError,
    describe_failure,
)
from streamfold.wire.s2.headers import (
    BODY_MAX,
    Encoding,
    Negotiated,
    inflate_body,
    negotiate_append,
    negotiate_read,
    require_json,
)
from streamfold.wire.s2.records_json import RecordFormat

KEY = bytes(range(200, 232))
KEY_TEXT = base64.b64encode(KEY).decode()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "raw"),
        ("raw", "raw"),
        ("json", "raw"),
        (" base64 ", "base64"),
        ("json-binsafe", "base64"),
    ],
)
def test_formats_have_aliases(value: str | None, expected: str) -> None:
    assert headers.parse_format(value) is RecordFormat(expected)


@pytest.mark.parametrize("value", ["", "hex", "RAW"])
def test_an_unknown_format_is_a_bad_header(value: str) -> None:
    with pytest.raises(BadHeaderError, match="s2-format"):
        headers.parse_format(value)


def test_the_basin_is_named() -> None:
    assert headers.parse_basin("my-basin") == "my-basin"


@pytest.mark.parametrize("value", [None, "", "abc", "My-Basin", "my.basin"])
def test_a_missing_or_impossible_basin_is_a_bad_header(value: str | None) -> None:
    with pytest.raises(BadHeaderError, match="s2-basin"):
        headers.parse_basin(value)


def test_a_request_token_has_at_most_36_bytes() -> None:
    assert headers.parse_request_token(None) is None
    assert headers.parse_request_token("x" * 36) == "x" * 36
    with pytest.raises(BadHeaderError, match="s2-request-token"):
        headers.parse_request_token("x" * 37)


def test_a_key_is_revealed_only_when_asked() -> None:
    key = headers.parse_encryption_key(KEY_TEXT)
    assert key is not None
    assert key.reveal() == KEY
    assert headers.parse_encryption_key(None) is None
    for shown in (repr(key), str(key), f"{key}", f"{key!r:>40}", repr([key])):
        assert KEY_TEXT not in shown
        assert repr(KEY) not in shown
    with pytest.raises(TypeError):
        pickle.dumps(key)
    with pytest.raises(TypeError):
        copy.copy(key)


def test_keys_compare_by_value() -> None:
    assert headers.parse_encryption_key(KEY_TEXT) == headers.EncryptionKey(KEY)
    assert headers.EncryptionKey(KEY) != headers.EncryptionKey(KEY[::-1])
    assert headers.EncryptionKey(KEY) != KEY
    assert len({headers.EncryptionKey(KEY), headers.EncryptionKey(KEY)}) == 1


@pytest.mark.parametrize(
    "value",
    [
        "",
        "secret!not base64",
        base64.b64encode(KEY[:31]).decode(),
        base64.b64encode(KEY + b"x").decode(),
        KEY_TEXT.rstrip("="),
        KEY_TEXT + "====",
        "x" * 45,
        "é" * 44,
    ],
)
def test_a_bad_key_is_a_bad_header_that_never_quotes_it(value: str) -> None:
    with pytest.raises(BadHeaderError, match="32 bytes") as caught:
        headers.parse_encryption_key(value)
    shown = str(caught.value) + describe_failure(caught.value).body.decode()
    assert not value or value not in shown
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("cipher", list(Cipher))
def test_a_missing_key_is_a_bad_header_that_names_the_cipher(cipher: Cipher) -> None:
    with pytest.raises(BadHeaderError, match=cipher.value):
        headers.require_encryption_key(None, cipher)
    key = headers.EncryptionKey(KEY)
    assert headers.require_encryption_key(key, cipher) is key


def test_a_stream_config_header_of_the_official_client_is_understood() -> None:
    config = s2_sdk.StreamConfig(
        storage_class="standard",
        retention_policy="infinite",
        timestamping=s2_sdk.Timestamping(mode=s2_sdk.TimestampingMode.ARRIVAL, uncapped=True),
        delete_on_empty_min_age=60,
    )
    assert headers.parse_stream_config(sdk.stream_config_header(config)) == StreamConfigLayer(
        StorageClass.STANDARD, "infinite", TimestampMode.ARRIVAL, True, 60
    )


def test_without_a_stream_config_header_nothing_is_asked_for() -> None:
    assert headers.parse_stream_config(None) == StreamConfigLayer()
    assert headers.parse_stream_config("{}") == StreamConfigLayer()


@pytest.mark.parametrize(
    "value",
    ["", " ", "{", "[]", '{"storage_class":"x"}', '{"retention_policy":{"age":0}}', "\udcff"],
)
def test_a_stream_config_that_is_wrong_in_any_way_is_a_bad_header(value: str) -> None:
    with pytest.raises(BadHeaderError, match="s2-stream-config"):
        headers.parse_stream_config(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, Compression.NONE),
        ("", Compression.NONE),
        ("identity, br", Compression.NONE),
        ("gzip", Compression.GZIP),
        ("gzip, zstd", Compression.ZSTD),
        ("GZIP;q=1.0, ZSTD;q=0.1", Compression.ZSTD),
        ("gzip, deflate", Compression.GZIP),
        ("zstd;q=0, gzip", Compression.GZIP),
        ("zstd; q=0.000,gzip;q=0", Compression.NONE),
        ("x-gzip", Compression.NONE),
    ],
)
def test_zstd_is_preferred_to_gzip(value: str | None, expected: Compression) -> None:
    assert headers.parse_accept_encoding(value) is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, Compression.NONE),
        ("", Compression.NONE),
        ("identity", Compression.NONE),
        ("GZIP", Compression.GZIP),
        (" zstd ", Compression.ZSTD),
    ],
)
def test_bodies_may_be_compressed(value: str | None, expected: Compression) -> None:
    assert headers.parse_content_encoding(value) is expected


@pytest.mark.parametrize("value", ["br", "deflate", "gzip, zstd"])
def test_bodies_compressed_otherwise_are_refused(value: str) -> None:
    with pytest.raises(BadHeaderError, match="content-encoding"):
        headers.parse_content_encoding(value)


S2S, PROTO, JSON, SSE = Encoding.S2S, Encoding.PROTO, Encoding.JSON, Encoding.SSE


@pytest.mark.parametrize(
    ("content_type", "accept", "expected"),
    [
        ("s2s/proto", "application/protobuf", (S2S, S2S)),
        ("S2S/Proto; v=1", None, (S2S, S2S)),
        ("application/protobuf", "application/protobuf", (PROTO, PROTO)),
        ("application/x-protobuf", "application/x-protobuf, */*", (PROTO, PROTO)),
        ("application/protobuf", None, (PROTO, JSON)),
        ("application/json", None, (JSON, JSON)),
        ("Application/JSON; charset=utf-8", "*/*, application/protobuf", (JSON, JSON)),
        ("application/vnd.x+json", "application/protobuf;q=1", (JSON, PROTO)),
        ("application/json", "text/event-stream", (JSON, JSON)),
    ],
)
def test_appends_are_negotiated(
    content_type: str, accept: str | None, expected: tuple[Encoding, Encoding]
) -> None:
    negotiated = negotiate_append(content_type, accept)
    assert negotiated == Negotiated(*expected)
    assert negotiated.session is (expected[1] is S2S)


@pytest.mark.parametrize("content_type", [None, "", "text/plain", "text/x+json", "json"])
def test_an_append_in_anything_else_is_malformed_json(content_type: str | None) -> None:
    with pytest.raises(BadJsonError, match="content-type"):
        negotiate_append(content_type, None)
    with pytest.raises(BadJsonError, match="content-type"):
        require_json(content_type)


@pytest.mark.parametrize(
    ("content_type", "accept", "expected"),
    [
        ("s2s/proto", "application/protobuf", S2S),
        ("s2s/proto", "text/event-stream", S2S),
        (None, "text/event-stream", SSE),
        (None, "TEXT/event-stream;x=y, application/json", SSE),
        (None, "application/json, text/event-stream", JSON),
        (None, "application/protobuf", PROTO),
        (None, None, JSON),
        ("application/protobuf", "*/*", JSON),
    ],
)
def test_reads_are_negotiated(
    content_type: str | None, accept: str | None, expected: Encoding
) -> None:
    negotiated = negotiate_read(content_type, accept)
    assert negotiated == Negotiated(None, expected)
    assert negotiated.session is (expected in (S2S, SSE))


def test_bodies_are_inflated_within_their_limit() -> None:
    require_json("application/json")
    assert inflate_body(compress(b"{}", Compression.GZIP), Compression.GZIP) == b"{}"
    assert inflate_body(b"{}", Compression.NONE) == b"{}"


@pytest.mark.parametrize("compression", list(Compression))
def test_a_body_too_large_is_bad_in_its_own_encoding(compression: Compression) -> None:
    bomb = compress(bytes(BODY_MAX + 1), compression)
    with pytest.raises(BadJsonError, match=str(BODY_MAX)):
        inflate_body(bomb, compression)
    with pytest.raises(BadProtoError, match=str(BODY_MAX)):
        inflate_body(bomb, compression, Encoding.PROTO)


def test_names_in_paths_are_percent_decoded() -> None:
    assert urls.parse_stream("a%2Fb%20%C3%BC+") == "a/b ü+"
    assert urls.parse_basin("my%2Dbasin") == "my-basin"
    assert urls.parse_token_id("a%20b") == "a b"


@pytest.mark.parametrize("segment", ["", "UPPER-CASE", "abc", "a" * 65, "%ff%ff%ff%ff%ff"])
def test_an_impossible_basin_in_a_path_is_a_bad_path(segment: str) -> None:
    with pytest.raises(BadPathError):
        urls.parse_basin(segment)


@pytest.mark.parametrize("segment", ["short", "my-basin-", "under_score", "a" * 49])
def test_a_basin_that_only_durable_streams_may_name_can_exist_but_not_be_created(
    segment: str,
) -> None:
    assert urls.parse_basin(segment) == segment
    with pytest.raises(BadPathError):
        urls.parse_new_basin(segment)


@pytest.mark.parametrize("segment", ["", ".", "%2E%2e", "%00", "x" * 513, "%C3"])
def test_an_impossible_stream_in_a_path_is_a_bad_path(segment: str) -> None:
    with pytest.raises(BadPathError):
        urls.parse_stream(segment)


@pytest.mark.parametrize("segment", ["", "..", "x" * 97])
def test_an_impossible_token_id_in_a_path_is_a_bad_path(segment: str) -> None:
    with pytest.raises(BadPathError):
        urls.parse_token_id(segment)
