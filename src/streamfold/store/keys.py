"""The key space: one byte of kind, then what identifies the row. Big-endian, so bytes sort as numbers.

    kind  rest of the key                       value
    0x00  "format"                              FormatRow: what wrote the store
    0x00  "stream-ids"                          CounterRow: the id of the next stream
    0x01  basin                                 BasinRow
    0x02  basin NUL stream                      StreamRow
    0x03  stream id (8)                         StateRow: token, trim point, tail once it is bare
    0x04  stream id (8), last seq_num (8)       chunk of records (see chunks.py)
    0x05  stream id (8)                         CleanupRow: records below the trim point are to go

The last seq_num of a chunk is its key, so the chunk that holds seq_num n is the first with a key of n
or more: one seek, no index. Names contain no NUL, so listings sort as names do. A stream id is used
once: a deleted and re-created name gets another, and nothing of the old stream can shine through.
"""

from __future__ import annotations

from streamfold.model.positions import U64_MAX

FORMAT = b"\x00format"
STREAM_IDS = b"\x00stream-ids"
_BASIN = b"\x01"
_STREAM = b"\x02"
_STATE = b"\x03"
_CHUNK = b"\x04"
_CLEANUP = b"\x05"

#: Bytes before the seq_num in a chunk's key.
_CHUNK_PREFIX = 9


def basin(name: str) -> bytes:
    return _BASIN + name.encode()


def basins_from(name: str, *, after: bool) -> bytes:
    """Where a listing of basins starts: at `name`, or just after it."""
    return basin(name) + (b"\x00" if after else b"")


BASINS_END = _STREAM


def basin_name(key: bytes) -> str:
    return key[1:].decode()


def stream(basin_name: str, name: str) -> bytes:
    return _STREAM + basin_name.encode() + b"\x00" + name.encode()


def streams_from(basin_name: str, name: str, *, after: bool) -> bytes:
    """Where a listing of a basin's streams starts: at `name`, or just after it."""
    return stream(basin_name, name) + (b"\x00" if after else b"")


def streams_end(basin_name: str) -> bytes:
    return _STREAM + basin_name.encode() + b"\x01"


STREAMS_START, STREAMS_END = _STREAM, _STATE


def stream_names(key: bytes) -> tuple[str, str]:
    basin_part, _, stream_part = key[1:].partition(b"\x00")
    return basin_part.decode(), stream_part.decode()


def state(stream_id: int) -> bytes:
    return _STATE + stream_id.to_bytes(8, "big")


def chunk(stream_id: int, last_seq_num: int) -> bytes:
    return _CHUNK + stream_id.to_bytes(8, "big") + last_seq_num.to_bytes(8, "big")


def chunks_start(stream_id: int) -> bytes:
    return chunk(stream_id, 0)


def chunks_end(stream_id: int) -> bytes:
    """Just after the last key that a chunk of this stream can have."""
    return chunk(stream_id, U64_MAX) + b"\x00"


def chunk_last_seq_num(key: bytes) -> int:
    return int.from_bytes(key[_CHUNK_PREFIX:], "big")


def cleanup(stream_id: int) -> bytes:
    return _CLEANUP + stream_id.to_bytes(8, "big")


def cleanup_stream_id(key: bytes) -> int:
    return int.from_bytes(key[1:], "big")


CLEANUPS_START, CLEANUPS_END = _CLEANUP, b"\x06"
