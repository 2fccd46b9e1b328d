"""One number for the rows of a table, the same whatever their order and the files they come from.

Every row is hashed as its JSON text, which is exact for all types, and the hashes are added up. Two
tables that differ by accident have the same number once in 2^64 times. It is no proof against
somebody who wants them to look alike.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamfold.archive.formats.base64_column import values_of
from streamfold.archive.formats.batching import Limits, pieces
from streamfold.archive.formats.jsonl.json_text import object_text

Words = npt.NDArray[np.uint64]

#: Rows and bytes that are hashed at once: a byte of text takes some 30 bytes while it is.
AT_ONCE = Limits(rows=16 << 10, size=2 << 20)


class Fingerprint:
    """The rows that were added so far, as their count and the sum of their hashes."""

    def __init__(self) -> None:
        self.rows = 0
        self._sum = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows; columns must be the same, in the same order, for all that are compared."""
        for piece in pieces([batch], AT_ONCE):
            text = object_text(list(piece.schema), piece.columns)
            self._sum = (self._sum + int(_row_hashes(text).sum(dtype=np.uint64))) % (1 << 64)
            self.rows += len(piece)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    @property
    def _value(self) -> tuple[int, int]:
        return self.rows, self._sum


def _row_hashes(text: pa.Array) -> Words:
    """Return a hash of each text: its bytes, each multiplied by a number for its place, added up."""
    data, lengths = values_of(text)
    starts = np.cumsum(lengths) - lengths
    places = (np.arange(len(data)) - np.repeat(starts, lengths)).astype(np.uint64)
    weighed = (data.astype(np.uint64) + np.uint64(1)) * _mixed(places)
    return _mixed(np.add.reduceat(weighed, starts))


def _mixed(words: Words) -> Words:
    """Return words of which every bit depends on all bits given (splitmix64)."""
    words = words + np.uint64(0x9E37_79B9_7F4A_7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed
