"""Parses request headers and negotiates the encodings of request and response."""

from __future__ import annotations

import base64
import enum
import hmac
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from streamfold.errors import InvalidError, MalformedError
from streamfold.model.configs import Cipher, StreamConfigLayer
from streamfold.model.names import BasinName, parse_bucket_name, parse_token
from streamfold.wire.compression import Compression, decompress
from streamfold.wire.s2.errors import BadHeaderError, BadJsonError, BadProtoError
from streamfold.wire.s2.records_json import RecordFormat
from streamfold.wire.s2.resources import decode_stream_config

BASIN: Final = "s2-basin"
FORMAT: Final = "s2-format"
REQUEST_TOKEN: Final = "s2-request-token"  # noqa: S105 - a header's name, not a secret
ENCRYPTION_KEY: Final = "s2-encryption-key"
STREAM_CONFIG: Final = "s2-stream-config"
LAST_EVENT_ID: Final = "last-event-id"
PROVISION_RESULT: Final = "s2-provision-result"
RETRY_AFTER_MS: Final = "retry-after-ms"

#: Bytes of a customer's encryption key, for either cipher.
KEY_SIZE = 32
#: Characters of 32 bytes in base64.
_KEY_TEXT_MAX = 44

#: Content codings read from one header. The rest are ignored.
_CODINGS_MAX = 32

_FORMATS: Final = {
    "raw": RecordFormat.RAW,
    "json": RecordFormat.RAW,
    "base64": RecordFormat.BASE64,
    "json-binsafe": RecordFormat.BASE64,
}
#: Maximum bytes of an inflated request body. The largest legal batch needs 1.4 MiB in base64 and 2
#: MiB in protobuf. JSON with many small headers needs more.
BODY_MAX = 4 << 20


class EncryptionKey:
    """A customer's encryption key. Only `reveal` shows it."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def reveal(self) -> bytes:
        """Return the 32 bytes, for use by a cipher only."""
        return self._key

    def __repr__(self) -> str:
        return "EncryptionKey(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EncryptionKey) and hmac.compare_digest(self._key, other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> str:
        raise TypeError("an encryption key may not be pickled: it would leave the process")


def parse_basin(value: str | None) -> BasinName:
    """Parse the request's basin name. Bucket names are allowed, since every bucket is a basin."""
    if value is None:
        raise BadHeaderError(f"header {BASIN} is missing: it names the basin")
    try:
        return parse_bucket_name(value, what="basin name")
    except InvalidError as error:
        raise BadHeaderError(f"{BASIN}: {error.message}") from None


def parse_format(value: str | None) -> RecordFormat:
    """Parse how JSON encodes record bytes. The default is raw."""
    if value is None:
        return RecordFormat.RAW
    form = _FORMATS.get(value.strip())
    if form is None:
        raise BadHeaderError(f"{FORMAT} {value[:40]!r} must be one of {', '.join(_FORMATS)}")
    return form


def parse_request_token(value: str | None) -> str | None:
    """Parse the token that makes a creation idempotent."""
    if value is None:
        return None
    try:
        return parse_token(value, REQUEST_TOKEN)
    except InvalidError as error:
        raise BadHeaderError(error.message) from None


def parse_encryption_key(value: str | None) -> EncryptionKey | None:
    """Parse the key for a stream's cipher. Errors never quote it."""
    if value is None:
        return None
    text = value.strip()
    try:
        key = base64.b64decode(text, validate=True) if len(text) <= _KEY_TEXT_MAX else b""
    except ValueError:
        key = b""
    if len(key) != KEY_SIZE:
        raise BadHeaderError(f"{ENCRYPTION_KEY} must be {KEY_SIZE} bytes in base64") from None
    return EncryptionKey(key)


def require_encryption_key(key: EncryptionKey | None, cipher: Cipher) -> EncryptionKey:
    """Return the request's key. Raises BadHeaderError if it is missing but the stream is encrypted."""
    if key is None:
        raise BadHeaderError(
            f"the stream is encrypted with {cipher}: send its key in header {ENCRYPTION_KEY}"
        )
    return key


def parse_stream_config(value: str | None) -> StreamConfigLayer:
    """Parse the configuration for a stream that this request may create. It is always checked."""
    if value is None:
        return StreamConfigLayer()
    try:
        # Any error in the value is a header error. An empty value is not JSON either.
        return decode_stream_config(value.encode(errors="surrogateescape") or b" ")
    except (BadJsonError, InvalidError) as error:
        raise BadHeaderError(f"{STREAM_CONFIG}: {error.message}") from None


def parse_accept_encoding(value: str | None) -> Compression:
    """Choose the response compression: zstd if listed, else gzip, else none.

    Weights are ignored, except that a weight of zero removes a coding from the list.
    """
    # Clients list a handful of codings. The rest of a longer list is ignored.
    listed = {_coding(entry) for entry in (value or "").split(",", _CODINGS_MAX)[:_CODINGS_MAX]}
    for compression in (Compression.ZSTD, Compression.GZIP):
        if compression in listed:
            return compression
    return Compression.NONE


def parse_content_encoding(value: str | None) -> Compression:
    """Parse the compression of the request body."""
    text = (value or Compression.NONE).strip().lower()
    if text not in list(Compression):
        raise BadHeaderError(f"content-encoding {text[:40]!r} is not supported: use gzip or zstd")
    return Compression(text)


def _coding(entry: str) -> str:
    name, _, parameters = entry.partition(";")
    weight = parameters.replace(" ", "").lower().removeprefix("q=")
    refused = bool(parameters) and weight.strip("0") in ("", ".")
    return "" if refused else name.strip().lower()


class Encoding(enum.StrEnum):
    """A body encoding. Its value is the content type of the response."""

    JSON = "application/json"
    PROTO = "application/protobuf"
    SSE = "text/event-stream"
    S2S = "s2s/proto"


@dataclass(frozen=True)
class Negotiated:
    """The encodings of the request body and of the response."""

    request: Encoding | None
    response: Encoding

    @cached_property
    def session(self) -> bool:
        """Whether the response is an open-ended stream, without content coding or length."""
        return self.response in (Encoding.S2S, Encoding.SSE)


def negotiate_append(content_type: str | None, accept: str | None) -> Negotiated:
    """Negotiate an append. Its content type alone decides whether it is a session."""
    media = _media_type(content_type)
    if media == Encoding.S2S:
        return Negotiated(Encoding.S2S, Encoding.S2S)
    response = Encoding.PROTO if _is_proto(_first(accept)) else Encoding.JSON
    if _is_proto(media):
        return Negotiated(Encoding.PROTO, response)
    if _is_json(media):
        return Negotiated(Encoding.JSON, response)
    raise BadJsonError(
        f"content-type {media[:80]!r} is not supported: send application/json, "
        "application/protobuf or s2s/proto"
    )


def negotiate_read(content_type: str | None, accept: str | None) -> Negotiated:
    """Negotiate a read by `accept`. An s2s content type takes precedence, although there is no body."""
    if _media_type(content_type) == Encoding.S2S:
        return Negotiated(None, Encoding.S2S)
    first = _first(accept)
    if first == Encoding.SSE:
        return Negotiated(None, Encoding.SSE)
    return Negotiated(None, Encoding.PROTO if _is_proto(first) else Encoding.JSON)


def require_json(content_type: str | None) -> None:
    """Raise unless a control-plane body has a JSON content type."""
    media = _media_type(content_type)
    if not _is_json(media):
        raise BadJsonError(f"content-type {media[:80]!r} is not JSON: send application/json")


def inflate_body(
    body: bytes, compression: Compression, encoding: Encoding = Encoding.JSON
) -> bytes:
    """Inflate a unary request's body to at most BODY_MAX bytes."""
    try:
        return decompress(body, compression, BODY_MAX)
    except MalformedError as error:
        refusal = BadProtoError if encoding is Encoding.PROTO else BadJsonError
        raise refusal(f"the body cannot be inflated: {error.message}") from None


def _first(accept: str | None) -> str:
    return _media_type((accept or "").partition(",")[0])


def _media_type(value: str | None) -> str:
    return (value or "").partition(";")[0].strip().lower()


def _is_proto(media: str) -> bool:
    return media in (Encoding.PROTO, "application/x-protobuf")


def _is_json(media: str) -> bool:
    return media == Encoding.JSON or (media.startswith("application/") and media.endswith("+json"))
