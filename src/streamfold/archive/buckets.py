"""Key buckets: a key maps to the same bucket on every machine and in every version.

Libraries promise no stable hash, so this module defines one. Each key field becomes 64-bit words.
Integers, dates and times are one word. Text and bytes are eight-byte little-endian words, padded
with zeros. Decimals are hashed as text without trailing zeros. Words are mixed with SplitMix64. A
value produces the same words in a wider type, so a key keeps its bucket when its column widens. The
bucket count is a power of two: a bucket of 8 splits into two of 16 without reading any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamfold.errors import InvalidError

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

#: Part field that names the hash which chose its bucket, and the name of this hash. A writer that
#: sets it also marks every part of a diff that empties the table.
BUCKETING, SPLITMIX64 = "bucketing", "splitmix64"
#: Part field that marks a diff which first empties the table. Readers of one bucket need it, since
#: only the diff's first part holds the TRUNCATE.
TRUNCATES = "truncates"
#: Target bytes of one bucket of a base, in its first format: a task holds and rewrites this much.
BUCKET_BYTES = 64 << 20
#: Maximum buckets, which bounds the manifest, because it names every part.
BUCKETS_MAX = 4096

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_WORD = 8


def bucket_count(size_bytes: int, least: int = 1, bucket_bytes: int = BUCKET_BYTES) -> int:
    """Return the smallest power of two, at least `least`, that keeps buckets within `bucket_bytes`.

    Capped at `BUCKETS_MAX`.
    """
    count = -(-size_bytes // bucket_bytes)
    return min(max(least, 1 << max(count - 1, 0).bit_length()), BUCKETS_MAX)


def bucket_numbers(keys: Sequence[pa.Array], count: int) -> Numbers:
    """Return each row's bucket, computed from its key fields in order. Keys are never null."""
    if count < 1 or count & (count - 1):
        raise InvalidError(f"{count} is not a possible number of buckets: choose a power of two")
    hashed = hash_words(keys)
    return (hashed & np.uint64(count - 1)).astype(np.int64)


def hash_words(keys: Sequence[pa.Array]) -> Words:
    """Return the stable hash of each row's key."""
    hashed = np.zeros(len(keys[0]), np.uint64)
    for key in keys:
        hashed = _mixed(hashed ^ _field_words(key))
    return hashed


def _field_words(key: pa.Array) -> Words:
    types, kind = pa.types, key.type
    if types.is_decimal(kind):
        return _bytes_words(pa.array(map(_plain_text, key.to_pylist()), pa.string()))
    if types.is_string(kind) or types.is_binary(kind):
        return _bytes_words(key)
    if types.is_unsigned_integer(kind):
        return _mixed(key.cast(pa.uint64()).to_numpy(zero_copy_only=False))
    if types.is_date32(kind):
        key = key.cast(pa.int32())
    if types.is_timestamp(kind) or types.is_time64(kind):
        key = key.cast(pa.int64())
    whole: npt.NDArray[np.int64] = key.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return _mixed(whole.astype(np.int64, copy=False).view(np.uint64))


def _plain_text(value: Decimal) -> str:
    # Converted one by one: Arrow writes small decimals with exponents, and decimal keys are rare.
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _bytes_words(column: pa.Array) -> Words:
    """Return a hash of each value, computed for all values at once, word by word."""
    starts, lengths, content = _layout(column)
    hashed: Words = _mixed(lengths.astype(np.uint64))
    # An unaligned view with a word at every byte, so that no value is copied.
    words: Words = np.ndarray((len(content) - _WORD + 1,), "<u8", content, strides=(1,))
    rows = np.flatnonzero(lengths > 0)
    offset = 0
    while len(rows):
        word = words[starts[rows] + offset]
        spare = np.maximum(_WORD - (lengths[rows] - offset), 0).astype(np.uint64) * np.uint64(8)
        hashed[rows] = _mixed(hashed[rows] ^ ((word << spare) >> spare))
        offset += _WORD
        rows = rows[lengths[rows] > offset]
    return hashed


def _layout(column: pa.Array) -> tuple[Numbers, Numbers, npt.NDArray[np.uint8]]:
    """Return each value's start and length, and all bytes padded by one word."""
    _, offsets, content = column.buffers()
    edges = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    first, last = (int(edges[0]), int(edges[-1])) if len(column) else (0, 0)
    padded = np.zeros(last - first + _WORD, np.uint8)
    if last > first:
        padded[: last - first] = np.frombuffer(content, np.uint8)[first:last]
    starts = edges.astype(np.int64) - first
    return starts[:-1], np.diff(starts), padded


def _mixed(words: Any) -> Words:
    """Return words mixed by SplitMix64, where each input bit changes about half of the output bits."""
    with np.errstate(over="ignore"):
        z: Words = words.astype(np.uint64, copy=False) + _GAMMA
        z = (z ^ (z >> np.uint64(30))) * _FIRST
        z = (z ^ (z >> np.uint64(27))) * _SECOND
        return z ^ (z >> np.uint64(31))
