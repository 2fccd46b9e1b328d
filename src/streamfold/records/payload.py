"""Reading stored payloads: as records, or as ranges of bytes that can be sent as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from streamfold.errors import DataCorruptError, MalformedError
from streamfold.model.positions import U64_MAX
from streamfold.model.records import SequencedRecord
from streamfold.records import plain
from streamfold.records.columns import decode_compiled
from streamfold.records.kernels import compiled

#: Bytes of a payload from which the compiled way is the faster one: it costs some 30 us to begin.
COMPILED_FROM = 1024

Offsets: TypeAlias = npt.NDArray[np.int64]
Timestamps: TypeAlias = npt.NDArray[np.uint64]


class Cut(NamedTuple):
    """A run of records within a payload: half-open, in records and in bytes."""

    end_index: int
    byte_start: int
    byte_end: int
    metered: int


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """Where the records of one payload are, and what they weigh."""

    #: Byte at which each record starts, and after the last one the payload's length.
    offsets: Offsets
    #: One per record, never decreasing.
    timestamps: Timestamps
    #: Metered bytes before each record, and after the last one the total.
    metered: Offsets
    #: Sequence number of record 0; the others follow without gaps.
    first_seq_num: int

    @property
    def count(self) -> int:
        return len(self.timestamps)

    def index_of_timestamp(self, timestamp: int) -> int:
        """The first record at or after `timestamp`; `count` when there is none."""
        if timestamp > U64_MAX:
            return self.count
        return int(self.timestamps.searchsorted(np.uint64(max(timestamp, 0))))

    def cut(self, first_index: int, *, count: int, metered: int, until: int | None) -> Cut:
        """The longest run from `first_index` on that keeps all three limits; it may be empty.

        At most `count` records, at most `metered` metered bytes, all timestamps below `until`.
        """
        before = int(self.metered[first_index])
        end = min(first_index + max(count, 0), self.count)
        if int(self.metered[end]) - before > metered:
            end = int(self.metered.searchsorted(before + metered, side="right")) - 1
        if until is not None:
            end = min(end, self.index_of_timestamp(until))
        end = max(end, first_index)
        return Cut(
            end,
            int(self.offsets[first_index]),
            int(self.offsets[end]),
            int(self.metered[end]) - before,
        )


def decode(payload: bytes | memoryview) -> list[SequencedRecord]:
    """The records of a stored payload."""
    if len(payload) >= COMPILED_FROM and (records := decode_compiled(payload)) is not None:
        return records
    try:
        return [record for record, _ in plain.walk(bytes(payload))]
    except MalformedError as error:
        raise _corrupt(payload, error) from error


def measure(payload: bytes | memoryview) -> Index:
    """Find every record of a stored payload, without decoding any."""
    twin = compiled()
    if twin is not None and (measured := twin.measure(payload)):
        return Index(*measured)
    try:
        offsets, timestamps, metered, first = plain.measure(bytes(payload))
    except MalformedError as error:
        raise _corrupt(payload, error) from error
    return Index(
        np.array(offsets, np.int64),
        np.array(timestamps, np.uint64),
        np.array(metered, np.int64),
        first,
    )


def encode_records(records: Sequence[SequencedRecord]) -> bytes:
    """The payload that holds `records`, as sequencing would have written it."""
    return b"".join(map(plain.encode_sequenced, records))


def _corrupt(payload: bytes | memoryview, error: MalformedError) -> DataCorruptError:
    return DataCorruptError(
        f"a stored payload of {len(payload)} bytes cannot be read: {error.message}"
    )
