"""Conditional writes through obstore: put-if-absent and compare-and-swap.

A refusal may be due to this call's own first attempt, whose answer was lost. So each write stores its
id with the blob, and reading back shows whose it is, even if both wrote the same bytes.

A swap has one case more: ours may have worked and been replaced since. Then the blob does not show it,
and the outcome is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from streamfold.blob.blob_store import BlobChangedError
from streamfold.blob.obstore.errors_from_obstore import OBSTORE_ERRORS, FailedRequest, FailureKind
from streamfold.blob.obstore.retries import WriteRetries, send
from streamfold.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobOutcomeUnknownError,
    StorageError,
)

if TYPE_CHECKING:  # exist only in obstore's stubs
    from obstore import PutResult, UpdateVersion
    from obstore.store import ObjectStore

#: Metadata field with the id of the conditional write; Azure takes only identifiers.
WRITE_ID = "streamfoldwriteid"

#: What a service compares in a swap: the etag, or on GCS the generation, which obstore calls
#: the version. Callers of a blob store see either as the etag.
SwapField = Literal["e_tag", "version"]


class ConditionalWriter:
    """Writes that happen only if a condition holds; `single` sends every request once."""

    def __init__(
        self,
        name: str,
        attempts: WriteRetries,
        *,
        repeating: ObjectStore,
        single: ObjectStore,
        new_write_id: Callable[[], str],
        swap_field: SwapField,
    ) -> None:
        self._name = name
        self._attempts = attempts
        self._repeating = repeating
        self._single = single
        self._new_write_id = new_write_id
        self._swap_field = swap_field

    async def put_if_absent(self, key: str, data: bytes) -> str:
        """Write `data` unless a blob exists that this call did not write."""
        write_id = self._new_write_id()
        return await self._attempts.repeat(
            key, lambda doubtful: self._create(key, data, write_id, doubtful)
        )

    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        """Write `data` over the blob with `etag`, or over one that this call wrote."""
        write_id = self._new_write_id()
        return await self._attempts.repeat(
            key, lambda doubtful: self._swap(key, data, etag, write_id, doubtful)
        )

    async def _create(
        self, key: str, data: bytes, write_id: str, doubtful: bool
    ) -> str | FailedRequest:
        request = self._single.put_async(key, data, mode="create", attributes={WRITE_ID: write_id})
        result = await send(request)
        if not isinstance(result, FailedRequest):
            return self._etag_of(key, result)
        if result.kind is not FailureKind.EXISTS:
            return result
        # S3 sends 409 while another conditional write runs, which may yet fail, and Azure for
        # "exists"; any other refusal is final unless the outcome of an earlier attempt is unknown.
        if not doubtful and result.status != 409:
            raise self._exists(key)
        found = await self._find(key)
        if found is None:
            return self._unless_outcome_unknown(key, result, doubtful)
        if found[0] != write_id:
            raise self._exists(key)
        return found[1]

    async def _swap(
        self, key: str, data: bytes, etag: str, write_id: str, doubtful: bool
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
        return await self._settle_swap(key, write_id, result, doubtful)

    async def _settle_swap(
        self, key: str, write_id: str, failure: FailedRequest, doubtful: bool
    ) -> str | FailedRequest:
        """Return the new etag if the stored blob is ours; raise why if it is not."""
        if failure.status == 404 and not doubtful:
            raise self._gone(key)
        if failure.status == 412 and not doubtful:
            raise self._changed(key)
        found = await self._find(key)
        if found is None and not doubtful:
            raise self._gone(key)
        if found is None or (doubtful and found[0] != write_id):
            raise BlobOutcomeUnknownError(
                f"blob {key!r} in {self._name} was replaced, by this call or by another one: "
                "read it back before repeating"
            )
        if found[0] != write_id:
            raise self._changed(key)
        return found[1]

    async def _find(self, key: str) -> tuple[str | None, str] | None:
        """Return the blob's write id and etag; None if it was deleted or cannot be read."""
        try:
            found = await self._repeating.get_async(key, options={"head": True})
        except OBSTORE_ERRORS:
            return None
        etag = found.meta[self._swap_field]
        return None if etag is None else (found.attributes.get(WRITE_ID), etag)

    def _unless_outcome_unknown(
        self, key: str, failure: FailedRequest, doubtful: bool
    ) -> FailedRequest:
        if doubtful:
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
