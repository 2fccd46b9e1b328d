"""The seam to object storage: what every backend guarantees.

A backend of your own subclasses `BlobStore` and runs `streamfold.testing.BlobStoreConformance`.

Errors, the same for all backends:

- `InvalidError`: the key, prefix or range breaks a rule; nothing was asked of storage.
- `BlobNotFoundError`, `BlobExistsError`, `BlobChangedError`: what storage said about that key.
- `BlobUnavailableError`: storage did not answer or refused; a write certainly had no effect.
- `BlobOutcomeUnknownError`: a write may or may not have had its effect; read back before repeating.

Every backend can keep the rules of a key, so that keys move between them:

    key      = segment *( "/" segment )         at most KEY_MAX bytes
    segment  = 1 to SEGMENT_MAX bytes of UTF-8, not "." or "..", no control characters
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime

from streamfold.errors import ConflictError, InvalidError

#: Bytes of UTF-8. S3 takes 1,024 for the store's prefix and the key together.
KEY_MAX = 900
#: Bytes of UTF-8: the longest file name that common file systems take.
SEGMENT_MAX = 255
#: Bytes per piece of a streamed read: few enough requests, little enough memory.
DEFAULT_CHUNK_SIZE = 8 * 1024 * 1024


def check_key(key: str) -> None:
    """Refuse a key that could leave the store's root or that some backend cannot hold."""
    _check_text(key, "blob key")
    for segment in key.split("/"):
        _check_segment(key, segment, "blob key")


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that no key can start with; the empty one matches all."""
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
    """Refuse a range that counts from the end or backwards."""
    if start < 0 or length < 0:
        raise InvalidError(
            f"range of blob {key!r} has start {start} and length {length}: neither may be negative"
        )


def check_chunk_size(chunk_size: int) -> None:
    """Refuse empty pieces, which would never end."""
    if chunk_size < 1:
        raise InvalidError(f"chunk_size {chunk_size} must be at least 1 byte")


def _check_text(text: str, what: str) -> None:
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in text):
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
    """Another write came in between: the blob is not the one that was read."""

    code = "blob_changed"
    public_message = "storage holds something newer: nothing was changed; read it again"


@dataclass(frozen=True, slots=True)
class BlobMeta:
    """What storage says about one blob; `etag` changes whenever the bytes do."""

    key: str
    size: int
    etag: str | None
    last_modified: datetime


class BlobStore(ABC):
    """Whole blobs under keys; safe to share between tasks, and between processes and hosts
    wherever the storage itself is shared.

    Keys are `/`-separated: see `streamfold.blob.blob_store` for the rules. A backend on a file system
    cannot hold both `a` and `a/b`, so portable callers do not use a key as another one's folder.
    """

    @abstractmethod
    async def put(self, key: str, data: bytes | AsyncIterator[bytes]) -> None:
        """Write the blob durably, whole or not at all, replacing an existing one.

        When it returns, the bytes survive a power cut. Readers see the old blob or the new one,
        never a part. An iterator is sent as it comes, in bounded memory; when it raises, that
        error comes out unchanged and nothing was written.
        """

    @abstractmethod
    async def put_if_absent(self, key: str, data: bytes) -> str:
        """Write the blob durably only if none exists, and return its etag; of any number of
        racing callers, in one process or many, at most one succeeds.

        Raises `BlobExistsError` when a blob exists already, even one with the same bytes.
        A backend that loses an answer finds out whose write it was before it says so.
        """

    @abstractmethod
    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        """Replace the blob durably only if its etag is `etag`, and return the new one; of any
        number of racing callers with one etag, in one process or many, at most one succeeds.

        Raises `BlobChangedError` when the blob was replaced meanwhile, `BlobNotFoundError` when
        there is none. An etag may depend on the bytes alone, so the caller must never repeat bytes,
        and must write such a blob by conditional calls only.
        """

    @abstractmethod
    async def get_with_etag(self, key: str) -> tuple[bytes, str]:
        """Return the whole blob, and the etag of just these bytes for `put_if_match`.

        The blob is durable when this returns, so a power cut cannot undo what the caller builds on.
        """

    @abstractmethod
    async def get(self, key: str) -> bytes:
        """Return the whole blob, held in memory at once: `stream` does not."""

    @abstractmethod
    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return `blob[start : start + length]`: shorter, or empty, past the end."""

    @abstractmethod
    def stream(self, key: str, chunk_size: int = DEFAULT_CHUNK_SIZE) -> AsyncIterator[bytes]:
        """Yield the blob in pieces of `chunk_size` bytes, the last one shorter.

        All pieces are of one version: if the blob is replaced meanwhile, the old one continues, or
        the stream ends with `BlobUnavailableError`.
        """

    @abstractmethod
    async def head(self, key: str) -> BlobMeta:
        """Return what storage knows about the blob without reading it."""

    @abstractmethod
    def list(self, prefix: str = "") -> AsyncIterator[BlobMeta]:
        """Yield every blob whose key starts with `prefix`, by UTF-8 byte order of the keys.

        The prefix is text, not a folder: `a` finds `a`, `ab` and `a/b`. Blobs written or deleted
        while the listing runs may or may not be in it; all others are.
        """

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Remove the blob durably; a missing one is fine."""
