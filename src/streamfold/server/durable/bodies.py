"""Bodies of requests: how much of them is held in memory at once, over all requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from streamfold.errors import TooLargeError
from streamfold.server.http import Request
from streamfold.store.admission import Admission
from streamfold.store.durable import APPEND_BYTES_MAX
from streamfold.wire.s2.failures import BadHeaderError

#: Bytes of bodies in memory, over all requests.
BODIES_MAX: Final = 256 << 20
#: Bytes of one snapshot.
SNAPSHOT_MAX: Final = 128 << 20


def check_end(request: Request) -> None:
    """Refuse a body that may break off unnoticed: half an append must never be appended."""
    if not request.end_is_certain:
        raise BadHeaderError("content-length is missing: over HTTP/2, declare the size of a body")


class Bodies:
    """Reads bodies, as many at once as memory may hold."""

    def __init__(self) -> None:
        self._room = Admission(BODIES_MAX)

    async def read(self, request: Request) -> bytes:
        """The whole body; TooLargeError if it has more than an append may have."""
        check_end(request)
        size = request.declared_size
        reserved = APPEND_BYTES_MAX if size is None else min(size, APPEND_BYTES_MAX)
        await self._room.acquire(reserved)
        try:
            body = await request.body(APPEND_BYTES_MAX)
        finally:
            self._room.release(reserved)
        if body is None:
            raise TooLargeError(
                f"the body has more than {APPEND_BYTES_MAX} bytes: send less at once"
            )
        return body


async def limited_chunks(request: Request, limit: int) -> AsyncIterator[bytes]:
    """The body as it arrives; TooLargeError as soon as it has more than `limit` bytes."""
    check_end(request)
    if (request.declared_size or 0) > limit:
        raise TooLargeError(f"the body has {request.declared_size} bytes: send at most {limit}")
    size = 0
    async for chunk in request.chunks():
        size += len(chunk)
        if size > limit:
            raise TooLargeError(f"the body has more than {limit} bytes: send less")
        if chunk:
            yield chunk
