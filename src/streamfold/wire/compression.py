"""gzip and zstd compression, with a bound on the inflated size.

Input is untrusted. Its inflated size is checked during inflation, or beforehand if the format
declares it, so a small request can never use more memory than the caller allows.
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

#: Payloads smaller than this many bytes cost more to compress than they save. S2 uses the same
#: threshold.
COMPRESS_FROM = 1024
#: log2 of the maximum history, in bytes, that a zstd decoder retains: 8 MiB, which RFC 9659
#: requires of every HTTP recipient.
ZSTD_WINDOW_LOG_MAX = 23
#: zlib level 1-9. Clients wait while responses are compressed, so speed matters more than size.
GZIP_LEVEL = 3
#: zstd's default level: denser than gzip at any level, and several times faster.
ZSTD_LEVEL = 3
#: For clients that send a lot: JSON rows compress as well as at the default level, in two thirds of
#: the time.
ZSTD_LEVEL_FAST = 1

#: zlib's code for a gzip header and trailer with a 32 KiB window.
_GZIP_WBITS = 31
#: Magic number of a zstd frame (RFC 8878, 3.1.1).
_FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
#: Bytes that one zstd call inflates. A larger step would hold more bytes in two copies.
_ZSTD_STEP = 256 << 10
_ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG_MAX}


class Compression(enum.StrEnum):
    """Compression method. Each value is the HTTP content coding."""

    NONE = "identity"
    ZSTD = "zstd"
    GZIP = "gzip"


class _Compressors(threading.local):
    """One zstd compressor per thread and level: expensive to create, unsafe to share."""

    def __init__(self) -> None:
        self._zstd: dict[int, zstd.ZstdCompressor] = {}

    def zstd(self, level: int) -> zstd.ZstdCompressor:
        if level not in self._zstd:
            self._zstd[level] = zstd.ZstdCompressor(level)
        return self._zstd[level]


_compressors = _Compressors()


def compress(data: bytes, compression: Compression, zstd_level: int = ZSTD_LEVEL) -> bytes:
    """Return `data` as one zstd frame or one gzip member. Equal input gives equal output."""
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
    """Compress `data` if that makes it smaller. Returns the bytes and the compression used."""
    if compression is Compression.NONE or len(data) < COMPRESS_FROM:
        return data, Compression.NONE
    packed = compress(data, compression, zstd_level)
    return (packed, compression) if len(packed) < len(data) else (data, Compression.NONE)


def decompress(data: bytes, compression: Compression, cap: int) -> bytes:
    """Inflate exactly one compressed unit to at most `cap` bytes.

    Raises MalformedError if `data` is anything else.
    """
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
        # One byte beyond the cap shows that the data is too large, so no more is ever inflated.
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
