"""Bodies of requests in, and answers out, as every route of S2 has them."""

from __future__ import annotations

import asyncio
from typing import Final

from streamfold.server.http import Headers, Request, text_of
from streamfold.wire.compression import COMPRESS_FROM, Compression, compress_if_smaller
from streamfold.wire.s2 import headers as names
from streamfold.wire.s2.failures import BadHeaderError, BadJsonError, BadProtoError
from streamfold.wire.s2.negotiation import BODY_MAX, Encoding, inflate_body, require_json

#: Bytes from which a (de)compression is given to a thread: below, the way there takes longer.
THREAD_FROM: Final = 64 << 10

JSON: Final = (b"content-type", b"application/json")
PROTO: Final = (b"content-type", b"application/protobuf")


async def read_body(request: Request, encoding: Encoding) -> bytes:
    """The body as it was before compression; one that is too large is refused as undecodable."""
    if encoding is Encoding.PROTO and not request.end_is_certain:
        # JSON that breaks off does not parse; protobuf may, and half a batch would be appended.
        raise BadHeaderError("content-length is missing: declare the size of a protobuf body")
    compression = Compression.NONE
    if coding := request.headers.get(b"content-encoding"):
        compression = names.parse_content_encoding(text_of(coding))
    body = await request.body(BODY_MAX)
    if body is None:
        refusal = BadProtoError if encoding is Encoding.PROTO else BadJsonError
        raise refusal(f"the body has more than {BODY_MAX} bytes: send less at once")
    if compression is Compression.NONE:
        return body
    if len(body) < THREAD_FROM:
        return inflate_body(body, compression, encoding)
    return await asyncio.to_thread(inflate_body, body, compression, encoding)


async def read_json(request: Request) -> bytes:
    """The body of a request that must have one."""
    require_json(request.header("content-type"))
    return await read_body(request, Encoding.JSON)


async def read_optional_json(request: Request) -> bytes:
    """The body of a request that may do without: no content type, no body."""
    if request.header("content-type") is None:
        return b""
    return await read_json(request)


async def answer(
    request: Request, body: bytes, status: int = 200, headers: Headers = (JSON,)
) -> None:
    """Answer with `body`, compressed if it is long and the client understands that."""
    if len(body) > COMPRESS_FROM and (accepted := request.header("accept-encoding")):
        body, used = await _compress(body, names.parse_accept_encoding(accepted))
        if used is not Compression.NONE:
            headers = (*headers, (b"content-encoding", used.encode()))
        headers = (*headers, (b"vary", b"accept-encoding"))
    await request.respond(status, headers, body)


async def _compress(body: bytes, compression: Compression) -> tuple[bytes, Compression]:
    if len(body) < THREAD_FROM:
        return compress_if_smaller(body, compression)
    return await asyncio.to_thread(compress_if_smaller, body, compression)
