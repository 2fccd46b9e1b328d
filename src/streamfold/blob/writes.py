"""Writes through obstore that know their outcome.

obstore's own retries stay off for every request that makes a blob visible or gone: it does not
tell whether an "already exists" is about somebody else's blob or about its own first attempt whose
answer was lost. Here each attempt is counted, and a conditional write leaves its id with the blob,
so that reading back tells whose it is even if both wrote the same bytes.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from streamfold.blob.failures import (
    OBSTORE_ERRORS,
    Failure,
    FailureKind,
    read_failure,
    write_error,
)
from streamfold.blob.limits import RequestLimits
from streamfold.blob.uploads import (
    PART_SIZE,
    UploadSource,
    iterate_parts,
    read_first_part,
    upload_parts,
)
from streamfold.errors import BlobExistsError, BlobOutcomeUnknownError

if TYPE_CHECKING:  # exists only in obstore's stubs
    from obstore.store import ObjectStore

#: Metadata field that tells whose conditional write a blob is.
WRITE_ID = "streamfold-write-id"

Sleep = Callable[[float], Awaitable[None]]
#: Sends one request, told whether an earlier attempt may have worked; None means done.
Attempt = Callable[[bool], Awaitable[Failure | None]]


def new_write_id() -> str:
    """Return an id that no other write has."""
    return uuid.uuid4().hex


class ObjectWriter:
    """Repeats writes within `limits` and says exactly what is known when it gives up.

    `single` sends every request once; `repeating` reaches the same bucket and repeats by itself,
    which is right for reads and for parts of an upload.
    """

    def __init__(
        self,
        name: str,
        *,
        repeating: ObjectStore,
        single: ObjectStore,
        limits: RequestLimits,
        sleep: Sleep = asyncio.sleep,
        new_write_id: Callable[[], str] = new_write_id,
    ) -> None:
        self._name = name
        self._repeating = repeating
        self._single = single
        self._limits = limits
        self._sleep = sleep
        self._new_write_id = new_write_id

    async def put_bytes(self, key: str, data: bytes) -> None:
        """Write `data`, in one request if it fits."""
        if len(data) > PART_SIZE:
            await self._put_parts(key, UploadSource(iterate_parts(data)))
            return
        await self._repeat(key, lambda _: _failure_of(self._single.put_async(key, data)))

    async def put_pieces(self, key: str, pieces: AsyncIterator[bytes]) -> None:
        """Write what `pieces` yields; its own errors come out unchanged."""
        first, complete = await read_first_part(pieces)
        if complete:
            await self.put_bytes(key, first)
        else:
            await self._put_parts(key, UploadSource(pieces, first))

    async def put_if_absent(self, key: str, data: bytes) -> None:
        """Write `data` unless a blob is there that this call did not write."""
        write_id = self._new_write_id()
        await self._repeat(key, lambda doubtful: self._create(key, data, write_id, doubtful))

    async def delete(self, key: str) -> None:
        """Remove the blob; some services call an absent one an error."""

        async def send(_: bool) -> Failure | None:
            failure = await _failure_of(self._single.delete_async(key))
            absent = failure is not None and failure.kind is FailureKind.NOT_FOUND
            return None if absent else failure

        await self._repeat(key, send)

    async def _repeat(self, key: str, attempt: Attempt) -> None:
        doubtful = False
        pauses = self._limits.pauses()
        while failure := await attempt(doubtful):
            doubtful = doubtful or failure.kind is FailureKind.DOUBTFUL
            pause = next(pauses, None)
            if pause is None or not failure.worth_repeating:
                raise write_error(self._name, key, failure, doubtful=doubtful)
            await self._sleep(pause)

    async def _create(self, key: str, data: bytes, write_id: str, doubtful: bool) -> Failure | None:
        created = self._single.put_async(key, data, mode="create", attributes={WRITE_ID: write_id})
        failure = await _failure_of(created)
        if failure is None or failure.kind is not FailureKind.EXISTS:
            return failure
        # 409 is S3's word for "another conditional write is on its way", which may yet fail, and
        # Azure's for "exists"; any other refusal is plain unless an attempt of ours is in doubt.
        if not doubtful and failure.status != 409:
            raise self._exists(key)
        return await self._settle(key, write_id, failure, doubtful)

    async def _settle(
        self, key: str, write_id: str, failure: Failure, doubtful: bool
    ) -> Failure | None:
        """Find out whose blob is there: None if it is ours."""
        try:
            found = await self._repeating.get_async(key, options={"head": True})
        except OBSTORE_ERRORS:
            # Gone again, or storage does not answer.
            if doubtful:
                raise BlobOutcomeUnknownError(
                    f"blob {key!r} in {self._name} was there when an attempt was repeated and "
                    "could not be read back: it may or may not be from this call"
                ) from None
            return failure
        if found.attributes.get(WRITE_ID) != write_id:
            raise self._exists(key)
        return None

    async def _put_parts(self, key: str, source: UploadSource) -> None:
        try:
            await upload_parts(self._repeating, key, source)
            return
        except OBSTORE_ERRORS as error:
            if source.failure is not None:
                raise source.failure from None
            failure = read_failure(error)
        # Nothing is visible before the request that completes the upload; that one was repeated
        # by obstore, so any answer to it, also "no such upload", may hide a success.
        raise write_error(self._name, key, failure, doubtful=not failure.before_completion)

    def _exists(self, key: str) -> BlobExistsError:
        return BlobExistsError(f"blob {key!r} exists already in {self._name}: it was not replaced")


async def _failure_of(request: Awaitable[object]) -> Failure | None:
    try:
        await request
    except OBSTORE_ERRORS as error:
        return read_failure(error)
    return None
