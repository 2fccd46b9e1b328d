"""Bodies of requests: whole, or in pieces as they arrive."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final, NamedTuple

from streamfold.blob.local.store import WRITE_BUFFER
from streamfold.errors import TooLargeError
from streamfold.server.http.request import Request
from streamfold.store.durable_streams import APPEND_BYTES_MAX
from streamfold.wire.s2.errors import BadHeaderError

#: Bytes of one snapshot.
SNAPSHOT_MAX: Final = 128 << 20
#: Bytes that a snapshot has in memory on its way to object storage: parts that are sent, and the next.
UPLOAD_ROOM: Final = 32 << 20


class Body(NamedTuple):
    """A whole body in the pieces in which it arrived: to join 32 MiB would hold the event loop."""

    parts: list[bytes]

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))

    def joined(self) -> bytes:
        """All of it; work for a thread if it is large."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


def check_end(request: Request) -> None:
    """Refuse a body that may break off unnoticed: half an append must never be appended."""
    if not request.end_is_certain:
        raise BadHeaderError("content-length is missing: over HTTP/2, declare the size of a body")


async def read_body(request: Request) -> Body:
    """The whole body; TooLargeError if it has more than an append may have."""
    check_end(request)
    parts = await request.body_parts(APPEND_BYTES_MAX)
    if parts is None:
        raise TooLargeError(f"the body has more than {APPEND_BYTES_MAX} bytes: send less at once")
    return Body(parts)


def limited_chunks(request: Request, limit: int) -> AsyncIterator[bytes]:
    """The body as it arrives; TooLargeError as soon as it is known to have more than `limit` bytes.

    UploadsBusyError if it is too large to be written in one step, and too many others are, too.
    """
    check_end(request)
    if (request.declared_size or 0) > limit:
        raise TooLargeError(f"the body has {request.declared_size} bytes: send at most {limit}")
    return _chunks(request, limit)


async def _chunks(request: Request, limit: int) -> AsyncIterator[bytes]:
    size = 0
    room = min(request.declared_size or limit, UPLOAD_ROOM)
    async for chunk in request.chunks(room):
        size += len(chunk)
        if size > limit:
            raise TooLargeError(f"the body has more than {limit} bytes: send less")
        if size >= WRITE_BUFFER:
            await request.hold_file()
        if chunk:
            yield chunk
