"""The blob store for everything that obstore supports: memory, S3-compatible services, GCS, Azure."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING, TypeVar

from streamfold.blob.blob_store import (
    DEFAULT_CHUNK_SIZE,
    BlobMeta,
    BlobStore,
    check_chunk_size,
    check_key,
    check_prefix,
    check_range,
)
from streamfold.blob.obstore.requests import (
    OBSTORE_ERRORS,
    FailureKind,
    RequestLimits,
    classify_error,
    read_error,
)
from streamfold.blob.obstore.writes import ObjectWriter, SwapField
from streamfold.errors import BlobNotFoundError, StorageError

if TYPE_CHECKING:  # these exist only in obstore's stubs
    from obstore import GetOptions, ObjectMeta
    from obstore.store import ObjectStore

T = TypeVar("T")

#: Entries per step of a listing: as many as S3 and GCS return per request.
LIST_PAGE = 1000


class ObstoreBlobStore(BlobStore):
    """Stores blobs through obstore, with as many guarantees of `BlobStore` as the service gives.

    S3 and GCS list in byte order. S3 directory buckets and Azure accounts with a hierarchical
    namespace do not: `list` stops with `StorageError` at the first key out of order. `name` is the
    store's name in messages. `repeating` retries failed requests, `single` sends each once; both
    reach the same bucket and prefix. `swap_field` is the field that the service compares.
    """

    def __init__(
        self,
        name: str,
        *,
        repeating: ObjectStore,
        single: ObjectStore,
        limits: RequestLimits,
        swap_field: SwapField = "e_tag",
    ) -> None:
        self._name = name
        self._client = repeating
        self._swap_field = swap_field
        self._writer = ObjectWriter(name, repeating, single, limits, swap_field)

    def __repr__(self) -> str:
        return f"ObstoreBlobStore({self._name!r})"

    async def put(self, key: str, data: bytes | AsyncIterator[bytes]) -> None:
        check_key(key)
        if isinstance(data, bytes):
            await self._writer.put_bytes(key, data)
        else:
            await self._writer.put_pieces(key, data)

    async def put_if_absent(self, key: str, data: bytes) -> str:
        check_key(key)
        return await self._writer.put_if_absent(key, data)

    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        check_key(key)
        return await self._writer.put_if_match(key, data, etag)

    async def get_with_etag(self, key: str) -> tuple[bytes, str]:
        check_key(key)
        data, etag = await self._read(key, self._fetch_version(key))
        if etag is None:
            raise StorageError(f"{self._name} gives no etag for {key!r}: it cannot be swapped")
        return data, etag

    async def get(self, key: str) -> bytes:
        check_key(key)
        return await self._read(key, self._fetch(key))

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        check_key(key)
        check_range(key, start, length)
        if length == 0:  # obstore rejects it without checking that the blob exists
            await self.head(key)
            return b""
        try:
            return bytes(await self._client.get_range_async(key, start=start, length=length))
        except OBSTORE_ERRORS as error:
            failure = classify_error(error)
        if failure.kind is FailureKind.BEYOND_END:
            return b""
        raise read_error(self._name, key, failure)

    async def stream(self, key: str, chunk_size: int = DEFAULT_CHUNK_SIZE) -> AsyncIterator[bytes]:
        # One ranged request per piece, not one long response: then a slow consumer cannot run into
        # the request timeout, and a broken connection costs one piece.
        check_chunk_size(chunk_size)
        meta = await self.head(key)
        for start in range(0, meta.size, chunk_size):
            span = (start, min(start + chunk_size, meta.size))
            yield await self._read(key, self._fetch(key, {"range": span, "if_match": meta.etag}))

    async def head(self, key: str) -> BlobMeta:
        check_key(key)
        return _to_meta(await self._read(key, self._client.head_async(key)))

    async def list(self, prefix: str = "") -> AsyncIterator[BlobMeta]:
        check_prefix(prefix)
        folder, _, begun = prefix.rpartition("/")
        # obstore accepts only prefixes of whole segments, and starts after the offset. So a blob
        # whose key is exactly the prefix needs a separate request.
        offset = prefix if begun not in ("", ".", "..") else None
        if offset:
            exact = await self._find(offset)
            if exact:
                yield exact
        async for meta in self._list_folder(folder, offset):
            if meta.key.startswith(prefix):
                yield meta
            elif meta.key > prefix:
                return

    async def delete(self, key: str) -> None:
        check_key(key)
        await self._writer.delete(key)

    async def _find(self, key: str) -> BlobMeta | None:
        try:
            return await self.head(key)
        except BlobNotFoundError:
            return None

    async def _list_folder(self, folder: str, offset: str | None) -> AsyncIterator[BlobMeta]:
        pages = self._client.list(folder or None, offset=offset, chunk_size=LIST_PAGE)
        previous = ""
        while page := await self._read(folder, anext(pages, None)):
            for entry in page:
                meta = _to_meta(entry)
                if meta.key <= previous:
                    raise StorageError(
                        f"{self._name} lists {meta.key!r} after {previous!r}, out of byte order, "
                        "as S3 directory buckets do: use a general purpose bucket"
                    )
                previous = meta.key
                yield meta

    async def _fetch_version(self, key: str) -> tuple[bytes, str | None]:
        result = await self._client.get_async(key)
        return bytes(await result.bytes_async()), result.meta[self._swap_field]

    async def _fetch(self, key: str, options: GetOptions | None = None) -> bytes:
        result = await self._client.get_async(key, options=options)
        return bytes(await result.bytes_async())

    async def _read(self, key: str, request: Awaitable[T]) -> T:
        try:
            return await request
        except OBSTORE_ERRORS as error:
            failure = classify_error(error)
        raise read_error(self._name, key, failure)


def _to_meta(entry: ObjectMeta) -> BlobMeta:
    return BlobMeta(entry["path"], entry["size"], entry["e_tag"], entry["last_modified"])
