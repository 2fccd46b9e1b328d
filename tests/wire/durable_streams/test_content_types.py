"""Content types: which are equal, which are JSON, and which are text."""

from __future__ import annotations

import pytest

from streamfold.errors import InvalidError
from streamfold.wire.durable_streams.content import (
    CONTENT_TYPE_MAX,
    DEFAULT_CONTENT_TYPE,
    is_json,
    is_text,
    normalise_content_type,
    parse_stream_type,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("text/plain", "text/plain"),
        ("TEXT/Plain", "text/plain"),
        ("text/plain; charset=utf-8", "text/plain"),
        ("text/plain ;charset=utf-8", "text/plain"),
        (" text/plain\t", "text/plain"),
        ("application/json;", "application/json"),
    ],
)
def test_case_and_parameters_make_no_other_type(text: str, expected: str) -> None:
    assert normalise_content_type(text) == expected


@pytest.mark.parametrize(
    ("text", "json", "plain"),
    [
        ("application/json", True, True),
        ("Application/JSON; charset=utf-8", True, True),
        ("application/json-patch+json", False, False),
        ("application/x-ndjson", False, False),
        ("text/plain", False, True),
        ("TEXT/html;q=1", False, True),
        ("text", False, False),
        ("application/octet-stream", False, False),
        ("application/x-text/json", False, False),
    ],
)
def test_the_media_type_distinguishes_json_and_text(text: str, json: bool, plain: bool) -> None:
    assert is_json(text) is json
    assert is_text(text) is plain


@pytest.mark.parametrize(
    "text", ["text/plain", "a/b", "application/vnd.a+json; v=1", 'text/x; a="b; c"', "text/plain;"]
)
def test_a_new_stream_has_its_type_as_written(text: str) -> None:
    assert parse_stream_type(text) == text
    assert parse_stream_type(f" {text}\t") == text


def test_no_type_is_not_the_default_type() -> None:
    assert parse_stream_type(None) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "text",
        "text/",
        "/plain",
        "text/plain/x",
        "text plain",
        "text/pl ain",
        "text/plain, text/html",
        "text/plain; a=\u00e9",
        "text/plain; a=\udcff",
        "text/plain\r\nX-Evil: 1",
        "text/plain; a\r\nX-Evil: 1",
        "text/plain\n",
        "text/plain;\0",
    ],
)
def test_a_malformed_type_becomes_the_default(text: str) -> None:
    assert parse_stream_type(text) == DEFAULT_CONTENT_TYPE


def test_a_type_too_long_to_keep_is_refused() -> None:
    assert parse_stream_type("a/" + "b" * (CONTENT_TYPE_MAX - 2)) is not None
    with pytest.raises(InvalidError, match="content-type"):
        parse_stream_type("a/" + "b" * (CONTENT_TYPE_MAX - 1))
