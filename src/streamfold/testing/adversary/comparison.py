"""Compares a stream as read with its life in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamfold.testing.adversary.ledger import (
    Append,
    Breach,
    BrokenPromiseError,
    Ledger,
    Life,
    OperationOutcome,
)
from streamfold.testing.adversary.reading import (
    Recognizer,
    StoredRecord,
    StreamContents,
    note_seen,
    observe,
)

#: Outcomes of appends that took effect.
CERTAIN = (OperationOutcome.KEPT, OperationOutcome.SEEN)
#: Milliseconds by which record timestamps and this process's clock may differ.
_SLACK_MS = 50


@dataclass(slots=True)
class Comparison:
    """A stream as read, and its life in the ledger."""

    ledger: Ledger
    life: Life
    contents: StreamContents
    generation: int
    began_ms: int

    def check_records(self) -> None:
        """Check that every record was appended, once, in order, at its place and with its bytes."""
        records, life = self.contents.records, self.life
        self._check_dense(records)
        recognizer = Recognizer(self.ledger, life.history)
        log: list[tuple[StoredRecord, Append, int]] = []
        for record in records:
            named = recognizer.recognize(record)
            if named is None:
                continue
            append, index = named
            owner = life.owner(record.seq_num)
            self._check_life(append, owner, record)
            observe(self.ledger, append, index, record.seq_num)
            append.life = owner
            note_seen(life, record.seq_num, append, index)
            log.append((record, append, index))
        self.ledger.totals.records_checked += len(records)
        self._check_whole(log)
        self._check_order([(record, append) for record, append, index in log if not index])
        self._check_conditions(log)

    def _check_dense(self, records: Sequence[StoredRecord]) -> None:
        history, contents = self.life.history, self.contents
        stamp, position = 0, contents.first
        for record in records:
            if record.seq_num != position:
                raise BrokenPromiseError(
                    history, f"{history} has no record at {position}, but one at {record.seq_num}"
                )
            if record.timestamp < stamp:
                raise BrokenPromiseError(
                    history, f"timestamps of {history} decrease at {position}", Breach.REORDERED
                )
            position, stamp = position + 1, record.timestamp
        if position != contents.tail or contents.tail < self.life.tail:
            raise BrokenPromiseError(
                history,
                f"{history} ends at {position} and reports the tail {contents.tail}: its tail had "
                f"reached {self.life.tail}",
                Breach.LOST,
            )

    def _check_life(self, append: Append, owner: Life, record: StoredRecord) -> None:
        fits = append.history is owner.history and append.life in (None, owner)
        if fits and append.life is None:
            fits = append.ended is None or append.ended >= owner.born
            fits = fits and (owner.died is None or append.began <= owner.died)
        if not fits:
            raise BrokenPromiseError(
                self.life.history,
                f"append {append.id} to {append.history} is in {owner.history} at "
                f"{record.seq_num}, where it does not belong (life {owner.number})",
            )

    def _check_whole(self, log: Sequence[tuple[StoredRecord, Append, int]]) -> None:
        """Check that appends are complete, up to the tail or fork point."""
        ends = [life.source[1] for life in self.life.ancestors() if life.source is not None]
        for record, append, index in log:
            last = index == append.length - 1
            if not last and record.seq_num + 1 in (self.contents.tail, *ends):
                if record.seq_num + 1 in ends:
                    continue  # a fork may begin within an append
                raise BrokenPromiseError(
                    self.life.history,
                    f"append {append.id} ends at its record {index} of {append.length}",
                )

    def _check_order(self, log: Sequence[tuple[StoredRecord, Append]]) -> None:
        """Check that an append that began after another ended comes later."""
        latest: Append | None = None
        for record, append in log:
            if latest is not None and append.ended is not None and append.ended < latest.began:
                raise BrokenPromiseError(
                    self.life.history,
                    f"append {append.id}, at {record.seq_num}, ended before append {latest.id} "
                    f"began, which precedes it",
                    Breach.REORDERED,
                )
            if latest is None or append.began > latest.began:
                latest = append

    def _check_conditions(self, log: Sequence[tuple[StoredRecord, Append, int]]) -> None:
        """Check each append's conditions at its place: match_seq_num, fencing token, producer."""
        history = self.life.history
        token: str | None = None if self.contents.first or self.life.source else ""
        producers: dict[str, tuple[int, int]] = {}
        for record, append, index in log:
            if record.command == "fence":
                token = record.body.decode()
            if index:
                continue
            if append.match not in (None, record.seq_num):
                raise BrokenPromiseError(
                    history, f"append {append.id} asked for {append.match}, is at {record.seq_num}"
                )
            if token is not None and append.token not in (None, token):
                raise BrokenPromiseError(
                    history,
                    f"append {append.id} at {record.seq_num} has the fencing token "
                    f"{append.token!r}, and the stream's is {token!r} there",
                )
            if append.producer is not None and self.life.owner(record.seq_num) is self.life:
                producer, *number = append.producer
                last = producers.get(producer)
                follows = last is None or number in ([last[0], last[1] + 1], [last[0] + 1, 0])
                if not follows:
                    raise BrokenPromiseError(
                        history, f"append {append.id} of producer {producer} follows {last}"
                    )
                producers[producer] = (number[0], number[1])

    def check_appends(self) -> None:
        """Check that every acknowledged append is present, unless trimmed or expired."""
        life, contents = self.life, self.contents
        trimmed = max((point for point, _ in self._trims()), default=0)
        for ancestor in life.ancestors():
            for append in ancestor.history.appends:
                if append.life is ancestor and append.outcome in CERTAIN:
                    self._check_present(append, trimmed)
        if contents.first > max(trimmed, life.first) and life.history.age is None:
            raise BrokenPromiseError(
                life.history,
                f"{life.history} begins at {contents.first}, and was trimmed to {trimmed} at most",
            )

    def _check_present(self, append: Append, trimmed: int) -> None:
        place, contents = append.place, self.contents
        if place is None:  # a producer's repetition, whose answer contains no place
            if not contents.first and append.life is self.life:
                raise BrokenPromiseError(
                    append.history,
                    f"append {append.id} was {append.outcome}, and is lost",
                    Breach.LOST,
                )
            return
        for seq_num in range(place, place + append.length):
            if self.life.owner(seq_num) is not append.life:
                continue  # beyond the point at which this life was forked
            if seq_num >= contents.first:
                if seq_num >= contents.tail:
                    raise BrokenPromiseError(
                        append.history,
                        f"append {append.id} was {append.outcome} at {place}, and is lost: "
                        f"{self.life.history} ends at {contents.tail}",
                        Breach.LOST,
                    )
                continue  # the record there has been compared already
            if seq_num >= max(trimmed, self.life.first) and not self._expired(append):
                raise BrokenPromiseError(
                    append.history,
                    f"append {append.id} was {append.outcome} at {place}, and is lost: "
                    f"{self.life.history} begins at {contents.first}",
                    Breach.LOST,
                )

    def _expired(self, append: Append) -> bool:
        age = self.life.history.age
        # By the latest clock of any server: expired records stay away even if the clock goes back.
        latest = self.ledger.clock.latest_ms
        return age is not None and latest >= append.began_ms + age * 1000 - _SLACK_MS

    def _trims(self) -> list[tuple[int, bool]]:
        """Return possible trim points of this life, and whether a snapshot set each."""
        points = []
        for life in self.life.ancestors():
            points.append((life.trimmed, False))
            for append in life.history.appends:
                possible = append.outcome not in (OperationOutcome.REFUSED, OperationOutcome.ABSENT)
                if append.trim is not None and possible and append.life in (None, life):
                    points.append((append.trim, False))
            for snapshot in life.snapshots:
                possible = snapshot.outcome not in (
                    OperationOutcome.REFUSED,
                    OperationOutcome.ABSENT,
                )
                if snapshot.trims and possible:
                    points.append((snapshot.position, True))
        return points

    def check_start(self, snapshots: Sequence[int]) -> None:
        """Check that trimmed and expired records stay away, and snapshots cover what they trimmed."""
        life, first = self.life, self.contents.first
        history = life.history
        due = [self._known_first()]
        for append in history.appends:
            effective = append.life is life and append.outcome in CERTAIN
            if append.trim is not None and effective and append.generation < self.generation:
                due.append(append.trim)
        due += [s.position for s in life.snapshots if s.trims and s.outcome in CERTAIN]
        if first < max(due):
            raise BrokenPromiseError(
                history, f"{history} begins at {first} again, and was trimmed to {max(due)}"
            )
        commands = max(
            (point for point, by_snapshot in self._trims() if not by_snapshot), default=0
        )
        by_snapshot = history.age is None and life.source is None and first > commands
        if by_snapshot and max(snapshots, default=0) < first:
            raise BrokenPromiseError(
                history, f"{history} begins at {first}, and no snapshot covers that: {snapshots}"
            )
        if history.age is not None and self.contents.records:
            self._check_expiry()

    def _check_expiry(self) -> None:
        age = self.life.history.age or 0
        for record in self.contents.records:
            number, _ = self.life.seen.get(record.seq_num, (None, 0))
            append = None if number is None else self.ledger.appends[number]
            if append is None or append.ended_ms is None:
                continue
            if append.ended_ms + age * 1000 < self.began_ms - _SLACK_MS:
                raise BrokenPromiseError(
                    self.life.history,
                    f"append {append.id} at {record.seq_num} expired, and is still returned",
                )

    def conclude(self) -> None:
        """Record the stream's range: from now on it never begins earlier or ends before."""
        self.life.first = max(self._known_first(), self.contents.first)
        self.life.first_ms = 0 if self.life.history.age is None else self.began_ms
        self.life.tail = max(self.life.tail, self.contents.tail)
        self.life.trimmed = max(point for point, by_snapshot in self._trims() if not by_snapshot)

    def _known_first(self) -> int:
        """Return the last known first record, or 0 if set by age and the clock has gone back."""
        return self.life.first if self.began_ms >= self.life.first_ms else 0
