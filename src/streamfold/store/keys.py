"""The key space: one kind byte, then the row's identity. Big-endian, so bytes sort as numbers.

    kind  rest of the key                       value
    0x00  "format"                              FormatRow: the store's format version
    0x00  "stream-ids"                          CounterRow: the id of the next stream
    0x00  "space"                               SpaceRow: bytes of live and deleted records
    0x00  "writer"                              unused; written by earlier builds
    0x00  "held"                                HeldTotalsRow: bytes held when the store was closed
    0x00  "leftovers" NUL kind                  LeftoversRow: files of that kind that no row names
    0x00  "chunk-files"                         unused; CounterRow written by earlier builds
    0x01  basin                                 BasinRow
    0x02  basin NUL stream                      StreamRow
    0x03  stream id (8)                         StateRow: tail, token, trim point
    0x04  stream id (8), last seq_num (8)       chunk of records (see chunks.py)
    0x05  stream id (8)                         CleanupRow: delete records below the trim point
    0x06  SHA-256 of a secret (32)              TokenRow: the rights that the secret grants
    0x07  access token id                       TokenRow: the same row, for listing and revocation
    0x08  stream id (8)                         HeldRow: bytes of records held, this hour by minute
    0x09  stream id (8), hour (4)               LevelRow: bytes of records held, in a past hour
    0x0a  basin NUL hour (4)                    UsageRow: usage; the account's row has no basin
    0x0b  stream id (8), fork's stream id (8)   ForkRow: the fork needs records of the stream
    0x0c  stream id (8), producer id            ProducerRow: the producer's progress
    0x0d  stream id (8), seq_num (8)            SnapshotRow: replaces all records before it
    0x0e  kind NUL id                           a caller's document
    0x0f  basin NUL stream                      written by earlier builds; upkeep deletes these

A chunk's key contains its last seq_num, so the chunk that holds seq_num n is the first with a key
of n or more: one seek, no index. Names contain no NUL, so rows sort by name. Stream ids are never
reused: a deleted and re-created stream gets a new id, so no row of the old stream is ever read
again. Hours are counted from the Unix epoch.
"""

from __future__ import annotations

import struct

from streamfold.model.positions import U64_MAX

FORMAT = b"\x00format"
STREAM_IDS = b"\x00stream-ids"
SPACE = b"\x00space"
HELD_TOTALS = b"\x00held"
_LEFTOVERS = b"\x00leftovers\x00"
_BASIN = b"\x01"
_STREAM = b"\x02"
_STATE = b"\x03"
_CHUNK = b"\x04"
_CLEANUP = b"\x05"
_TOKEN_DIGEST = b"\x06"
_TOKEN = b"\x07"
_HELD = b"\x08"
_LEVEL = b"\x09"
_USAGE = b"\x0a"
_FORK = b"\x0b"
_PRODUCER = b"\x0c"
_SNAPSHOT = b"\x0d"
_DOCUMENT = b"\x0e"
_OBSOLETE = b"\x0f"

_CHUNK_KEY = struct.Struct(">cQQ")
_HOUR_MAX = 2**32 - 1
#: Bytes before the seq_num in a chunk key.
_CHUNK_PREFIX = 9


def leftovers(kind: str) -> bytes:
    return _LEFTOVERS + kind.encode()


def basin(name: str) -> bytes:
    return _BASIN + name.encode()


def basins_from(name: str, *, after: bool) -> bytes:
    """Return where a listing of basins starts: at `name`, or just after it."""
    return basin(name) + (b"\x00" if after else b"")


BASINS_END = _STREAM


def basin_name(key: bytes) -> str:
    return key[1:].decode()


def stream(basin_name: str, name: str) -> bytes:
    return _STREAM + basin_name.encode() + b"\x00" + name.encode()


def streams_from(basin_name: str, name: str, *, after: bool) -> bytes:
    """Return where a listing of a basin's streams starts: at `name`, or just after it."""
    return stream(basin_name, name) + (b"\x00" if after else b"")


def streams_end(basin_name: str) -> bytes:
    return _STREAM + basin_name.encode() + b"\x01"


STREAMS_START, STREAMS_END = _STREAM, _STATE


def stream_names(key: bytes) -> tuple[str, str]:
    basin_part, _, stream_part = key[1:].partition(b"\x00")
    return basin_part.decode(), stream_part.decode()


def state(stream_id: int) -> bytes:
    return _STATE + stream_id.to_bytes(8, "big")


def state_stream_id(key: bytes) -> int | None:
    """Return the stream id in a StateRow's key, or None for any other key."""
    return int.from_bytes(key[1:], "big") if key.startswith(_STATE) else None


def chunk(stream_id: int, last_seq_num: int) -> bytes:
    return _CHUNK_KEY.pack(_CHUNK, stream_id, last_seq_num)


def chunk_parts(key: bytes) -> tuple[int, int]:
    """Return the stream id and last seq_num in a chunk's key."""
    _, stream_id, last_seq_num = _CHUNK_KEY.unpack(key)
    return stream_id, last_seq_num


def is_chunk(key: bytes) -> bool:
    return key.startswith(_CHUNK)


def chunks_start(stream_id: int) -> bytes:
    return chunk(stream_id, 0)


def chunks_end(stream_id: int) -> bytes:
    """Return the key just after the stream's last possible chunk key."""
    return chunk(stream_id, U64_MAX) + b"\x00"


def chunk_last_seq_num(key: bytes) -> int:
    return int.from_bytes(key[_CHUNK_PREFIX:], "big")


def cleanup(stream_id: int) -> bytes:
    return _CLEANUP + stream_id.to_bytes(8, "big")


def cleanup_stream_id(key: bytes) -> int:
    return int.from_bytes(key[1:], "big")


CLEANUPS_START, CLEANUPS_END = _CLEANUP, _TOKEN_DIGEST


def token_digest(digest: bytes) -> bytes:
    return _TOKEN_DIGEST + digest


def token(token_id: str) -> bytes:
    return _TOKEN + token_id.encode()


def tokens_from(token_id: str, *, after: bool) -> bytes:
    """Return where a listing of access tokens starts: at `token_id`, or just after it."""
    return token(token_id) + (b"\x00" if after else b"")


TOKENS_END = _HELD


def token_id(key: bytes) -> str:
    return key[1:].decode()


def stream_bytes(stream_id: int) -> bytes:
    return _HELD + stream_id.to_bytes(8, "big")


def stream_bytes_id(key: bytes) -> int:
    return int.from_bytes(key[1:], "big")


def level(stream_id: int, hour: int) -> bytes:
    return _LEVEL + stream_id.to_bytes(8, "big") + hour.to_bytes(4, "big")


def levels_end(stream_id: int) -> bytes:
    """Return the key just after the stream's last possible LevelRow key."""
    return level(stream_id, _HOUR_MAX) + b"\x00"


def usage(basin_name: str, hour: int) -> bytes:
    return _USAGE + basin_name.encode() + b"\x00" + hour.to_bytes(4, "big")


def usage_end(basin_name: str) -> bytes:
    """Return the key just after the basin's last possible UsageRow key."""
    return usage(basin_name, _HOUR_MAX) + b"\x00"


def hour(key: bytes) -> int:
    """Return the hour at the end of a LevelRow or UsageRow key."""
    return int.from_bytes(key[-4:], "big")


def fork(stream_id: int, fork_id: int) -> bytes:
    return _FORK + stream_id.to_bytes(8, "big") + fork_id.to_bytes(8, "big")


def fork_id(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


def forks_span(stream_id: int, start: int = 0) -> tuple[bytes, bytes]:
    return fork(stream_id, start), fork(stream_id, U64_MAX) + b"\x00"


def producer(stream_id: int, producer_id: str) -> bytes:
    return _PRODUCER + stream_id.to_bytes(8, "big") + producer_id.encode()


def producers_span(stream_id: int) -> tuple[bytes, bytes]:
    start = producer(stream_id, "")
    return start, start + b"\xff"  # no byte of UTF-8 is 0xff


def producers_after(stream_id: int, producer_id: str) -> tuple[bytes, bytes]:
    start, end = producers_span(stream_id)
    return start + producer_id.encode() + b"\x00" if producer_id else start, end


def producer_id(key: bytes) -> str:
    return key[_CHUNK_PREFIX:].decode()


def snapshot(stream_id: int, seq_num: int) -> bytes:
    return _SNAPSHOT + stream_id.to_bytes(8, "big") + seq_num.to_bytes(8, "big")


def snapshot_seq_num(key: bytes) -> int:
    return int.from_bytes(key[_CHUNK_PREFIX:], "big")


def snapshots_span(stream_id: int, start: int = 0) -> tuple[bytes, bytes]:
    return snapshot(stream_id, start), snapshot(stream_id, U64_MAX) + b"\x00"


def document(kind: str, document_id: str) -> bytes:
    return _DOCUMENT + kind.encode() + b"\x00" + document_id.encode()


def documents_span(kind: str, prefix: str = "") -> tuple[bytes, bytes]:
    """Return the key span of a kind's documents whose ids start with `prefix`.

    The byte 0xff does not occur in UTF-8.
    """
    start = document(kind, prefix)
    return start, start + b"\xff"


def document_id(key: bytes) -> str:
    return key[1:].partition(b"\x00")[2].decode()


#: Rows written by earlier builds.
OBSOLETE_START, OBSOLETE_END = _OBSOLETE, b"\x10"
