"""Digests of snapshots: two snapshots are the same when type and bytes are."""

from __future__ import annotations

from blake3 import blake3


class SnapshotDigest:
    """BLAKE3 over the length of the content type (64 bits, little-endian), the type, and the bytes.

    The length in front keeps a type's end from being taken for the snapshot's beginning.
    """

    __slots__ = ("_hasher",)

    def __init__(self, content_type: str) -> None:
        text = content_type.encode()
        self._hasher = blake3(len(text).to_bytes(8, "little") + text)

    def update(self, data: bytes) -> None:
        """Take in the next bytes of the snapshot, in pieces of any size."""
        self._hasher.update(data)

    def hexdigest(self) -> str:
        """64 hex digits in lower case, of everything so far."""
        return self._hasher.hexdigest()
