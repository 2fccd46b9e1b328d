"""Turns records into state: folds deltas, and loads a snapshot while the state is unknown.

Does no I/O: records in, state out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from streamfold.errors import InvalidError, StreamfoldError
from streamfold.follow.clients.client import StreamRecord
from streamfold.follow.encoding.assembly import PartialSnapshot, SnapshotAssembly
from streamfold.follow.encoding.codecs import Codec, check_fold, decode_state
from streamfold.follow.encoding.record_forms import form_of, is_delta, may_be_snapshot
from streamfold.follow.errors import SnapshotCorruptError, SnapshotUnsupportedError

S = TypeVar("S")

#: Maximum characters: the name goes into record headers and a description of limited length.
FOLD_NAME_MAX = 100
_FOLD_NAME = re.compile(rf"[\x20-\x7e]{{1,{FOLD_NAME_MAX}}}")
#: Bytes of deltas buffered while reading a framed snapshot interleaved with them. Deltas beyond
#: that are dropped and read again after the snapshot, which costs time instead of memory.
BUFFER_BYTES = 64 << 20
_NO_STATE = "the fold returned None: return the state, also where it was changed in place"


@dataclass(frozen=True, slots=True)
class FoldSpec(Generic[S]):
    """Describes how deltas become state."""

    fold: Callable[[S, StreamRecord], S]
    initial: Callable[[], S]
    #: Equivalent to `fold`, applied to many deltas at once.
    fold_batch: Callable[[S, Sequence[StreamRecord]], S] | None = None
    #: Stored in every snapshot. Snapshots made under another fold name are rejected. None = unnamed.
    name: str | None = None

    def __post_init__(self) -> None:
        if self.name is not None and not _FOLD_NAME.fullmatch(self.name):
            raise InvalidError(
                f"fold name {self.name[:120]!r} must have 1 to {FOLD_NAME_MAX} printable "
                "ASCII characters"
            )


@dataclass(frozen=True, slots=True)
class KnownSnapshot:
    """A whole snapshot: its cursor, and how many deltas and bytes preceded it."""

    cursor: int
    records: int
    bytes: int
    #: Milliseconds since the Unix epoch, or None if unknown.
    taken_at: int | None


class Replay(Generic[S]):
    """Holds the state and the position up to which it is complete."""

    def __init__(
        self,
        folding: FoldSpec[S],
        codec: Codec[S],
        stream: str,
        *,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self._folding = folding
        self._stream = stream
        self._codec = codec
        self._buffer_bytes = buffer_bytes
        #: Deltas counted so far, and bytes of their bodies.
        self.records = self.bytes = 0
        self.problems: list[StreamfoldError] = []
        self._buffered: list[StreamRecord] = []
        self._kept_bytes = 0
        self._overflown = False
        self.value: S = folding.initial()
        self._starts_as_none = self.value is None
        self.start_at(self.value, 0)

    @property
    def fold_name(self) -> str | None:
        """The fold's name in snapshots."""
        return self._folding.name

    @property
    def folds_batches(self) -> bool:
        """Whether the fold can apply many deltas at once."""
        return self._folding.fold_batch is not None

    def fresh(self) -> S:
        """Return the state before the first record."""
        return self._folding.initial()

    def start_at(self, value: S, cursor: int, taken_at: int | None = None) -> None:
        """Start from a state that includes everything before `cursor`."""
        self.value = value
        self.has_state = True
        self.position = cursor
        self.mark = KnownSnapshot(cursor, self.records, self.bytes, taken_at)
        self.frames = SnapshotAssembly(keep=False)

    def search_from(self, position: int) -> None:
        """Start without a state, and load the first whole snapshot at or after `position`."""
        self.start_at(self._folding.initial(), position)
        self.has_state = False
        self.problems = []
        self.frames = SnapshotAssembly(keep=True)
        self._forget_deltas()

    def is_gap(self, batch: Sequence[StreamRecord]) -> bool:
        """Return whether records are missing before or within this batch."""
        first, last = batch[0].seq_num, batch[-1].seq_num
        if last - first + 1 != len(batch):
            return True
        return first != self.position and not self._is_bridged(batch[0])

    def absorb(self, batch: Sequence[StreamRecord]) -> None:
        """Process a whole batch. If `position` is then before its end, read again from there."""
        if self.has_state:
            self.apply(self.sift(batch))
        else:
            self._search(batch)

    def sift(self, batch: Sequence[StreamRecord]) -> Sequence[StreamRecord]:
        """Count a batch that follows without a gap, note its snapshots, and return its deltas."""
        self.position = batch[-1].seq_num + 1
        if any(map(may_be_snapshot, batch)):
            return self._sift_marked(batch)
        self._count(batch)
        return batch

    def apply(self, deltas: Sequence[StreamRecord]) -> None:
        """Fold deltas that `sift` returned."""
        if self._folding.fold_batch is not None:
            if deltas:
                self.value = self._fold_together(self._folding.fold_batch, deltas)
            return
        self.value = self._fold(deltas)

    def apply_one(self, delta: StreamRecord) -> None:
        self.value = self._fold((delta,))

    def _fold(self, deltas: Sequence[StreamRecord]) -> S:
        """Return the state after `deltas`. Fold errors get a note that names the record."""
        fold, value = self._folding.fold, self.value
        none_is_a_state = self._starts_as_none
        try:
            for record in deltas:
                value = fold(value, record)
                if value is None and not none_is_a_state:
                    raise InvalidError(_NO_STATE)
        except Exception as error:
            error.add_note(f"while folding record {record.seq_num} of {self._stream}")
            raise
        return value

    def _fold_together(
        self, fold: Callable[[S, Sequence[StreamRecord]], S], deltas: Sequence[StreamRecord]
    ) -> S:
        try:
            value = fold(self.value, deltas)
            if value is None and not self._starts_as_none:
                raise InvalidError(_NO_STATE)
        except Exception as error:
            first, last = deltas[0].seq_num, deltas[-1].seq_num
            error.add_note(f"while folding records {first} to {last} of {self._stream}")
            raise
        return value

    def _sift_marked(self, batch: Sequence[StreamRecord]) -> list[StreamRecord]:
        deltas = []
        for record in batch:
            if is_delta(record):
                deltas.append(record)
                self._count((record,))
            elif form_of(record) is not None:
                self._note(record)
        return deltas

    def _is_bridged(self, record: StreamRecord) -> bool:
        """Return whether the gap consists only of a single-record snapshot's trim command."""
        form = form_of(record)
        if form is None:
            return False
        try:
            frame = form.parse(record)
        except (SnapshotCorruptError, SnapshotUnsupportedError):
            return False
        covered = frame.opening.covers_before if frame.opening and frame.closing else None
        return covered == self.position == record.seq_num - 1

    def _note(self, record: StreamRecord) -> None:
        """Note a snapshot from this or another process. The state already includes everything in it."""
        try:
            parts = self.frames.add(record, self.records, self.bytes)
        except (SnapshotCorruptError, SnapshotUnsupportedError):
            return  # counts as not taken; a reader that needs it reports the error
        if parts is not None:
            self._remember(parts)

    def _remember(self, parts: PartialSnapshot) -> None:
        self.mark = KnownSnapshot(
            parts.opening.covers_before, parts.records_before, parts.bytes_before, parts.timestamp
        )

    def _count(self, deltas: Sequence[StreamRecord]) -> None:
        self.records += len(deltas)
        self.bytes += sum(len(record.body) for record in deltas)

    def _search(self, batch: Sequence[StreamRecord]) -> None:
        for at, record in enumerate(batch):
            if record.seq_num != self.position:  # trimmed in between: open snapshots are broken
                self.frames.open.clear()
            self.position = record.seq_num + 1
            if is_delta(record):
                self._keep_delta(record)
            elif form_of(record) is not None and self._found_in(record):
                if self.position == record.seq_num + 1 and at + 1 < len(batch):
                    self.absorb(batch[at + 1 :])
                return

    def _keep_delta(self, record: StreamRecord) -> None:
        if not self.frames.open:
            self._forget_deltas()
        elif not self._overflown:
            self._buffered.append(record)
            self._kept_bytes += len(record.body)
            if self._kept_bytes > self._buffer_bytes:
                self._buffered.clear()
                self._overflown = True

    def _forget_deltas(self) -> None:
        self._buffered = []
        self._kept_bytes = 0
        self._overflown = False

    def _found_in(self, record: StreamRecord) -> bool:
        """Load the snapshot that this record completes. Returns False if it completes none."""
        try:
            parts = self.frames.add(record)
            if parts is None:
                return False
            check_fold(parts.name, parts.opening.fold, self.fold_name)
            value = decode_state(self._codec, parts.opening.codec, parts.name, parts.give_away())
        except (SnapshotCorruptError, SnapshotUnsupportedError) as error:
            self.problems.append(error)
            return False
        buffered, overflown, end = self._buffered, self._overflown, self.position
        self.start_at(value, parts.opening.covers_before, parts.timestamp)
        self._forget_deltas()
        self.position = parts.began_at if overflown else end
        deltas = [delta for delta in buffered if delta.seq_num > parts.began_at]
        self._count(deltas)
        self.apply(deltas)
        return True
