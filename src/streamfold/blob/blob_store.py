"""The object storage interface: what every backend guarantees.

To add a backend, subclass `BlobStore` and run `streamfold.testing.BlobStoreConformance`.

Errors, the same for all backends:

- `InvalidError`: the key, prefix or range breaks a rule. Storage was not asked.
- `BlobNotFoundError`, `BlobExistsError`, `BlobChangedError`: storage's answer about the key.
- `BlobUnavailableError`: storage did not answer or refused. A write certainly had no effect.
- `BlobOutcomeUnknownError`: a write may or may not have taken effect. Read back before repeating.

Every backend supports these keys, so they can move between backends:

    key      = segment *( "/" segment )         at most KEY_MAX bytes
    segment  = 1 to SEGMENT_MAX bytes of UTF-8, not "." or "..", no control characters
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime

from streamfold.errors import ConflictError, InvalidError

#: Maximum bytes of UTF-8. S3 allows 1,024 for the store's prefix and the key together.
KEY_MAX = 900
#: Maximum bytes of UTF-8, as for file names on common file systems.
SEGMENT_MAX = 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
#: Bytes per piece of a streamed read: a compromise between requests and memory.
DEFAULT_CHUNK_SIZE = 8 * 1024 * 1024


def check_key(key: str) -> None:
    """Reject a key that could escape the store's root, or that some backend cannot hold."""
    _check_text(key, "blob key")
    for segment in key.split("/"):
        _check_segment(key, segment, "blob key")


def check_prefix(prefix: str) -> None:
    """Reject a prefix that no key can start with. The empty prefix matches all."""
    if not prefix:
        return
    _check_text(prefix, "blob prefix")
    *folders, last = prefix.split("/")
    for segment in folders:
        _check_segment(prefix, segment, "blob prefix")
    # The last segment may be incomplete: "a/." is a prefix of "a/.hidden".
    if last not in ("", ".", ".."):
        _check_segment(prefix, last, "blob prefix")


def check_range(key: str, start: int, length: int) -> None:
    """Reject a range with a negative start or length."""
    if start < 0 or length < 0:
        raise InvalidError(
            f"range of blob {key!r} has start {start} and length {length}: neither may be negative"
        )


def check_chunk_size(chunk_size: int) -> None:
    """Reject a chunk size below 1, with which a read would never end."""
    if chunk_size < 1:
        raise InvalidError(f"chunk_size {chunk_size} must be at least 1 byte")


def _check_text(text: str, what: str) -> None:
    if _CONTROL.search(text):
        raise InvalidError(f"{what} {text!r} contains a control character: remove it")
    if _size(text, what, text) > KEY_MAX:
        raise InvalidError(f"{what} {text[:80]!r}... has more than {KEY_MAX} bytes: shorten it")


def _check_segment(text: str, segment: str, what: str) -> None:
    if segment in ("", ".", ".."):
        raise InvalidError(
            f"{what} {text!r} has a segment {segment!r}: segments between slashes may not be "
            "empty, '.' or '..', and keys do not begin or end with a slash"
        )
    if _size(segment, what, text) > SEGMENT_MAX:
        raise InvalidError(
            f"{what} {text[:80]!r}... has a segment of more than {SEGMENT_MAX} bytes: split it"
        )


def _size(part: str, what: str, text: str) -> int:
    try:
        return len(part.encode())
    except UnicodeEncodeError:
        raise InvalidError(
            f"{what} {text!r} cannot be written as UTF-8: remove lone surrogates"
        ) from None


class BlobChangedError(ConflictError):
    """Another write replaced the blob since it was read."""

    code = "blob_changed"
    public_message = "storage holds something newer: nothing was changed; read it again"


@dataclass(frozen=True, slots=True)
class BlobMeta:
    """Metadata of a blob. `etag` changes whenever the bytes do."""

    key: str
    size: int
    etag: str | None
    last_modified: datetime


class BlobStore(ABC):
    """Stores whole blobs under keys.

    Safe to share between tasks, and between processes and hosts if the storage is shared. Keys are
    `/`-separated: see `streamfold.blob.blob_store` for the rules. A backend on a file system cannot
    hold both `a` and `a/b`, so portable callers never use one key as the folder of another.
    """

    @abstractmethod
    async def put(self, key: str, data: bytes | AsyncIterator[bytes]) -> None:
        """Write or replace the blob durably and atomically.

        Once this returns, the bytes survive a power cut. Readers see the old blob or the new one,
        never a part. An iterator is sent as it is read, in bounded memory. Its errors are raised
        unchanged, and nothing is written.
        """

    @abstractmethod
    async def put_if_absent(self, key: str, data: bytes) -> str:
        """Write the blob durably only if none exists, and return its etag.

        Of any number of racing callers, in one process or many, at most one succeeds. Raises
        `BlobExistsError` if a blob exists, even with the same bytes. If a response is lost, the
        backend finds out whose write succeeded before it answers.
        """

    @abstractmethod
    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        """Replace the blob durably only if its etag is `etag`, and return the new etag.

        Of any number of racing callers with one etag, in one process or many, at most one succeeds.
        Raises `BlobChangedError` if the blob was replaced, `BlobNotFoundError` if it does not exist.
        An etag may depend on the bytes alone, so callers must never repeat bytes, and must write such
        a blob by conditional calls only.
        """

    @abstractmethod
    async def get_with_etag(self, key: str) -> tuple[bytes, str]:
        """Return the whole blob with its etag for `put_if_match`.

        The blob is durable once this returns, so a power cut cannot undo what the caller relies on.
        """

    @abstractmethod
    async def get(self, key: str) -> bytes:
        """Return the whole blob in memory. `stream` uses less."""

    @abstractmethod
    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return `blob[start : start + length]`, shorter or empty past the end."""

    @abstractmethod
    def stream(self, key: str, chunk_size: int = DEFAULT_CHUNK_SIZE) -> AsyncIterator[bytes]:
        """Yield the blob in pieces of `chunk_size` bytes, the last one shorter.

        All pieces are of one version. If the blob is replaced during the read, the old version
        continues, or the stream raises `BlobUnavailableError`.
        """

    @abstractmethod
    async def head(self, key: str) -> BlobMeta:
        """Return the blob's metadata without reading it."""

    @abstractmethod
    def list(self, prefix: str = "") -> AsyncIterator[BlobMeta]:
        """Yield all blobs whose keys start with `prefix`, in UTF-8 byte order of keys.

        The prefix is text, not a folder: `a` matches `a`, `ab` and `a/b`. Blobs written or deleted
        during the listing may or may not be included.
        """

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Delete the blob durably. Succeeds if it does not exist."""
