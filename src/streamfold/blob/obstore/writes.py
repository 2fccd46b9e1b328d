"""Writes through obstore that know their outcome.

obstore's own retries stay off for every request that publishes or deletes a blob: it does not report
whether "already exists" is due to another blob or to its own first attempt, whose answer was lost.
Here each attempt is counted, and `conditional_writes` finds out whose write caused a refusal.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from streamfold.blob.obstore.conditional_writes import ConditionalWriter, SwapField
from streamfold.blob.obstore.errors_from_obstore import (
    OBSTORE_ERRORS,
    FailedRequest,
    FailureKind,
    classify_error,
    write_error,
)
from streamfold.blob.obstore.retries import RequestLimits, Sleep, WriteRetries, send
from streamfold.blob.obstore.uploads import (
    PART_SIZE,
    UploadSource,
    iterate_parts,
    read_first_part,
    upload_parts,
)

if TYPE_CHECKING:  # exists only in obstore's stubs
    from obstore.store import ObjectStore


def new_write_id() -> str:
    """Return an id that no other write has."""
    return uuid.uuid4().hex


class ObjectWriter:
    """Retries writes within `limits`, and reports exactly what is known when it gives up.

    `single` sends every request once; `repeating` reaches the same bucket and retries on its own,
    which is safe for reads and for parts of an upload.
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
        swap_field: SwapField = "e_tag",
    ) -> None:
        self._name = name
        self._repeating = repeating
        self._single = single
        self._attempts = WriteRetries(name, limits, sleep)
        self.conditional = ConditionalWriter(
            name,
            self._attempts,
            repeating=repeating,
            single=single,
            new_write_id=new_write_id,
            swap_field=swap_field,
        )

    async def put_bytes(self, key: str, data: bytes) -> None:
        """Write `data`, in one request if it fits."""
        if len(data) > PART_SIZE:
            await self._put_parts(key, UploadSource(iterate_parts(data)))
            return
        await self._attempts.repeat(key, lambda _: send(self._single.put_async(key, data)))

    async def put_pieces(self, key: str, pieces: AsyncIterator[bytes]) -> None:
        """Write what `pieces` yields; its own errors are raised unchanged."""
        first, complete = await read_first_part(pieces)
        if complete:
            await self.put_bytes(key, first)
        else:
            await self._put_parts(key, UploadSource(pieces, first))

    async def delete(self, key: str) -> None:
        """Delete the blob; a missing one is not an error, although some services say so."""

        async def remove(_: bool) -> FailedRequest | None:
            result = await send(self._single.delete_async(key))
            absent = isinstance(result, FailedRequest) and result.kind is FailureKind.NOT_FOUND
            return None if absent else result

        await self._attempts.repeat(key, remove)

    async def _put_parts(self, key: str, source: UploadSource) -> None:
        try:
            await upload_parts(self._repeating, key, source)
            return
        except OBSTORE_ERRORS as error:
            if source.failure is not None:
                raise source.failure from None
            failure = classify_error(error)
        # Nothing is visible before the request that completes the upload; obstore retried that
        # one, so any answer to it, even "no such upload", may hide a success.
        raise write_error(self._name, key, failure, doubtful=not failure.before_completion)
