"""One archive destination: its address, its files and its manifest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload
from urllib.parse import unquote, urlsplit

from streamfold.archive.errors import (
    ManifestNotFoundError,
)
from streamfold.archive.manifest.encoding import read_manifest, write_manifest
from streamfold.archive.manifest.model import MANIFEST_KEY, Manifest, with_uris
from streamfold.archive.manifest.positions import PositionOrder
from streamfold.blob import (
    BlobChangedError,
    BlobStore,
    CredentialProvider,
    location_url,
    open_blob_store,
)
from streamfold.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobOutcomeUnknownError,
    StorageError,
    StreamfoldError,
)

#: Errors that storage raises if the condition of a swap does not hold.
SWAP_REFUSED = (BlobChangedError, BlobExistsError, BlobNotFoundError)


def folder_url(text: str) -> str:
    """Return the folder's URL, without a trailing slash."""
    return location_url(text).rstrip("/").removesuffix("/" + MANIFEST_KEY)


def existing_folder(text: str) -> str:
    """Return the folder's URL. Raises if a local folder is missing: reading does not create it."""
    url = folder_url(text)
    folder = local_folder(url)
    if folder is not None and not folder.is_dir():
        raise ManifestNotFoundError(f"folder {folder} does not exist: name the folder of a table")
    return url


def local_folder(uri: str) -> Path | None:
    """Return the path that a file URI names, or None for any other URI."""
    parts = urlsplit(uri)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


#: Prefix of the names that the self-test uses. Garbage collection removes files that a crash
#: leaves.
PROBE = "swap-check-"
#: Racing swaps in the self-test. More than two, because a lucky order could hide a fault.
RACERS = 4
#: Attempts to send a file while the outcome is unknown. Its name is unique, so repeating is safe.
PUT_ATTEMPTS = 2

#: Returns a file's bytes from the start. Called once for each attempt.
Pieces = Callable[[], AsyncIterator[bytes]]


@contextmanager
def name_destination_on_error(uri: str) -> Iterator[None]:
    """Record the failed destination in errors raised in the block, unless they already have one.

    Failure counters use this instead of parsing messages.
    """
    try:
        yield
    except StreamfoldError as error:
        error.destination = error.destination or uri
        raise


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A manifest as stored in one destination."""

    manifest: Manifest
    etag: str


@dataclass(frozen=True, slots=True)
class Destination:
    """A folder in some storage. `uri` is its name for readers and ends in a slash."""

    blobs: BlobStore
    uri: str

    @overload
    @classmethod
    def open(cls, location: str | Path, **options: str) -> Destination: ...
    @overload
    @classmethod
    def open(
        cls,
        location: str | Path,
        *,
        credential_provider: CredentialProvider | None,
        **options: str,
    ) -> Destination: ...
    @classmethod
    def open(cls, location: str | Path, **options: Any) -> Destination:
        """Return a table's folder by its path, or by a URL as in `open_blob_store`."""
        url = location_url(location)
        uri = url.rstrip("/") + "/"
        with name_destination_on_error(uri):
            return cls(open_blob_store(url, **options), uri)

    @property
    def manifest_uri(self) -> str:
        return self.uri + MANIFEST_KEY

    async def read(self, order: PositionOrder | None = None) -> StoredManifest | None:
        """Return the manifest and its etag, or None if there is no manifest yet."""
        with name_destination_on_error(self.uri):
            try:
                data, etag = await self.blobs.get_with_etag(MANIFEST_KEY)
            except BlobNotFoundError:
                return None
            return StoredManifest(read_manifest(data, order), etag)

    async def manifest_etag(self) -> str | None:
        """Return the manifest's etag without reading it, or None if there is no manifest yet."""
        with name_destination_on_error(self.uri):
            try:
                return (await self.blobs.head(MANIFEST_KEY)).etag
            except BlobNotFoundError:
                return None

    async def swap(self, manifest: Manifest, previous: StoredManifest | None) -> StoredManifest:
        """Make `manifest`, with this destination's URIs, current if `previous` still is.

        Raises the same errors as `put_if_match` and `put_if_absent`.
        """
        own = with_uris(manifest, self.uri)
        data = write_manifest(own)
        with name_destination_on_error(self.uri):
            if previous is None:
                return StoredManifest(own, await self.blobs.put_if_absent(MANIFEST_KEY, data))
            return StoredManifest(
                own, await self.blobs.put_if_match(MANIFEST_KEY, data, previous.etag)
            )

    async def put(self, path: str, pieces: Pieces) -> None:
        """Store a file under a name of its own. It is durable when this returns."""
        with name_destination_on_error(self.uri):
            for attempt in range(PUT_ATTEMPTS):
                try:
                    await self.blobs.put(path, pieces())
                    return
                except BlobOutcomeUnknownError:
                    if attempt + 1 == PUT_ATTEMPTS:
                        raise

    async def stream(self, path: str) -> AsyncIterator[bytes]:
        """Yield a file's bytes."""
        with name_destination_on_error(self.uri):
            async for piece in self.blobs.stream(path):
                yield piece

    async def holds(self, path: str, size: int) -> bool:
        """Return whether a file of that size exists."""
        with name_destination_on_error(self.uri):
            try:
                return (await self.blobs.head(path)).size == size
            except BlobNotFoundError:
                return False


async def check_compare_and_swap(destination: Destination, probe_id: str) -> None:
    """Reject storage that ignores write conditions, because two writers would lose data on it.

    Emulators, proxies and gateways have been seen to ignore conditions. `probe_id` must be new.
    """
    blobs, key = destination.blobs, f"{PROBE}{probe_id}"
    with name_destination_on_error(destination.uri):
        try:
            await _check_conditions(destination, key)
        finally:
            await blobs.delete(key)


async def _check_conditions(destination: Destination, key: str) -> None:
    blobs = destination.blobs
    etag = await blobs.put_if_absent(key, b"first")
    if await _accepts(blobs.put_if_absent(key, b"again")):
        raise _swap_is_broken(destination, "wrote over a blob that had to be absent")
    won = await finish_all(
        _accepts(blobs.put_if_match(key, b"%d" % number, etag)) for number in range(RACERS)
    )
    if won.count(True) != 1:
        raise _swap_is_broken(
            destination, f"let {won.count(True)} of {RACERS} racing swaps win, not one"
        )
    if await blobs.get(key) != b"%d" % won.index(True):
        raise _swap_is_broken(destination, "does not hold the bytes of the swap that won")
    if await _accepts(blobs.put_if_match(key, b"stale", etag)):
        raise _swap_is_broken(destination, "accepted an etag that was no longer current")
    _, current = await blobs.get_with_etag(key)
    if not await _accepts(blobs.put_if_match(key, b"last", current)):
        raise _swap_is_broken(destination, "refused the current etag")
    await blobs.delete(key)
    if await _accepts(blobs.put_if_match(key, b"gone", current)):
        raise _swap_is_broken(destination, "swapped a blob that was deleted")


async def _accepts(write: Awaitable[str]) -> bool:
    try:
        await write
    except (BlobChangedError, BlobExistsError, BlobNotFoundError):
        return False
    return True


def _swap_is_broken(destination: Destination, what: str) -> StorageError:
    return StorageError(
        f"destination {destination.uri} {what}: it cannot keep an archive safe; use storage with "
        "conditional writes, or remove the proxy in between",
        code="swap_unsupported",
    )


T = TypeVar("T")


async def finish_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results. All coroutines have ended when this returns or raises the first error.

    A coroutine left running could still write after the caller has moved on.
    """
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
