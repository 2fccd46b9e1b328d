"""Compression of whole chunks, with zstd.

Everything behind it is cheaper by as much as a chunk shrinks: the copy into SlateDB, the log, tables,
merges, and the requests of a read. JSON of a change stream shrinks to a fifth.
"""

from __future__ import annotations

import sys
import threading
from typing import Final

from streamfold.errors import DataCorruptError
from streamfold.model.records import BATCH_BYTES_MAX

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

#: Bytes of a payload from which it is compressed: 10 us for so few save little.
_PACK_FROM: Final = 4 << 10
#: Bytes at the beginning that show whether the rest is worth it: random bytes cost 1% this way.
_SAMPLE: Final = 8 << 10
#: Part of its size that a payload must lose.
_WORTHWHILE: Final = 1 / 8
#: zstd's fastest level but for those that keep a quarter more: 1.9 ms per MiB of JSON.
_LEVEL: Final = 1
#: Bytes of a payload that is compressed, at most; few are larger than 1.1 MiB. A header of no bytes is
#: metered as 2 and takes 6, so a payload may have three times its metered bytes, and some per record.
_PACK_MAX: Final = 4 * BATCH_BYTES_MAX


class _Compressors(threading.local):
    """Keeps a compressor per thread: it takes 20 us to make and is unsafe to share."""

    def __init__(self) -> None:
        self.zstd = zstd.ZstdCompressor(_LEVEL)


_compressors = _Compressors()


def pack(payload: bytes | memoryview) -> bytes | None:
    """`payload` compressed; None if that saves little."""
    size = len(payload)
    if not _PACK_FROM <= size <= _PACK_MAX:
        return None
    if size > 2 * _SAMPLE and not _is_smaller(_compress(memoryview(payload)[:_SAMPLE]), _SAMPLE):
        return None
    packed = _compress(payload)
    return packed if _is_smaller(packed, size) else None


def unpack(packed: bytes | memoryview) -> bytes:
    """The payload that `pack` got; DataCorruptError for anything else."""
    decompressor = zstd.ZstdDecompressor()
    try:
        payload: bytes = decompressor.decompress(packed, _PACK_MAX)
    except zstd.ZstdError as error:
        raise DataCorruptError(f"a stored chunk cannot be decompressed: {error}") from error
    if not decompressor.eof or decompressor.unused_data:
        raise DataCorruptError(
            f"a stored chunk does not end after {len(packed)} compressed bytes, or {_PACK_MAX} others"
        )
    return payload


def _compress(payload: bytes | memoryview) -> bytes:
    compressor = _compressors.zstd
    return bytes(compressor.compress(payload, compressor.FLUSH_FRAME))


def _is_smaller(packed: bytes, size: int) -> bool:
    return len(packed) <= size * (1 - _WORTHWHILE)
