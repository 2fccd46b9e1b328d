"""Writes through obstore with known outcomes: uploads, put-if-absent, compare-and-swap.

obstore's own retries are off for every request that publishes or deletes a blob, because obstore
does not reveal whether "already exists" is due to another write or to its own first attempt, whose
response was lost. So each conditional write stores an id with the blob. After a rejection, reading
back shows whose write it was, even if both wrote the same bytes.

A swap may also have succeeded and then been replaced. In that case the blob does not show it, and
the outcome is unknown.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Literal, TypeVar

from streamfold.blob.blob_store import BlobChangedError
from streamfold.blob.obstore.requests import (
    OBSTORE_ERRORS,
    FailedRequest,
    FailureKind,
    RequestLimits,
    classify_error,
    send,
    write_error,
)
from streamfold.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobOutcomeUnknownError,
    StorageError,
)

if TYPE_CHECKING:
    from obstore import PutResult, UpdateVersion
    from obstore.store import ObjectStore

#: Bytes per part of a multipart upload. S3 allows 10,000 parts of 5 MiB to 5 GiB, so blobs can
#: reach 80 GiB. Blobs of at most one part take a single request.
PART_SIZE = 8 * 1024 * 1024
#: Concurrent parts, which bound an upload's memory to about (this + 2) * PART_SIZE.
PARTS_IN_FLIGHT = 3
#: Seconds that a cancelled upload may take to remove its parts.
ABORT_TIMEOUT = 5.0
#: Metadata field with the id of the conditional write. Azure allows only identifiers.
WRITE_ID = "streamfoldwriteid"
#: The value that a service compares in a swap: the etag, or on GCS the generation, which obstore
#: calls the version. Callers see either as the etag.
SwapField = Literal["e_tag", "version"]

T = TypeVar("T")


class UploadStoppedError(Exception):
    """Raised into obstore to make it abort an upload. Never leaves this package."""


class UploadSource:
    """Feeds obstore with pieces until stopped, and records the iterator's own error."""

    def __init__(self, pieces: AsyncIterator[bytes], first: bytes = b"") -> None:
        self.failure: BaseException | None = None
        self._pieces = pieces
        self._first = first
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Make the next piece raise, even if it is already awaited."""
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
    """Return more than one part's bytes and False, or all bytes and True."""
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
    """Send all of `source`. If this task is cancelled, remove the parts already sent.

    Dropping obstore's future would leave them in the bucket, invisible but billed. obstore aborts
    an upload only if its iterator raises, so cancellation makes the iterator raise.
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


def new_write_id() -> str:
    """Return an id that no other write has."""
    return uuid.uuid4().hex


class ObjectWriter:
    """Retries writes within `limits`, and reports the exact outcome when giving up.

    `single` sends every request once. `repeating` accesses the same bucket and retries by itself,
    which is safe for reads and upload parts.
    """

    def __init__(
        self,
        name: str,
        repeating: ObjectStore,
        single: ObjectStore,
        limits: RequestLimits,
        swap_field: SwapField,
    ) -> None:
        self._name = name
        self._repeating = repeating
        self._single = single
        self._limits = limits
        self._swap_field = swap_field

    async def put_bytes(self, key: str, data: bytes) -> None:
        """Write `data`, in one request if it fits."""
        if len(data) > PART_SIZE:
            await self._put_parts(key, UploadSource(iterate_parts(data)))
            return
        await self._repeat(key, lambda _: send(self._single.put_async(key, data)))

    async def put_pieces(self, key: str, pieces: AsyncIterator[bytes]) -> None:
        """Write everything that `pieces` yields. Errors of the iterator are raised unchanged."""
        first, complete = await read_first_part(pieces)
        if complete:
            await self.put_bytes(key, first)
        else:
            await self._put_parts(key, UploadSource(pieces, first))

    async def put_if_absent(self, key: str, data: bytes) -> str:
        """Write `data` unless a blob from another write exists."""
        write_id = new_write_id()
        return await self._repeat(
            key, lambda outcome_unknown: self._create(key, data, write_id, outcome_unknown)
        )

    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        """Replace the blob that has `etag`, or one that this call itself wrote."""
        write_id = new_write_id()
        return await self._repeat(
            key, lambda outcome_unknown: self._swap(key, data, etag, write_id, outcome_unknown)
        )

    async def delete(self, key: str) -> None:
        """Delete the blob. Succeeds if it does not exist, even if the service reports an error."""

        async def remove(_: bool) -> FailedRequest | None:
            result = await send(self._single.delete_async(key))
            absent = isinstance(result, FailedRequest) and result.kind is FailureKind.NOT_FOUND
            return None if absent else result

        await self._repeat(key, remove)

    async def _repeat(self, key: str, attempt: Callable[[bool], Awaitable[T | FailedRequest]]) -> T:
        """Retry `attempt` until it succeeds, and return its result.

        `attempt` sends one request. Its argument says whether an earlier one may have succeeded.
        """
        outcome_unknown = False
        pauses = self._limits.pauses()
        while isinstance(result := await attempt(outcome_unknown), FailedRequest):
            outcome_unknown = outcome_unknown or result.kind is FailureKind.OUTCOME_UNKNOWN
            pause = next(pauses, None)
            if pause is None or not result.is_retryable:
                raise write_error(self._name, key, result, outcome_unknown=outcome_unknown)
            await asyncio.sleep(pause)
        return result

    async def _put_parts(self, key: str, source: UploadSource) -> None:
        try:
            await upload_parts(self._repeating, key, source)
            return
        except OBSTORE_ERRORS as error:
            if source.failure is not None:
                raise source.failure from None
            failure = classify_error(error)
        # Nothing is visible before the request that completes the upload. obstore retries that one, so
        # any response, even "no such upload", may hide a success.
        raise write_error(self._name, key, failure, outcome_unknown=not failure.before_completion)

    async def _create(
        self, key: str, data: bytes, write_id: str, outcome_unknown: bool
    ) -> str | FailedRequest:
        request = self._single.put_async(key, data, mode="create", attributes={WRITE_ID: write_id})
        result = await send(request)
        if not isinstance(result, FailedRequest):
            return self._etag_of(key, result)
        if result.kind is not FailureKind.EXISTS:
            return result
        # S3 sends 409 while another conditional write runs, which may yet fail; Azure sends it for
        # "exists". Any other rejection is final unless the outcome of an earlier attempt is
        # unknown.
        if not outcome_unknown and result.status != 409:
            raise self._exists(key)
        stored = await self._find(key)
        if stored is None:
            return self._unless_outcome_unknown(key, result, outcome_unknown)
        if stored[0] != write_id:
            raise self._exists(key)
        return stored[1]

    async def _swap(
        self, key: str, data: bytes, etag: str, write_id: str, outcome_unknown: bool
    ) -> str | FailedRequest:
        condition: UpdateVersion = (
            {"e_tag": etag} if self._swap_field == "e_tag" else {"version": etag}
        )
        request = self._single.put_async(key, data, mode=condition, attributes={WRITE_ID: write_id})
        result = await send(request)
        if not isinstance(result, FailedRequest):
            return self._etag_of(key, result)
        if result.kind is FailureKind.EXISTS:  # 409: another swap is running and may yet fail
            return result
        if result.kind is not FailureKind.CHANGED:
            return result
        return await self._settle_swap(key, write_id, result, outcome_unknown)

    async def _settle_swap(
        self, key: str, write_id: str, failure: FailedRequest, outcome_unknown: bool
    ) -> str | FailedRequest:
        """Return the new etag if the stored blob is ours. Otherwise raise the reason."""
        if failure.status == 404 and not outcome_unknown:
            raise self._gone(key)
        if failure.status == 412 and not outcome_unknown:
            raise self._changed(key)
        stored = await self._find(key)
        if stored is None and not outcome_unknown:
            raise self._gone(key)
        if stored is None or (outcome_unknown and stored[0] != write_id):
            raise BlobOutcomeUnknownError(
                f"blob {key!r} in {self._name} was replaced, by this call or by another one: "
                "read it back before repeating"
            )
        if stored[0] != write_id:
            raise self._changed(key)
        return stored[1]

    async def _find(self, key: str) -> tuple[str | None, str] | None:
        """Return the blob's write id and etag, or None if it was deleted or cannot be read."""
        try:
            head = await self._repeating.get_async(key, options={"head": True})
        except OBSTORE_ERRORS:
            return None
        etag = head.meta[self._swap_field]
        return None if etag is None else (head.attributes.get(WRITE_ID), etag)

    def _unless_outcome_unknown(
        self, key: str, failure: FailedRequest, outcome_unknown: bool
    ) -> FailedRequest:
        if outcome_unknown:
            raise BlobOutcomeUnknownError(
                f"blob {key!r} in {self._name} exists after a repeated attempt and cannot be read "
                "back: it may or may not be from this call; read it before repeating"
            )
        return failure

    def _etag_of(self, key: str, result: PutResult) -> str:
        etag = result[self._swap_field]
        if etag is None:
            raise StorageError(
                f"{self._name} returned no etag for {key!r}, which was written: this service does "
                "not support conditional writes"
            )
        return etag

    def _exists(self, key: str) -> BlobExistsError:
        return BlobExistsError(f"blob {key!r} exists already in {self._name}: it was not replaced")

    def _changed(self, key: str) -> BlobChangedError:
        return BlobChangedError(
            f"blob {key!r} in {self._name} is no longer the one that was read: it was not "
            "replaced; read it again"
        )

    def _gone(self, key: str) -> BlobNotFoundError:
        return BlobNotFoundError(f"blob {key!r} does not exist in {self._name}: not replaced")
