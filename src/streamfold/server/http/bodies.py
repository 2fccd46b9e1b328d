"""Bodies of requests, whole or as they arrive, and answers with a body."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import msgspec

from streamfold.blob.local_store import WRITE_BUFFER
from streamfold.errors import TooLargeError
from streamfold.server.http.headers import Headers, text_of
from streamfold.server.http.offload import COPIED_BYTES, LIGHT_BYTES
from streamfold.server.http.request import Request
from streamfold.wire.compression import COMPRESS_FROM, Compression, compress_if_smaller
from streamfold.wire.s2 import headers as names
from streamfold.wire.s2.errors import BadHeaderError, BadJsonError, BadProtoError
from streamfold.wire.s2.headers import Encoding, inflate_body, require_json

#: Bytes of a body that is not records, inflated: a configuration, or the scope of a token.
_RESOURCE_MAX: Final = 64 << 10
#: Bytes that an upload has in memory on its way to object storage: parts that are sent, and the next.
_UPLOAD_ROOM: Final = 32 << 20

JSON: Final = (b"content-type", b"application/json")
PROTO: Final = (b"content-type", b"application/protobuf")
# Looked up once: in Python 3.11 each lookup of a member takes as long as a call.
_PLAIN: Final = Compression.NONE
_PROTO: Final = Encoding.PROTO
NO_STORE: Final = (b"cache-control", b"no-store")


class Body(msgspec.Struct, frozen=True, gc=False):
    """A body in the pieces in which it arrived."""

    parts: list[bytes]
    compression: Compression
    encoding: Encoding

    def inflate_light(self) -> bytes | None:
        """What `inflated` returns, if that takes a few milliseconds at most; None otherwise."""
        parts = self.parts
        if len(parts) == 1 and self.compression is _PLAIN and len(parts[0]) <= COPIED_BYTES:
            return parts[0]  # in fewer steps: nearly all are like this
        light = COPIED_BYTES if self.compression is _PLAIN else LIGHT_BYTES
        return self.inflated() if sum(map(len, parts)) <= light else None

    def inflated(self) -> bytes:
        """The body as it was before compression; one that is too large is refused as undecodable."""
        raw = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        if self.compression is _PLAIN:
            return raw
        return inflate_body(raw, self.compression, self.encoding)


def body_too_large(encoding: Encoding, limit: int) -> BadProtoError | BadJsonError:
    """The refusal of a body that `Request.body_parts` did not return: it is called undecodable."""
    refusal = BadProtoError if encoding is _PROTO else BadJsonError
    return refusal(f"the body has more than {limit} bytes: send less at once")


def compression_of(request: Request) -> Compression:
    """How the body is compressed."""
    coding = request.headers.get(b"content-encoding")
    return names.parse_content_encoding(text_of(coding)) if coding else _PLAIN


async def read_json(request: Request) -> bytes:
    """The body of a request that must have one."""
    require_json(request.header("content-type"))
    compression = compression_of(request)
    parts = await request.body_parts(_RESOURCE_MAX)
    if parts is None:
        raise body_too_large(Encoding.JSON, _RESOURCE_MAX)
    body = Body(parts, compression, Encoding.JSON).inflated()
    if len(body) > _RESOURCE_MAX:
        raise BadJsonError(f"the body has more than {_RESOURCE_MAX} bytes: send less")
    return body


async def read_optional_json(request: Request) -> bytes:
    """The body of a request that may omit it: without a content type the body is empty."""
    if request.header("content-type") is None:
        return b""
    return await read_json(request)


def check_plain(request: Request) -> None:
    """Refuse a compressed body where bodies are stored as they come: no reader would learn of it."""
    coding = request.headers.get(b"content-encoding")
    if coding and text_of(coding).strip().lower() != _PLAIN:
        raise BadHeaderError(
            f"content-encoding {text_of(coding)[:40]!r} is not possible here: send the body as "
            "readers are to get it"
        )


def limited_chunks(request: Request, limit: int, rest: str = "") -> AsyncIterator[bytes]:
    """The body as it arrives; TooLargeError as soon as it is known to have more than `limit` bytes.

    `rest` ends its message, with another way to send it.

    RetryLaterError if it needs a file and too many other uploads hold one.
    """
    check_plain(request)
    if (request.declared_size or 0) > limit:
        raise TooLargeError(
            f"the body has {request.declared_size} bytes: send at most {limit}{rest}"
        )
    return _chunks(request, limit, rest)


async def _chunks(request: Request, limit: int, rest: str) -> AsyncIterator[bytes]:
    size = 0
    room = min(request.declared_size or limit, _UPLOAD_ROOM)
    async for chunk in request.chunks(room):
        size += len(chunk)
        if size > limit:
            raise TooLargeError(f"the body has more than {limit} bytes: send less{rest}")
        if size >= WRITE_BUFFER:
            await request.hold_file()
        if chunk:
            yield chunk


async def answer_json(
    request: Request, value: object, status: int = 200, headers: Headers = (NO_STORE,)
) -> None:
    """Answer with `value` as JSON, and to a HEAD without it: over HTTP/2 no lower layer removes it."""
    body = b"" if request.method == "HEAD" else msgspec.json.encode(value)
    await request.respond(status, (JSON, *headers), body)


async def answer(
    request: Request, body: bytes, status: int = 200, headers: Headers = (JSON,)
) -> None:
    """Answer with `body`, compressed if it is long and the client accepts that."""
    if len(body) > COMPRESS_FROM and (accepted := request.header("accept-encoding")):
        body, used = await _compress(request, body, names.parse_accept_encoding(accepted))
        if used is not Compression.NONE:
            headers = (*headers, (b"content-encoding", used.encode()))
        headers = (*headers, (b"vary", b"accept-encoding"))
    await request.respond(status, headers, body)


async def _compress(
    request: Request, body: bytes, compression: Compression
) -> tuple[bytes, Compression]:
    if len(body) <= LIGHT_BYTES or compression is Compression.NONE:
        return compress_if_smaller(body, compression)
    return await request.offload(compress_if_smaller, body, compression)
