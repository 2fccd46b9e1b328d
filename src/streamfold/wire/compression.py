"""gzip and zstd, with a bound on what compressed input may become.

Input is untrusted: its inflated size is checked while it inflates, or before if the format declares
it, so that a small request can never cost more memory than the caller allows.
"""

from __future__ import annotations

import enum
import gzip
import threading
import zlib

import zstandard

from streamfold.errors import MalformedError

#: Bytes below which compressing costs more than it saves; the threshold S2 uses.
COMPRESS_FROM = 1024
#: Bytes of history that a zstd decoder keeps at most: what RFC 9659 asks of every HTTP recipient.
ZSTD_WINDOW_MAX = 8 << 20
#: zlib level 1-9: responses are compressed while a client waits, so speed wins over size.
GZIP_LEVEL = 3
#: zstd's own default: denser than gzip at any level and several times faster.
ZSTD_LEVEL = 3

#: zlib's way of saying "a gzip header and trailer, 32 KiB of window".
_GZIP_WBITS = 31
#: Type and size of a zstd block are in a 3-byte little-endian header; RFC 8878, 3.1.1.2.
_BLOCK_HEADER = 3
_RLE_BLOCK = 1
_CHECKSUM = 4


class Compression(enum.StrEnum):
    """How bytes are compressed; the value is the HTTP content coding."""

    NONE = "identity"
    ZSTD = "zstd"
    GZIP = "gzip"


class _Contexts(threading.local):
    """Keeps a pair of zstd contexts per thread: they are expensive to make and unsafe to share."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_MAX)


_contexts = _Contexts()


def compress(data: bytes, compression: Compression) -> bytes:
    """`data` as one zstd frame or one gzip member; the same input gives the same output."""
    match compression:
        case Compression.ZSTD:
            return _contexts.compressor.compress(data)
        case Compression.GZIP:
            return gzip.compress(data, GZIP_LEVEL, mtime=0)
        case Compression.NONE:
            return data


def compress_if_smaller(data: bytes, compression: Compression) -> tuple[bytes, Compression]:
    """`data` compressed where that pays, and how it ended up compressed."""
    if compression is Compression.NONE or len(data) < COMPRESS_FROM:
        return data, Compression.NONE
    packed = compress(data, compression)
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
    try:
        declared = zstandard.frame_content_size(data)
        if declared > cap:  # a frame that does not say has -1 here
            raise _too_large(cap)
        _check_single_frame(data)
        return _contexts.decompressor.decompress(data, max_output_size=cap)
    except zstandard.ZstdError as error:
        raise MalformedError(
            f"the data is not valid zstd, or inflates to more than {cap} bytes: {error}"
        ) from None


def _check_single_frame(data: bytes) -> None:
    """Refuse bytes after the frame, which the decoder would drop silently."""
    if not data.startswith(zstandard.FRAME_HEADER):
        raise MalformedError("the data does not begin with a zstd frame")
    at, last = zstandard.frame_header_size(data), False
    while not last:
        if at + _BLOCK_HEADER > len(data):
            raise MalformedError("the zstd data is truncated: send it to its end")
        # A frame may be all headers, of blocks without content: hence few steps for each.
        header = data[at] | data[at + 1] << 8 | data[at + 2] << 16
        last = header & 1 == 1
        at += _BLOCK_HEADER + (1 if header >> 1 & 3 == _RLE_BLOCK else header >> 3)
    if zstandard.get_frame_parameters(data).has_checksum:
        at += _CHECKSUM
    if at != len(data):
        raise MalformedError(f"the zstd frame has {at} bytes, the data {len(data)}: send one frame")


def _too_large(cap: int) -> MalformedError:
    return MalformedError(f"the data inflates to more than {cap} bytes: send less at once")
