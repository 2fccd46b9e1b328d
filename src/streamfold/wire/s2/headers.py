"""Headers of requests: their values, and the encodings of request and answer that follow from them."""

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

#: Bytes of a customer's key, for either cipher.
KEY_SIZE = 32
#: Characters: 32 bytes in base64.
_KEY_TEXT_MAX = 44

#: Codings in a header that are read.
_CODINGS_MAX = 32

_FORMATS: Final = {
    "raw": RecordFormat.RAW,
    "json": RecordFormat.RAW,
    "base64": RecordFormat.BASE64,
    "json-binsafe": RecordFormat.BASE64,
}
#: Bytes of a request's body, inflated. The largest legal batch needs 1.4 MiB in base64 and 2 MiB
#: in protobuf; JSON with many small headers needs more.
BODY_MAX = 4 << 20


class EncryptionKey:
    """A customer's key; only `reveal` shows it."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def reveal(self) -> bytes:
        """The 32 bytes, for a cipher only."""
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
    """The basin that a request is about, by the rule of buckets: every bucket is a basin."""
    if value is None:
        raise BadHeaderError(f"header {BASIN} is missing: it names the basin")
    try:
        return parse_bucket_name(value, what="basin name")
    except InvalidError as error:
        raise BadHeaderError(f"{BASIN}: {error.message}") from None


def parse_format(value: str | None) -> RecordFormat:
    """How records are written in JSON; raw unless said otherwise."""
    if value is None:
        return RecordFormat.RAW
    found = _FORMATS.get(value.strip())
    if found is None:
        raise BadHeaderError(f"{FORMAT} {value[:40]!r} must be one of {', '.join(_FORMATS)}")
    return found


def parse_request_token(value: str | None) -> str | None:
    """The token that makes a creation repeatable."""
    if value is None:
        return None
    try:
        return parse_token(value, REQUEST_TOKEN)
    except InvalidError as error:
        raise BadHeaderError(error.message) from None


def parse_encryption_key(value: str | None) -> EncryptionKey | None:
    """The key for a stream's cipher; a refusal never quotes it."""
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
    """The key of a request on an encrypted stream."""
    if key is None:
        raise BadHeaderError(
            f"the stream is encrypted with {cipher}: send its key in header {ENCRYPTION_KEY}"
        )
    return key


def parse_stream_config(value: str | None) -> StreamConfigLayer:
    """The configuration of the stream if this request creates it; always checked."""
    if value is None:
        return StreamConfigLayer()
    try:
        # Any fault of the value is a fault of the header; an empty value is not JSON either.
        return decode_stream_config(value.encode(errors="surrogateescape") or b" ")
    except (BadJsonError, InvalidError) as error:
        raise BadHeaderError(f"{STREAM_CONFIG}: {error.message}") from None


def parse_accept_encoding(value: str | None) -> Compression:
    """The compression of the answer: zstd where it is listed, else gzip, else none.

    Preferences among them are ignored; only a weight of zero takes one off the list.
    """
    # A client lists a handful: the rest of a longer list is ignored.
    listed = {_coding(entry) for entry in (value or "").split(",", _CODINGS_MAX)[:_CODINGS_MAX]}
    for compression in (Compression.ZSTD, Compression.GZIP):
        if compression in listed:
            return compression
    return Compression.NONE


def parse_content_encoding(value: str | None) -> Compression:
    """How the request's body is compressed."""
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
    """The value is the content type that an answer is sent with."""

    JSON = "application/json"
    PROTO = "application/protobuf"
    SSE = "text/event-stream"
    S2S = "s2s/proto"


@dataclass(frozen=True)
class Negotiated:
    """How the request's body is to be read, and how the answer is to be written."""

    request: Encoding | None
    response: Encoding

    @cached_property
    def session(self) -> bool:
        """Whether the answer is an open-ended stream: no content coding, no length."""
        return self.response in (Encoding.S2S, Encoding.SSE)


def negotiate_append(content_type: str | None, accept: str | None) -> Negotiated:
    """An append is a session by its content type, whatever it accepts."""
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
    """A read is an s2s session by its content type although it has no body, else by `accept`."""
    if _media_type(content_type) == Encoding.S2S:
        return Negotiated(None, Encoding.S2S)
    first = _first(accept)
    if first == Encoding.SSE:
        return Negotiated(None, Encoding.SSE)
    return Negotiated(None, Encoding.PROTO if _is_proto(first) else Encoding.JSON)


def require_json(content_type: str | None) -> None:
    """Refuse a body of the control plane whose content type is not JSON."""
    media = _media_type(content_type)
    if not _is_json(media):
        raise BadJsonError(f"content-type {media[:80]!r} is not JSON: send application/json")


def inflate_body(
    body: bytes, compression: Compression, encoding: Encoding = Encoding.JSON
) -> bytes:
    """A unary request's body, as it was before compression and no larger than is allowed."""
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
