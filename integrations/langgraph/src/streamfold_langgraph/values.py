"""Channel values as bytes, with each version stored as the difference from an earlier one.

The difference is a zstd frame with the earlier value as its prefix, so every kind of change stays
small: an appended message, a new key, an edit in the middle. To bound decoding, version k of a
channel refers to version `k - 16**t`, where t is the number of trailing zeros of k in base 16. A
value is then at most 15 differences per base-16 digit away from one that is stored whole.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

import msgspec

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_FAN_OUT = 16
#: Bytes below which compression without a prefix costs more than it saves: a zstd frame adds 9.
_COMPRESS_FROM = 64
#: Minimum bytes of a zstd prefix.
_PREFIX_MIN = 8
#: Largest window that zstd decodes by default, as a binary logarithm: 128 MiB.
_WINDOW_LOG_MAX = 27
#: Bytes beyond which zstd finds a distant prefix only with long-distance matching.
_LONG_DISTANCE_FROM = 1 << 20


class Blob(msgspec.Struct, frozen=True, array_like=True):
    """A serialized value. With `base`, the difference from that version of its channel."""

    #: The serializer's name for the encoding.
    type: str
    data: bytes
    packed: bool = False
    base: int | None = None


class Chain(msgspec.Struct, array_like=True):
    """The versions of one channel by number, in the order in which they were stored."""

    blobs: dict[int, Blob] = {}
    #: Number of the next version.
    next: int = 0

    def add(self, blob: Blob) -> int:
        """Store the next version and return its number."""
        number, self.next = self.next, self.next + 1
        self.blobs[number] = blob
        return number

    def base(self) -> int | None:
        """Return the version that the next one is compared with, or None."""
        wanted, step = self.next, 1
        while wanted and wanted % (step * _FAN_OUT) == 0:
            step *= _FAN_OUT
        older = wanted - step
        if older in self.blobs:
            return older
        return max((number for number in self.blobs if number <= older), default=None)

    def keep(self, numbers: set[int]) -> None:
        """Remove every version that is neither in `numbers` nor a base of one of them."""
        needed: set[int] = set()
        for number in numbers:
            reached: int | None = number
            while reached is not None and reached not in needed:
                needed.add(reached)
                reached = self.blobs[reached].base
        self.blobs = {number: blob for number, blob in self.blobs.items() if number in needed}


def pack(kind: str, data: bytes, base: int | None, prefix: bytes) -> Blob:
    """Return a value's smallest form: as it is, compressed, or as the difference from `prefix`."""
    best = Blob(kind, data)
    if base is not None and len(prefix) >= _PREFIX_MIN:
        best = min(best, Blob(kind, compress(data, prefix), True, base), key=_size)
    if _size(best) > len(data) // 4 and len(data) >= _COMPRESS_FROM:
        best = min(best, Blob(kind, compress(data), True), key=_size)
    return best


def _size(blob: Blob) -> int:
    return len(blob.data)


def unpack(blob: Blob, prefix: bytes) -> bytes:
    """Return the serialized value. `prefix` is its base's value, if it has a base."""
    if not blob.packed:
        return blob.data
    return decompress(blob.data, b"" if blob.base is None else prefix)


def compress(data: bytes, prefix: bytes = b"") -> bytes:
    """Compress to one zstd frame. Decompression needs the same prefix."""
    size = len(data) + len(prefix)
    options: dict[int, int] = {
        zstd.CompressionParameter.window_log: max(10, min(_WINDOW_LOG_MAX, size.bit_length()))
    }
    if size > _LONG_DISTANCE_FROM:
        options[zstd.CompressionParameter.enable_long_distance_matching] = 1
    return zstd.compress(data, options=options, zstd_dict=_prefix(prefix) if prefix else None)


def decompress(data: bytes, prefix: bytes = b"") -> bytes:
    """Return the input of `compress`."""
    return zstd.decompress(
        data,
        zstd_dict=_prefix(prefix) if prefix else None,
        options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG_MAX},
    )


def _prefix(data: bytes) -> tuple[zstd.ZstdDict, int]:
    return zstd.ZstdDict(data, is_raw=True).as_prefix


class DecodedValues:
    """An LRU cache of serialized values by channel and version, bounded in bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._values: OrderedDict[tuple[str, str, str | None, int], bytes] = OrderedDict()

    def decode(self, place: tuple[str, str, str | None], chain: Chain, number: int) -> bytes:
        """Return the bytes of a version. `place` identifies its chain."""
        pending: list[int] = []
        value, reached = b"", number
        while (found := self._find((*place, reached))) is None:
            pending.append(reached)
            base = chain.blobs[reached].base
            if base is None:
                break
            reached = base
        else:
            value = found
        for step in reversed(pending):
            value = unpack(chain.blobs[step], value)
            self._keep((*place, step), value)
        return value

    def _find(self, key: tuple[str, str, str | None, int]) -> bytes | None:
        if (value := self._values.get(key)) is not None:
            self._values.move_to_end(key)
        return value

    def _keep(self, key: tuple[str, str, str | None, int], value: bytes) -> None:
        self._values[key] = value
        self._bytes += len(value)
        while self._bytes > self._limit:
            _, oldest = self._values.popitem(last=False)
            self._bytes -= len(oldest)
