"""Streamed uploads through obstore: bounded memory, and no parts left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # exists only in obstore's stubs
    from obstore.store import ObjectStore

#: Bytes per part of a multipart upload. S3 takes 5 MiB to 5 GiB and 10,000 parts, so blobs up to
#: 80 GiB; anything up to one part goes in a single request.
PART_SIZE = 8 * 1024 * 1024
#: Parts in flight at once: bounds an upload's memory to about (this + 2) * PART_SIZE.
PARTS_IN_FLIGHT = 3
#: Seconds that a cancelled upload may take to remove its parts.
ABORT_TIMEOUT = 5.0


class UploadStoppedError(Exception):
    """Raised into obstore to make it abort an upload; never leaves this package."""


class UploadSource:
    """Hands pieces to obstore, can be stopped, and remembers the iterator's own error."""

    def __init__(self, pieces: AsyncIterator[bytes], first: bytes = b"") -> None:
        self.failure: BaseException | None = None
        self._pieces = pieces
        self._first = first
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Raise an error for the next piece, even if it is awaited already."""
        self._stopped.set()

    def __aiter__(self) -> UploadSource:
        return self

    async def __anext__(self) -> bytes:
        if self._first:
            first, self._first = self._first, b""
            return first
        while not (piece := await self._next()):
            pass  # obstore rejects empty pieces
        return piece

    async def _next(self) -> bytes:
        following = asyncio.ensure_future(_step(self._pieces))
        stopped = asyncio.ensure_future(self._stopped.wait())
        await asyncio.wait({following, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if self._stopped.is_set():
            following.cancel()
            await asyncio.wait({following})
            raise UploadStoppedError
        try:
            piece = following.result()
        except BaseException as error:
            self.failure = error
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece


async def read_first_part(pieces: AsyncIterator[bytes]) -> tuple[bytes, bool]:
    """Return at least one part's bytes and False, or all bytes and True."""
    buffer = bytearray()
    async for piece in pieces:
        buffer += piece
        if len(buffer) > PART_SIZE:
            return bytes(buffer), False
    return bytes(buffer), True


async def iterate_parts(data: bytes) -> AsyncIterator[bytes]:
    """Yield `data` in parts."""
    for start in range(0, len(data), PART_SIZE):
        yield data[start : start + PART_SIZE]


async def upload_parts(store: ObjectStore, key: str, source: UploadSource) -> None:
    """Send all of `source`; when this task is cancelled the parts already sent are removed.

    Dropping obstore's future would leave them in the bucket, unseen but paid for. Only an iterator
    that ends in an error makes obstore abort, so that is what a cancelled caller gives it.
    """
    upload = asyncio.ensure_future(
        store.put_async(
            key, source, use_multipart=True, chunk_size=PART_SIZE, max_concurrency=PARTS_IN_FLIGHT
        )
    )
    try:
        await asyncio.shield(upload)
    except asyncio.CancelledError:
        source.stop()
        done, _ = await asyncio.wait({upload}, timeout=ABORT_TIMEOUT)
        if done and not upload.cancelled():
            upload.exception()  # marks it as retrieved
        raise


async def _step(pieces: AsyncIterator[bytes]) -> bytes | None:
    # A task cannot end in StopAsyncIteration, so None marks the end.
    return await anext(pieces, None)
