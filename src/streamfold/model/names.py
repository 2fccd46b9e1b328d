"""Rules for basin, stream and server names."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple, NewType
from urllib.parse import urlsplit

from streamfold.errors import InvalidError

#: Names and addresses of the local machine.
_LOOPBACK = re.compile(r"localhost|.+\.localhost|127(\.\d+){3}|::1")

BasinName = NewType("BasinName", str)
StreamName = NewType("StreamName", str)


class StreamRef(NamedTuple):
    """A stream's name with its basin's."""

    basin: BasinName
    stream: StreamName

    def __str__(self) -> str:
        return f"s2://{self.basin}/{self.stream}"

    @staticmethod
    @lru_cache(4096)  # each request names its stream
    def parse(basin: str, stream: str) -> StreamRef:
        """Parse both names. Raises InvalidError with the rule that one of them breaks."""
        return StreamRef(parse_bucket_name(basin), parse_stream_name(stream))


#: Minimum and maximum bytes of a basin name in S2, whose clients check them too.
BASIN_NAME_MIN, BASIN_NAME_MAX = 8, 48
#: The same for Durable Streams, where a basin is a bucket.
BUCKET_NAME_MIN, BUCKET_NAME_MAX = 4, 64
#: Bytes of UTF-8.
STREAM_NAME_MAX = 512
#: Bytes of UTF-8: a fencing token, or the idempotency token of a creation.
TOKEN_MAX = 36

#: Maximum characters of a rejected name quoted in a message.
SHOWN = 80

_BASIN = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
_BUCKET = re.compile(rf"[a-z0-9_-]{{{BUCKET_NAME_MIN},{BUCKET_NAME_MAX}}}")
_BASIN_PREFIX = re.compile(r"[a-z0-9_-]*")


def parse_basin_name(text: str) -> BasinName:
    """Return `text` as a basin name that S2 may create. Raises InvalidError with the rule it breaks."""
    if not BASIN_NAME_MIN <= len(text) <= BASIN_NAME_MAX:
        raise InvalidError(
            f"basin name {text[:SHOWN]!r} has {len(text)} characters: it must have "
            f"{BASIN_NAME_MIN} to {BASIN_NAME_MAX}"
        )
    if not _BASIN.fullmatch(text):
        raise InvalidError(
            f"basin name {text[:SHOWN]!r} must consist of lower-case letters, digits and hyphens, "
            "and begin and end with a letter or a digit"
        )
    return BasinName(text)


def parse_bucket_name(text: str, what: str = "bucket name") -> BasinName:
    """Return `text` as the name of any basin. Durable Streams allows more names than S2."""
    if not is_bucket_name(text):
        raise InvalidError(
            f"{what} {text[:SHOWN]!r} must consist of {BUCKET_NAME_MIN} to {BUCKET_NAME_MAX} "
            "lower-case letters, digits, hyphens and underscores"
        )
    return BasinName(text)


def is_bucket_name(text: str) -> bool:
    """Return whether a basin may have this name."""
    return bool(_BUCKET.fullmatch(text))


def parse_basin_prefix(text: str) -> str:
    """Return `text` as a prefix or lower bound of basin names. It may be empty."""
    if len(text) > BUCKET_NAME_MAX or not _BASIN_PREFIX.fullmatch(text):
        raise InvalidError(
            f"basin prefix {text[:SHOWN]!r} must have at most {BUCKET_NAME_MAX} lower-case letters, "
            "digits, hyphens and underscores"
        )
    return text


def parse_stream_name(text: str) -> StreamName:
    """Return `text` as a stream name. Raises InvalidError with the rule it breaks."""
    if text in ("", ".", ".."):
        raise InvalidError(f"stream name {text!r} is not allowed: it may not be empty, '.' or '..'")
    return StreamName(parse_stream_prefix(text, what="stream name"))


def parse_stream_prefix(text: str, what: str = "stream prefix") -> str:
    """Return `text` as a prefix or lower bound of stream names. It may be empty."""
    if "\0" in text:
        raise InvalidError(f"{what} {text[:SHOWN]!r} contains a NUL character: remove it")
    size = len(_utf8(text, what))
    if size > STREAM_NAME_MAX:
        raise InvalidError(
            f"{what} of {size} bytes is too long: at most {STREAM_NAME_MAX} bytes of UTF-8"
        )
    return text


def parse_token(text: str, what: str) -> str:
    """Return `text` as a fencing or request token (0 to 36 bytes of UTF-8)."""
    size = len(_utf8(text, what))
    if size > TOKEN_MAX:
        raise InvalidError(f"{what} of {size} bytes is too long: at most {TOKEN_MAX} bytes")
    return text


def endpoint_url(text: str) -> str:
    """Return the URL for `host:port`: http for the local machine, https for others."""
    if not text:
        return text
    if "://" in text:
        scheme = text.partition("://")[0].lower()
        if scheme not in ("http", "https"):
            raise InvalidError(
                f"endpoint {text[:SHOWN]!r} is not an address of HTTP: write http://host:port, or "
                "https://host"
            )
        return text
    host = urlsplit(f"//{text}").hostname or ""
    return f"http://{text}" if _LOOPBACK.fullmatch(host) else f"https://{text}"


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidError(f"{what} {text[:SHOWN]!r} is not valid Unicode text") from None
