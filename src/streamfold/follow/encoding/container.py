"""A snapshot as one blob: a text block that describes it, then the state's bytes.

The block has 512 bytes: one JSON object, spaces, and a line feed. `head -c 512` prints it, and
`tail -c +513` prints the state as its codec wrote it.

    {"format":"streamfold-snapshot","version":1,"id":"…","cursor":1000,"codec":"json",
     "bytes":20480,"sha256":"…","created_at":1700000000000}
"""

from __future__ import annotations

import hashlib
import io
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from streamfold.follow.encoding.codecs import Codec, decode_state
from streamfold.follow.errors import SnapshotCorruptError, SnapshotUnsupportedError
from streamfold.undecodable import UNDECODABLE

S = TypeVar("S")

VERSION = 1
#: Bytes of the description block. Its fields never need more.
BLOCK_BYTES = 512
_FORMAT = "streamfold-snapshot"


class Description(msgspec.Struct, frozen=True, omit_defaults=True):
    """The description block's fields."""

    format: str
    version: int
    id: str
    cursor: int
    codec: str
    bytes: int
    sha256: str
    #: Milliseconds since the Unix epoch.
    created_at: int
    #: Name of the fold that made the state, if its writer named one.
    fold: str | None = None

    @classmethod
    def of(
        cls, snapshot: str, cursor: int, codec: str, created_at: int, fold: str | None = None
    ) -> Description:
        """Return the description of a snapshot whose size and digest are not known yet."""
        return cls(_FORMAT, VERSION, snapshot, cursor, codec, 0, "", created_at, fold)


class _Version(msgspec.Struct):
    format: str
    version: int


def pack(pieces: Iterable[bytes | memoryview], described: Description) -> bytes:
    """Return a snapshot's blob, with size and digest in its description. Holds one copy in memory."""
    blob, digest, size = io.BytesIO(), hashlib.sha256(), 0
    blob.seek(BLOCK_BYTES)
    for piece in pieces:
        blob.write(piece)
        digest.update(piece)
        size += len(piece)
    whole = msgspec.structs.replace(described, bytes=size, sha256=digest.hexdigest())
    block = msgspec.json.encode(whole).ljust(BLOCK_BYTES - 1) + b"\n"
    blob.seek(0)
    blob.write(block)
    return blob.getvalue()


def describe(name: str, block: bytes) -> Description:
    """Parse the description block of a snapshot. Errors refer to the snapshot as `name`."""
    if len(block) < BLOCK_BYTES:
        raise SnapshotCorruptError(name, f"it ends after {len(block)} bytes")
    try:
        kind = msgspec.json.decode(block, type=_Version)
    except UNDECODABLE:
        raise SnapshotCorruptError(name, "it does not begin with a description") from None
    if kind.format != _FORMAT:
        raise SnapshotCorruptError(name, f"its format is {kind.format!r}, not {_FORMAT!r}")
    if kind.version != VERSION:
        raise SnapshotUnsupportedError(
            name,
            f"its version is {kind.version} and this reader knows {VERSION}; update streamfold",
        )
    try:
        return msgspec.json.decode(block, type=Description)
    except UNDECODABLE as error:
        raise SnapshotCorruptError(name, f"its description is incomplete: {error}") from None


class UnpackedBlob:
    """A fully read and verified blob: its description and the state's bytes."""

    def __init__(self, name: str, description: Description, pieces: deque[bytes]) -> None:
        self.name = name
        self.description = description
        self._pieces = pieces

    def give_away(self) -> Iterator[bytes]:
        """Yield the state in pieces. Each is freed as soon as the caller drops it."""
        while self._pieces:
            yield self._pieces.popleft()

    def decode(self, codec: Codec[S]) -> S:
        """Decode the state. Raises SnapshotCorruptError if the codec fails."""
        return decode_state(codec, self.description.codec, self.name, self.give_away())


async def unpack(
    name: str, blob: AsyncIterator[bytes], on_bytes: Callable[[int], None] = lambda _: None
) -> UnpackedBlob:
    """Read a blob to its end and verify it, calling `on_bytes` with the bytes read so far."""
    block, pieces, digest, size = b"", deque[bytes](), hashlib.sha256(), 0
    async for piece in blob:
        missing = BLOCK_BYTES - len(block)
        block, rest = block + piece[:missing], piece[missing:] if missing else piece
        pieces.append(rest)
        digest.update(rest)
        size += len(rest)
        on_bytes(size)
    description = describe(name, block)
    if size != description.bytes:
        raise SnapshotCorruptError(
            name, f"it has {size} bytes of state and should have {description.bytes}"
        )
    if digest.hexdigest() != description.sha256:
        raise SnapshotCorruptError(name, "its bytes do not match its digest")
    return UnpackedBlob(name, description, pieces)
