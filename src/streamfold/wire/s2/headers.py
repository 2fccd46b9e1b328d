"""Values of request headers: each function takes a header's value, None where it is absent."""

from __future__ import annotations

import base64
import hmac
from typing import Final

from streamfold.errors import InvalidError
from streamfold.model.configs import Cipher, StreamConfigLayer
from streamfold.model.names import BasinName, parse_bucket_name, parse_token
from streamfold.wire.compression import Compression
from streamfold.wire.s2.configs import decode_stream_config
from streamfold.wire.s2.errors import BadHeaderError, BadJsonError
from streamfold.wire.s2.records_json import RecordFormat

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
    """The basin that a request is about; by the rule of buckets, for every bucket is a basin."""
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
    """What a stream gets if this very request creates it; always checked, seldom used."""
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
