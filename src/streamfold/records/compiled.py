"""The compiled kernels with Python values; importing this module needs numba."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from streamfold.model.configs import TimestampMode
from streamfold.model.records import BATCH_RECORDS_MAX
from streamfold.records import json_kernel, record_kernel
from streamfold.records.rules import Sequenced, Slot, missing_timestamp

#: Bytes; nearly every batch fits, so that a thread allocates once. Batches are bounded: so is it.
ROOM_MIN = 5 << 18

_scratch = threading.local()


class Measured(NamedTuple):
    """Byte offsets (one more than records), timestamps, running metered size (likewise)."""

    offsets: record_kernel.Offsets
    timestamps: record_kernel.Values
    metered: record_kernel.Offsets
    first_seq_num: int


class ScannedRecords:
    """Canonical AppendRecords that wait for their slot: the received bytes, and offsets into them."""

    __slots__ = ("_raw", "_rows", "_unstamped", "commands", "end", "metered")

    def __init__(
        self, raw: bytes, rows: record_kernel.Values, scanned: tuple[int, int, int, int]
    ) -> None:
        self._raw = raw
        self._rows = rows
        #: Offset after the records, metered bytes, and how many records have a nameless header.
        self.end, self.metered, self.commands, self._unstamped = scanned

    @property
    def count(self) -> int:
        return len(self._rows)

    def nameless(self) -> list[tuple[int, int, int]]:
        """Index, start and end of the fields of every record that has a nameless header."""
        if not self.commands:
            return []
        found = np.flatnonzero(
            self._rows[:, record_kernel.FLAGS] & np.uint64(record_kernel.COMMAND)
        )
        return [
            (int(i), int(self._rows[i, record_kernel.START]), int(self._rows[i, record_kernel.END]))
            for i in found
        ]

    def sequence(self, slot: Slot) -> Sequenced:
        first, mode, uncapped = slot.first, slot.mode, slot.uncapped
        now, floor = slot.now, slot.floor
        if mode is TimestampMode.CLIENT_REQUIRE and self._unstamped < len(self._rows):
            raise missing_timestamp(self._unstamped)
        out = _room(len(self._raw) + record_kernel.GROWTH_MAX * len(self._rows))
        size, earliest, latest = record_kernel.emit(
            np.frombuffer(self._raw, np.uint8),
            self._rows,
            np.uint64(first),
            np.uint64(now),
            np.uint64(floor),
            mode is TimestampMode.ARRIVAL,
            uncapped,
            out,
        )
        return Sequenced(out[:size].tobytes(), int(earliest), int(latest))


def _room(size: int) -> record_kernel.Bytes:
    """At least `size` writable bytes, valid until this thread calls it again.

    Kept, because the allocator gives a fresh megabyte back to the system each time, and having its
    pages mapped anew costs several times what the kernel does with them.
    """
    kept: record_kernel.Bytes | None = getattr(_scratch, "room", None)
    if kept is None or len(kept) < size:
        kept = _scratch.room = np.empty(max(size, ROOM_MIN), np.uint8)
    return kept


def count_parts(raw: bytes, most: int) -> int:
    """The number of records and headers at the start of an AppendInput; inexact above `most`."""
    return int(record_kernel.count_parts(np.frombuffer(raw, np.uint8), most))


def scan(raw: bytes) -> ScannedRecords | None:
    """The records at the start of an AppendInput; None when `plain` must parse it."""
    view = np.frombuffer(raw, np.uint8)
    count = record_kernel.count_records(view)
    if not 0 < count <= BATCH_RECORDS_MAX:
        return None
    rows = np.empty((count, record_kernel.COLUMNS), np.uint64)
    scanned = record_kernel.scan(view, rows)
    return None if scanned[0] == record_kernel.NOT_CANONICAL else ScannedRecords(raw, rows, scanned)


def measure(payload: bytes | memoryview) -> Measured | None:
    """The index of the payload; None when `plain` must parse it."""
    view = np.frombuffer(payload, np.uint8)
    # A writable array would be another type to numba, and cost a second compilation.
    view.flags.writeable = False
    count = record_kernel.count_records(view)
    if count == record_kernel.NOT_CANONICAL:
        return None
    offsets, metered = np.empty(count + 1, np.int64), np.empty(count + 1, np.int64)
    timestamps = np.empty(count, np.uint64)
    end, first = record_kernel.measure(view, offsets, timestamps, metered)
    return Measured(offsets, timestamps, metered, int(first)) if end == len(view) else None


def to_json(payload: bytes | memoryview, *, base64: bool) -> bytes | None:
    """The records as the elements of a JSON array, joined by commas; None when Python must write it."""
    view = np.frombuffer(payload, np.uint8)
    view.flags.writeable = False
    count = record_kernel.count_records(view)
    if count == record_kernel.NOT_CANONICAL:
        return None
    room = json_kernel.GROWTH * len(view) + json_kernel.RECORD_BYTES * count
    out = np.empty(room, np.uint8)
    size = json_kernel.write_json(view, count, base64, out)
    return None if size == record_kernel.NOT_CANONICAL else out[:size].tobytes()
