"""Turns records into state: folds deltas, and loads snapshots while the state is unknown.

No I/O: records in, state out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from streamfold.errors import InvalidError, StreamfoldError
from streamfold.follow.clients.client import StreamRecord
from streamfold.follow.encoding.assembly import Assembly, PartialSnapshot
from streamfold.follow.encoding.codecs import Codec, check_fold, decode_state
from streamfold.follow.encoding.record_forms import form_of, is_delta, may_be_snapshot
from streamfold.follow.errors import SnapshotCorruptError, SnapshotUnsupportedError

S = TypeVar("S")

#: Characters: the name is a header of records, and part of a description of limited length.
FOLD_NAME_MAX = 100
_FOLD_NAME = re.compile(rf"[\x20-\x7e]{{1,{FOLD_NAME_MAX}}}")
#: Bytes of deltas kept while a framed snapshot is read around them. Beyond that they are dropped and
#: read again after the snapshot, which costs time instead of memory.
BUFFER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class FoldSpec(Generic[S]):
    """How deltas become state."""

    fold: Callable[[S, StreamRecord], S]
    initial: Callable[[], S]
    #: The same as `fold` over many deltas at once.
    fold_batch: Callable[[S, Sequence[StreamRecord]], S] | None = None
    #: Goes with every snapshot; one that a fold of another name made is refused. None = not named.
    name: str | None = None

    def __post_init__(self) -> None:
        if self.name is not None and not _FOLD_NAME.fullmatch(self.name):
            raise InvalidError(
                f"fold name {self.name[:120]!r} must have 1 to {FOLD_NAME_MAX} printable "
                "ASCII characters"
            )


@dataclass(frozen=True, slots=True)
class KnownSnapshot:
    """A whole snapshot: its cursor, and how much came before it."""

    cursor: int
    records: int
    bytes: int
    #: Milliseconds since the Unix epoch; None when it is unknown.
    taken_at: int | None


class Replay(Generic[S]):
    """The state, and the position up to which it has everything."""

    def __init__(
        self, folding: FoldSpec[S], codec: Codec[S], *, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        self._folding = folding
        self._codec = codec
        self._buffer_bytes = buffer_bytes
        #: Deltas taken so far, and bytes of their bodies.
        self.records = self.bytes = 0
        self.problems: list[StreamfoldError] = []
        self._kept: list[StreamRecord] = []
        self._kept_bytes = 0
        self._overflown = False
        self.value: S = folding.initial()
        self.start_at(self.value, 0)

    @property
    def fold_name(self) -> str | None:
        """What the fold is called in snapshots."""
        return self._folding.name

    @property
    def folds_batches(self) -> bool:
        """Whether the fold takes many deltas at once."""
        return self._folding.fold_batch is not None

    def fresh(self) -> S:
        """The state before the first record."""
        return self._folding.initial()

    def start_at(self, value: S, cursor: int, taken_at: int | None = None) -> None:
        """Begin with a state that has everything before `cursor`."""
        self.value = value
        self.known = True
        self.position = cursor
        self.mark = KnownSnapshot(cursor, self.records, self.bytes, taken_at)
        self.frames = Assembly(keep=False)

    def search_from(self, position: int) -> None:
        """Begin without a state: the first whole snapshot at or after `position` will give one."""
        self.start_at(self._folding.initial(), position)
        self.known = False
        self.problems = []
        self.frames = Assembly(keep=True)
        self._forget_deltas()

    def is_gap(self, batch: Sequence[StreamRecord]) -> bool:
        """Whether records between what was taken and this batch are missing."""
        first, last = batch[0].seq_num, batch[-1].seq_num
        if last - first + 1 != len(batch):
            return True
        return first != self.position and not self._is_bridged(batch[0])

    def absorb(self, batch: Sequence[StreamRecord]) -> None:
        """Take a batch whole; afterwards `position` may be before its end, to be read from again."""
        if self.known:
            self.apply(self.sift(batch))
        else:
            self._search(batch)

    def sift(self, batch: Sequence[StreamRecord]) -> Sequence[StreamRecord]:
        """Take note of a batch that follows without a gap, and return the deltas in it."""
        self.position = batch[-1].seq_num + 1
        if any(map(may_be_snapshot, batch)):
            return self._sift_marked(batch)
        self._count(batch)
        return batch

    def apply(self, deltas: Sequence[StreamRecord]) -> None:
        """Fold deltas that `sift` returned."""
        if self._folding.fold_batch is not None:
            if deltas:
                self.value = self._folding.fold_batch(self.value, deltas)
            return
        fold, value = self._folding.fold, self.value
        for record in deltas:
            value = fold(value, record)
        self.value = value

    def apply_one(self, delta: StreamRecord) -> None:
        self.value = self._folding.fold(self.value, delta)

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
        """Whether only the trim command is missing that a snapshot in one record came with."""
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
        """Note a snapshot that this or another process wrote: the state already has all of it."""
        try:
            parts = self.frames.add(record, self.records, self.bytes)
        except (SnapshotCorruptError, SnapshotUnsupportedError):
            return  # a reader that needs it reports it; here it counts as not taken
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
            if record.seq_num != self.position:  # trimmed in between: what was begun is broken
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
            self._kept.append(record)
            self._kept_bytes += len(record.body)
            if self._kept_bytes > self._buffer_bytes:
                self._kept.clear()
                self._overflown = True

    def _forget_deltas(self) -> None:
        self._kept = []
        self._kept_bytes = 0
        self._overflown = False

    def _found_in(self, record: StreamRecord) -> bool:
        """Whether this record completed a snapshot, which is the state from now on."""
        try:
            parts = self.frames.add(record)
            if parts is None:
                return False
            check_fold(parts.name, parts.opening.fold, self.fold_name)
            value = decode_state(self._codec, parts.opening.codec, parts.name, parts.give_away())
        except (SnapshotCorruptError, SnapshotUnsupportedError) as error:
            self.problems.append(error)
            return False
        kept, overflown, end = self._kept, self._overflown, self.position
        self.start_at(value, parts.opening.covers_before, parts.timestamp)
        self._forget_deltas()
        self.position = parts.began_at if overflown else end
        deltas = [delta for delta in kept if delta.seq_num > parts.began_at]
        self._count(deltas)
        self.apply(deltas)
        return True
