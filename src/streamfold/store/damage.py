"""What a store knows of its own damage: which records and rows cannot be read, and in which files.

Reads and background work note damage where they meet it. Nothing is skipped: a call that needs a
damaged row fails with an error that names it, and the rest of the store continues.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from streamfold.errors import DataCorruptError
from streamfold.model.names import BasinName, StreamName, StreamRef
from streamfold.store.engine.engine import TableDamagedError
from streamfold.wording import noun

logger = logging.getLogger(__name__)

#: Damaged places that are listed one by one.
_PLACES_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class Damage:
    """A place that cannot be read, and what that means for users of the store."""

    #: What does not work because of it, as a sentence for operators.
    effect: str
    #: The file to restore, below the location of the store; None if it is not known.
    file: str | None = None
    #: The stream; None if it concerns others, too.
    ref: StreamRef | None = None
    #: The records of the stream; None = all of them.
    seq_nums: range | None = None


class StoreDamagedError(DataCorruptError):
    """A row cannot be read that more than one stream depends on; `effect` says what does not work."""

    code = "store_damaged"

    def __init__(self, effect: str, cause: str, file: str | None) -> None:
        super().__init__(
            f"{effect}: {cause}",
            public_message=f"{effect}, because storage is damaged: the operator finds the file to "
            "restore in the server's log",
        )
        self.effect = effect
        self.file = file

    @property
    def damage(self) -> Damage:
        return Damage(self.effect, self.file)


class StreamDamagedError(DataCorruptError):
    """Records of a stream cannot be read, or its end is unknown; everything else can be read.

    `first_seq_num` is the first damaged record, `next_seq_num` the first one after it that may be read
    on purpose. Both are None if the stream as a whole cannot be used.
    """

    code = "stream_damaged"

    def __init__(
        self,
        basin: str,
        stream: str,
        cause: str,
        file: str | None = None,
        seq_nums: range | None = None,
    ) -> None:
        self.basin, self.stream = basin, stream
        self.file = file
        self.first_seq_num = seq_nums.start if seq_nums is not None else None
        self.next_seq_num = seq_nums.stop if seq_nums is not None else None
        super().__init__(
            f"{self.subject} cannot be read: {cause}",
            public_message=f"{self.subject} cannot be read, because storage is damaged: "
            f"{_way_out(seq_nums)}the operator finds the file to restore in the server's log",
        )

    @property
    def seq_nums(self) -> range | None:
        """The damaged records; None if the stream as a whole cannot be used."""
        if self.first_seq_num is None or self.next_seq_num is None:
            return None
        return range(self.first_seq_num, self.next_seq_num)

    @property
    def ref(self) -> StreamRef:
        return StreamRef(BasinName(self.basin), StreamName(self.stream))

    @property
    def subject(self) -> str:
        return _subject(self.ref, self.seq_nums)

    @property
    def damage(self) -> Damage:
        return Damage(f"{self.subject} cannot be read", self.file, self.ref, self.seq_nums)


def _subject(ref: StreamRef, seq_nums: range | None) -> str:
    stream = f"stream {ref.stream!r} in basin {ref.basin!r}"
    if seq_nums is None:
        return stream
    if len(seq_nums) == 1:
        return f"record {seq_nums.start} of {stream}"
    return f"records {seq_nums.start} to {seq_nums.stop - 1} of {stream}"


def _way_out(seq_nums: range | None) -> str:
    return "" if seq_nums is None else f"read on from seq_num {seq_nums.stop} to leave them out; "


def stream_damaged(
    ref: StreamRef, seq_nums: range | None, error: DataCorruptError, chunk_file: str = ""
) -> StreamDamagedError:
    """`error`, which a read of the stream met, with the stream and its records."""
    file = f"chunks/{chunk_file}" if chunk_file else None
    if isinstance(error, TableDamagedError):
        file = error.file
    return StreamDamagedError(*ref, error.message, file, seq_nums)


@dataclass(frozen=True, slots=True)
class DamageReport:
    """The damage that a store has met since it was opened."""

    places: tuple[Damage, ...] = ()
    #: Places that are not in the list, because it is full.
    unlisted: int = 0
    #: Damaged files of the database, below the location of the store.
    files: tuple[str, ...] = ()
    #: Whether the store takes no changes.
    read_only: bool = False

    @property
    def streams(self) -> int:
        """How many streams have damage."""
        return len({place.ref for place in self.places if place.ref is not None})

    @property
    def summary(self) -> list[str]:
        """What is damaged, without names of streams and files; empty if nothing is."""
        lines = ["the store takes no changes"] if self.read_only else []
        if places := len(self.places) + self.unlisted:
            streams = f"{self.streams} {noun(self.streams, 'stream')}"
            lines.append(f"{places} {noun(places, 'place')} cannot be read, in {streams}")
        if files := len(self.files):
            lines.append(
                f"{files} {noun(files, 'file')} of the database {noun(files, 'is', 'are')} damaged"
            )
        return lines


class KnownDamage:
    """The damage that one mount has met, each place once."""

    def __init__(self) -> None:
        self._places: list[Damage] = []
        #: Places that were met after the list was full.
        self._unlisted = 0
        #: Why the store takes no changes at all; None if it takes them.
        self.read_only: StoreDamagedError | None = None

    def report(self, files: Sequence[str]) -> DamageReport:
        """The state now, with the damaged files of the database."""
        read_only = self.read_only is not None
        return DamageReport(tuple(self._places), self._unlisted, tuple(files), read_only)

    def note(self, damage: Damage) -> None:
        """Add a place; log it unless it is known."""
        for at, place in enumerate(self._places):
            if (joined := _joined(place, damage)) is not None:
                self._places[at] = joined
                return
        if len(self._places) >= _PLACES_MAX:
            self._unlisted += 1
            return
        self._places.append(damage)
        logger.error(
            "%s: %s; see docs/operations/damaged-records.md",
            damage.effect,
            f"the file {damage.file!r} is damaged" if damage.file else "storage is damaged",
        )

    def note_row(self, effect: str, error: DataCorruptError) -> StoreDamagedError:
        """Add a row of the store itself that cannot be read; return the error for its users."""
        file = error.file if isinstance(error, TableDamagedError) else None
        damaged = StoreDamagedError(effect, error.message, file)
        self.note(damaged.damage)
        return damaged


def _joined(place: Damage, damage: Damage) -> Damage | None:
    """Both places as one; None if they are different."""
    if place == damage:
        return place
    first, second = place.seq_nums, damage.seq_nums
    if place.ref != damage.ref or place.ref is None or place.file != damage.file:
        return None
    if first is None or second is None:
        return place if first is second else None
    if second.start > first.stop or first.start > second.stop:
        return None
    joined = range(min(first.start, second.start), max(first.stop, second.stop))
    return replace(place, seq_nums=joined, effect=f"{_subject(place.ref, joined)} cannot be read")
