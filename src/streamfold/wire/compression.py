"""gzip and zstd, with a bound on what compressed input may become.

Input is untrusted: its inflated size is checked while it inflates, or before if the format declares
it, so that a small request can never cost more memory than the caller allows.
"""

from __future__ import annotations

import enum
import gzip
import io
import sys
import threading
import zlib

from streamfold.errors import MalformedError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

#: Bytes below which compressing costs more than it saves; the threshold S2 uses.
COMPRESS_FROM = 1024
#: Binary logarithm of the bytes of history that a zstd decoder keeps at most, 8 MiB: what RFC 9659
#: asks of every HTTP recipient.
ZSTD_WINDOW_LOG_MAX = 23
#: zlib level 1-9: responses are compressed while a client waits, so speed wins over size.
GZIP_LEVEL = 3
#: zstd's own default: denser than gzip at any level and several times faster.
ZSTD_LEVEL = 3
#: For clients with much to send: JSON of rows becomes as small, in two thirds of the time.
ZSTD_LEVEL_FAST = 1

#: zlib's way of saying "a gzip header and trailer, 32 KiB of window".
_GZIP_WBITS = 31
#: How a zstd frame begins; RFC 8878, 3.1.1.
_FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
#: Bytes to which zstd is inflated at once: more would be held twice.
_ZSTD_STEP = 256 << 10
_ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG_MAX}


class Compression(enum.StrEnum):
    """How bytes are compressed; the value is the HTTP content coding."""

    NONE = "identity"
    ZSTD = "zstd"
    GZIP = "gzip"


class _Compressors(threading.local):
    """Keeps a zstd compressor per thread and level: it is expensive to make and unsafe to share."""

    def __init__(self) -> None:
        self._zstd: dict[int, zstd.ZstdCompressor] = {}

    def zstd(self, level: int) -> zstd.ZstdCompressor:
        if level not in self._zstd:
            self._zstd[level] = zstd.ZstdCompressor(level)
        return self._zstd[level]


_compressors = _Compressors()


def compress(data: bytes, compression: Compression, zstd_level: int = ZSTD_LEVEL) -> bytes:
    """`data` as one zstd frame or one gzip member; the same input gives the same output."""
    match compression:
        case Compression.ZSTD:
            return _compressors.zstd(zstd_level).compress(data, zstd.ZstdCompressor.FLUSH_FRAME)
        case Compression.GZIP:
            return gzip.compress(data, GZIP_LEVEL, mtime=0)
        case Compression.NONE:
            return data


def compress_if_smaller(
    data: bytes, compression: Compression, zstd_level: int = ZSTD_LEVEL
) -> tuple[bytes, Compression]:
    """`data` compressed where that pays, and how it ended up compressed."""
    if compression is Compression.NONE or len(data) < COMPRESS_FROM:
        return data, Compression.NONE
    packed = compress(data, compression, zstd_level)
    return (packed, compression) if len(packed) < len(data) else (data, Compression.NONE)


def decompress(data: bytes, compression: Compression, cap: int) -> bytes:
    """Exactly one compressed unit, inflated to at most `cap` bytes; anything else is refused."""
    match compression:
        case Compression.ZSTD:
            return _inflate_zstd(data, cap)
        case Compression.GZIP:
            return _inflate_gzip(data, cap)
        case Compression.NONE:
            if len(data) > cap:
                raise _too_large(cap)
            return data


def _inflate_gzip(data: bytes, cap: int) -> bytes:
    inflater = zlib.decompressobj(wbits=_GZIP_WBITS)
    try:
        # One byte beyond the cap is enough to know, and is all that is ever inflated.
        inflated = inflater.decompress(data, cap + 1)
    except zlib.error as error:
        raise MalformedError(f"the data is not valid gzip: {error}") from None
    if len(inflated) > cap:
        raise _too_large(cap)
    if not inflater.eof:
        raise MalformedError("the gzip data is truncated: send it to its end")
    if inflater.unused_data:
        raise MalformedError("bytes follow the gzip member: send exactly one")
    return inflated


def _inflate_zstd(data: bytes, cap: int) -> bytes:
    if not data.startswith(_FRAME_MAGIC):
        raise MalformedError("the data does not begin with a zstd frame")
    try:
        declared = zstd.get_frame_info(data).decompressed_size
        if declared is not None and declared > cap:
            raise _too_large(cap)
        size = zstd.get_frame_size(data)
        if size != len(data):
            raise MalformedError(
                f"the zstd frame has {size} bytes, the data {len(data)}: send one frame"
            )
        return _inflate_frame(data, cap)
    except zstd.ZstdError as error:
        raise MalformedError(f"the data is not valid zstd, or is truncated: {error}") from None


def _inflate_frame(data: bytes, cap: int) -> bytes:
    decoder = zstd.ZstdDecompressor(options=_ZSTD_OPTIONS)
    first: bytes = decoder.decompress(data, _ZSTD_STEP)
    if decoder.eof and len(first) <= cap:
        return first
    inflated = io.BytesIO()
    inflated.write(first)
    while not decoder.eof and inflated.tell() <= cap:
        if decoder.needs_input:
            raise MalformedError("the zstd data is truncated: send it to its end")
        inflated.write(decoder.decompress(b"", _ZSTD_STEP))
    if inflated.tell() > cap:
        raise _too_large(cap)
    return inflated.getvalue()


def _too_large(cap: int) -> MalformedError:
    return MalformedError(f"the data inflates to more than {cap} bytes: send less at once")
