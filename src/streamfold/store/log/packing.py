"""Compression of whole chunks with zstd.

Shrinking a chunk saves cost in every later step: the copy into SlateDB, the log, tables, merges and
the requests of a read. JSON from a change stream shrinks to a fifth.
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

#: Payload bytes from which to compress: smaller payloads save too little for 10 us.
_PACK_FROM: Final = 4 << 10
#: Leading bytes that predict whether compression pays off. Random bytes then cost only 1%.
_SAMPLE: Final = 8 << 10
#: Fraction of its size that compression must save.
_WORTHWHILE: Final = 1 / 8
#: The fastest zstd level, except for those whose output is a quarter larger: 1.9 ms per MiB of
#: JSON.
_LEVEL: Final = 1
#: Maximum payload bytes to compress; few payloads exceed 1.1 MiB. An empty header is metered as 2
#: bytes but takes 6, so a payload may have three times its metered bytes, plus a few per record.
_PACK_MAX: Final = 4 * BATCH_BYTES_MAX


class _Compressors(threading.local):
    """Caches one compressor per thread: creating it takes 20 us, and sharing it is unsafe."""

    def __init__(self) -> None:
        self.zstd = zstd.ZstdCompressor(_LEVEL)


_compressors = _Compressors()


def pack(payload: bytes | memoryview) -> bytes | None:
    """Compress `payload`. Returns None if that saves little."""
    size = len(payload)
    if not _PACK_FROM <= size <= _PACK_MAX:
        return None
    if size > 2 * _SAMPLE and not _is_smaller(_compress(memoryview(payload)[:_SAMPLE]), _SAMPLE):
        return None
    packed = _compress(payload)
    return packed if _is_smaller(packed, size) else None


def unpack(packed: bytes | memoryview) -> bytes:
    """Reverse `pack`. Raises DataCorruptError for any other bytes."""
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
