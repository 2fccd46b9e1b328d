"""What a request for records is written in, and what its answer is to be written in."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property

from streamfold.errors import MalformedError
from streamfold.wire.compression import Compression, decompress
from streamfold.wire.s2.errors import BadJsonError, BadProtoError

#: Bytes of a request's body, inflated. The largest legal batch needs 1.4 MiB in base64 and 2 MiB
#: in protobuf; JSON with many small headers needs more.
BODY_MAX = 4 << 20


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
    """Refuse a body of the control plane that does not claim to be JSON."""
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
