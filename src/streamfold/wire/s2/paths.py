"""Names in paths: segments are split where the raw path has slashes, and decoded afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from streamfold.errors import InvalidError
from streamfold.model import access_tokens
from streamfold.model.names import (
    BasinName,
    StreamName,
    parse_basin_name,
    parse_bucket_name,
    parse_stream_name,
)
from streamfold.wire.s2.errors import BadPathError
from streamfold.wire.text import SHOWN, decode_segment

Name = TypeVar("Name", bound=str)


def split_path(raw_path: str) -> tuple[str, ...]:
    """The segments of a path that is still percent-encoded: names may contain slashes."""
    return tuple(raw_path.removeprefix("/").split("/"))


def parse_basin(segment: str) -> BasinName:
    """A basin that may exist: any that Durable Streams could have made."""
    return _parse(segment, partial(parse_bucket_name, what="basin name"))


def parse_new_basin(segment: str) -> BasinName:
    """A basin that is to be created, by the rule of S2."""
    return _parse(segment, parse_basin_name)


def parse_stream(segment: str) -> StreamName:
    return _parse(segment, parse_stream_name)


def parse_token_id(segment: str) -> str:
    return _parse(segment, access_tokens.parse_token_id)


def _parse(segment: str, parse_name: Callable[[str], Name]) -> Name:
    text = decode_segment(segment)
    if text is None:
        raise BadPathError(f"path segment {segment[:SHOWN]!r} is not percent-encoded UTF-8")
    try:
        return parse_name(text)
    except InvalidError as error:
        raise BadPathError(error.message) from None
