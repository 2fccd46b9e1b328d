"""Known damage: unreadable records and rows, and the files that contain them.

Reads and background work record the damage that they find. Nothing is skipped: a call that needs a
damaged row fails with an error that names it, and the rest of the store keeps working.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Final

from streamfold.errors import DataCorruptError, StorageError
from streamfold.model.names import BasinName, StreamName, StreamRef
from streamfold.store import keys, rows
from streamfold.store.engine.engine import Engine, Op, TableDamagedError, readable_pages
from streamfold.store.log import chunks
from streamfold.store.rows import StreamRow
from streamfold.wording import noun

logger = logging.getLogger(__name__)

#: Maximum number of damaged places that are listed individually.
_PLACES_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class Damage:
    """A place that cannot be read, and its effect on users."""

    #: What no longer works, as a sentence for operators.
    effect: str
    #: The file to restore, relative to the store's location; None if unknown.
    file: str | None = None
    #: The affected stream; None if the damage affects others too.
    ref: StreamRef | None = None
    #: The affected records; None = the whole stream.
    seq_nums: range | None = None


class StoreDamagedError(DataCorruptError):
    """Raised when a row that several streams depend on cannot be read. `effect` says what fails."""

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
    """Raised when records of one stream, or its tail, cannot be read. Other streams are unaffected.

    `first_seq_num` is the first damaged record. `next_seq_num` is the first record after it from
    which a client may resume on purpose. Both are None if the whole stream is unusable.
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
        """The damaged records; None if the whole stream is unusable."""
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
    """Wrap a read's `error` with the stream's name and the damaged records."""
    file = f"chunks/{chunk_file}" if chunk_file else None
    if isinstance(error, TableDamagedError):
        file = error.file
    return StreamDamagedError(*ref, error.message, file, seq_nums)


@dataclass(frozen=True, slots=True)
class DamageReport:
    """The damage found since the store was opened."""

    places: tuple[Damage, ...] = ()
    #: Number of places left out because the list is full.
    unlisted: int = 0
    #: Damaged database files, relative to the store's location.
    files: tuple[str, ...] = ()
    #: Whether the store rejects all changes.
    read_only: bool = False

    @property
    def streams(self) -> int:
        """The number of damaged streams."""
        return len({place.ref for place in self.places if place.ref is not None})

    @property
    def summary(self) -> list[str]:
        """A summary without stream or file names; empty if nothing is damaged."""
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
    """The damage that one mount has found, each place once."""

    def __init__(self) -> None:
        self._places: list[Damage] = []
        #: Number of places found after the list was full.
        self._unlisted = 0
        #: Why the store rejects all changes; None if it accepts them.
        self.read_only: StoreDamagedError | None = None

    def report(self, files: Sequence[str]) -> DamageReport:
        """Return the current report, including the database's damaged files."""
        read_only = self.read_only is not None
        return DamageReport(tuple(self._places), self._unlisted, tuple(files), read_only)

    def note(self, damage: Damage) -> None:
        """Record a damaged place, and log it if it is new."""
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
        """Record an unreadable row of the store itself. Returns the error to raise."""
        file = error.file if isinstance(error, TableDamagedError) else None
        damaged = StoreDamagedError(effect, error.message, file)
        self.note(damaged.damage)
        return damaged


def _joined(place: Damage, damage: Damage) -> Damage | None:
    """Merge two places. Returns None if they are distinct."""
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


class LossReport:
    """The records in dropped log files, by stream, as far as those files are readable."""

    def __init__(self) -> None:
        #: First and last seq_num by stream id.
        self._spans: dict[int, tuple[int, int]] = {}
        #: Stream names by id. At first only those whose rows were dropped as well.
        self._names: dict[int, str] = {}
        #: Streams whose state changed. Every append, trim and fence changes it.
        self._states: set[int] = set()
        #: Number of changes to other rows.
        self._others = 0

    def add(self, ops: Sequence[Op]) -> None:
        """Count the rows of a dropped log file."""
        for key, value in ops:
            if value is not None and keys.is_chunk(key):
                self._add_chunk(key, value)
            elif (stream_id := keys.state_stream_id(key)) is not None:
                self._states.add(stream_id)
            else:
                self._others += 1
                if value is not None and keys.STREAMS_START <= key < keys.STREAMS_END:
                    self._add_name(key, value)

    def _add_chunk(self, key: bytes, value: bytes) -> None:
        stream_id, last = keys.chunk_parts(key)
        try:
            first = chunks.decode(value).first_seq_num
        except StorageError:
            first = last
        before = self._spans.get(stream_id, (first, last))
        self._spans[stream_id] = min(before[0], first), max(before[1], last)

    def _add_name(self, key: bytes, value: bytes) -> None:
        with suppress(StorageError):  # then only the id is logged
            self._names[rows.decode(value, StreamRow).id] = "/".join(keys.stream_names(key))

    async def log(self, engine: Engine) -> None:
        """Log one line per stream, with the names that storage still has."""
        if not (self._spans or self._states or self._others):
            return
        span = keys.STREAMS_START, keys.STREAMS_END
        # A damaged row may cost a name, but not the whole report.
        async with aclosing(readable_pages(engine, *span, first=100)) as pages:
            async for page in pages:
                for key, value in page:
                    self._add_name(key, value)
        for stream_id, (first, last) in sorted(self._spans.items()):
            logger.error(
                "dropped: records %d to %d of stream %s", first, last, self._name(stream_id)
            )
        for stream_id in sorted(self._states - self._spans.keys()):
            logger.error("dropped: a change of the state of stream %s", self._name(stream_id))
        if self._others:
            logger.error("dropped: %d changes of other rows", self._others)

    def _name(self, stream_id: int) -> str:
        return self._names.get(stream_id, f"of id {stream_id}, whose name is unknown")
