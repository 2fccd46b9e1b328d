"""Assembles snapshots from their records, however they interleave with other records."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from streamfold.follow.clients.client import StreamRecord
from streamfold.follow.encoding.record_forms import (
    HEADERS,
    Closing,
    Opening,
    RecordForm,
    SnapshotFrame,
    form_of,
    label,
)
from streamfold.follow.errors import SnapshotCorruptError

#: Maximum unfinished snapshots. Several exist only if writers died or race. With this many, the
#: oldest one's writer is dead, and dropping that snapshot bounds memory.
OPEN_MAX = 4


@dataclass(slots=True)
class PartialSnapshot:
    """A snapshot of which only some records have been read so far."""

    snapshot: str
    opening: Opening
    #: seq_num of its first record. Later deltas are not in its state.
    began_at: int
    #: Deltas before it and their bytes, from which counting continues.
    records_before: int
    bytes_before: int
    in_one_record: bool = False
    timestamp: int = 0
    next_index: int = 0
    size: int = 0
    pieces: deque[bytes] = field(default_factory=deque)
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    @property
    def name(self) -> str:
        return label(self.snapshot, self.began_at)

    def give_away(self) -> Iterator[bytes]:
        """Yield the state in pieces. Each is freed as soon as the caller drops it."""
        while self.pieces:
            yield self.pieces.popleft()


class SnapshotAssembly:
    """Collects unfinished snapshots. Without `keep`, only checks whether they are whole."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self.open: dict[str, PartialSnapshot] = {}

    def add(self, record: StreamRecord, records: int = 0, size: int = 0) -> PartialSnapshot | None:
        """Add a snapshot record. Returns the snapshot if this record completes it, else None.

        `records` and `size` count the earlier deltas and their bytes. Raises if the snapshot is
        unusable, which leaves other unfinished snapshots unaffected.
        """
        form = form_of(record) or HEADERS
        frame = form.parse(record)
        parts = self.open.get(frame.snapshot)
        if parts is None and frame.index == 0:
            parts = self._begin(frame, record, records, size)
        if parts is None:
            return None  # its first record is trimmed, or it was dropped
        try:
            return self._continue(parts, frame, record, form)
        except SnapshotCorruptError:
            self.open.pop(frame.snapshot, None)
            raise

    def _begin(
        self, frame: SnapshotFrame, record: StreamRecord, records: int, size: int
    ) -> PartialSnapshot:
        name = label(frame.snapshot, record.seq_num)
        if frame.opening is None:
            raise SnapshotCorruptError(name, "its first record does not say what it covers")
        # A snapshot's own trim command may stand between the cursor and a single-record snapshot.
        earliest = record.seq_num - (1 if frame.closing else 0)
        if not earliest <= frame.opening.covers_before <= record.seq_num:
            raise SnapshotCorruptError(
                name, f"it covers records before {frame.opening.covers_before}, not {earliest}"
            )
        if len(self.open) >= OPEN_MAX:
            del self.open[next(iter(self.open))]
        single = frame.closing is not None
        parts = PartialSnapshot(
            frame.snapshot, frame.opening, record.seq_num, records, size, single
        )
        self.open[frame.snapshot] = parts
        return parts

    def _continue(
        self, parts: PartialSnapshot, frame: SnapshotFrame, record: StreamRecord, form: RecordForm
    ) -> PartialSnapshot | None:
        parts.timestamp = record.timestamp
        if frame.index < parts.next_index:
            return None  # appended twice because the first acknowledgement was lost
        if frame.index > parts.next_index:
            raise SnapshotCorruptError(parts.name, f"record {parts.next_index} of it is missing")
        if frame.closing is None or frame.index == 0:
            self._collect(parts, form.state_of(record))
        if frame.closing is None:
            return None
        self._check(parts, frame.closing)
        del self.open[parts.snapshot]
        return parts

    def _collect(self, parts: PartialSnapshot, body: bytes) -> None:
        parts.next_index += 1
        parts.size += len(body)
        if self._keep:
            parts.digest.update(body)
            parts.pieces.append(body)

    def _check(self, parts: PartialSnapshot, closing: Closing) -> None:
        if (closing.count, closing.size) != (parts.next_index, parts.size):
            raise SnapshotCorruptError(
                parts.name,
                f"it has {parts.size} bytes in {parts.next_index} records, and should have "
                f"{closing.size} in {closing.count}",
            )
        digest = parts.digest.hexdigest() if self._keep and closing.sha256 is not None else None
        if digest is not None and digest != closing.sha256:
            raise SnapshotCorruptError(parts.name, "its bytes do not match its digest")
