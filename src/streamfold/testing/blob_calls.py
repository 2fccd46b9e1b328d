"""Every call of a blob store by name, and inputs for them, for tables in tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

from streamfold.blob import BlobStore

BAD_KEYS = ["", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a\0b", "a\nb"]
BAD_KEYS += ["a\x7f", "\ud800", "x" * 256, "/".join(["x" * 200] * 5)]
BAD_PREFIXES = ["/", "/a", "a//", "../", "a/../b", "a\0"]

#: Bytes; more than one part of any service's multipart upload.
SEVERAL_PARTS = 20 * 1024 * 1024 + 7

#: An etag that no blob has.
STALE = '"stale"'

Call = Callable[[BlobStore, str], Coroutine[Any, Any, object]]

CALLS: dict[str, Call] = {
    "put": lambda store, key: store.put(key, b"x"),
    "put_if_absent": lambda store, key: store.put_if_absent(key, b"x"),
    "put_if_match": lambda store, key: store.put_if_match(key, b"x", STALE),
    "get": lambda store, key: store.get(key),
    "get_with_etag": lambda store, key: store.get_with_etag(key),
    "get_range": lambda store, key: store.get_range(key, 0, 1),
    "stream": lambda store, key: collect(store.stream(key)),
    "head": lambda store, key: store.head(key),
    "delete": lambda store, key: store.delete(key),
}
READS = ["get", "get_with_etag", "get_range", "stream", "head"]


async def pieces_of(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield `pieces` as an upload gets them."""
    for piece in pieces:
        yield piece


async def swap(store: BlobStore, key: str, data: bytes = b"x") -> str:
    """Replace the current blob."""
    _, etag = await store.get_with_etag(key)
    return await store.put_if_match(key, data, etag)


async def collect(stream: AsyncIterator[bytes]) -> bytes:
    """Return all that `stream` yields."""
    return b"".join([piece async for piece in stream])


async def keys_of(store: BlobStore, prefix: str = "") -> list[str]:
    """Return the keys that `store` lists, in its order."""
    return [meta.key async for meta in store.list(prefix)]
