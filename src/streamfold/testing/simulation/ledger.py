"""What clients were told about one stream, and whether what the store holds agrees with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streamfold.model.records import SequencedRecord, is_command


class ViolationError(Exception):
    """The store broke a promise."""


@dataclass
class StreamLedger:
    """Acknowledged, refused and unknown records of one stream, from its creation to its deletion."""

    name: str
    #: Seconds that records are kept; None = for ever.
    retention: int | None = None
    #: Bodies and arrivals (simulated seconds) of acknowledged records, by seq_num.
    acked: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    refused: set[bytes] = field(default_factory=set)
    #: The highest tail that anyone was told.
    tail: int = 0
    #: Everything below an acknowledged trim is gone; what lies below an attempted one may be.
    trimmed: int = 0
    trim_attempted: int = 0
    #: What a reader found at each seq_num, and where each body is: it stays so.
    seen: dict[int, bytes] = field(default_factory=dict)
    places: dict[bytes, int] = field(default_factory=dict)
    #: The next number of each producer; -1 = it must not go on.
    produced: dict[int, int] = field(default_factory=dict)
    #: Ended by a deletion, or of a fate that nobody knows.
    over: bool = False

    def acknowledge(self, start: int, bodies: Sequence[bytes], arrived: float) -> None:
        """Note an ack; raises if a seq_num was given out twice."""
        for seq_num, body in enumerate(bodies, start):
            if (former := self.acked.get(seq_num)) is not None:
                raise ViolationError(
                    f"{self.name}: seq_num {seq_num} was acknowledged for {former[0]!r} and again "
                    f"for {body!r}"
                )
            if self.seen.get(seq_num, body) != body:
                raise ViolationError(
                    f"{self.name}: seq_num {seq_num} was {self.seen[seq_num]!r} and is now {body!r}"
                )
            self.acked[seq_num] = body, arrived
        self.tail = max(self.tail, start + len(bodies))

    def check_tail(self, tail: int, at_least: int) -> None:
        if tail < at_least:
            raise ViolationError(f"{self.name}: the tail went back from {at_least} to {tail}")
        self.tail = max(self.tail, tail)

    def check_batch(self, records: Sequence[SequencedRecord]) -> None:
        """Raise if the records of one batch do not follow each other."""
        numbers = [int(record.seq_num) for record in records]
        if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise ViolationError(f"{self.name}: a batch has gaps: {numbers}")

    def check_read(
        self, records: Sequence[SequencedRecord], first: int, tail: int, now: float
    ) -> None:
        """Compare what a read from `first` to `tail` returned with what clients were told."""
        present = {int(record.seq_num): record for record in records}
        for seq_num, record in present.items():
            self._check_record(seq_num, record)
        for seq_num, (body, arrived) in self.acked.items():
            if not first <= seq_num < tail or seq_num in present:
                continue
            if seq_num < self.trim_attempted or self._may_be_expired(arrived, now):
                continue
            raise ViolationError(
                f"{self.name}: acknowledged record {seq_num} ({body!r}) is missing from a read of "
                f"[{first}, {tail})"
            )

    def _check_record(self, seq_num: int, record: SequencedRecord) -> None:
        body = record.body
        if seq_num < self.trimmed:
            raise ViolationError(f"{self.name}: record {seq_num} is back although it was trimmed")
        if is_command(record):
            return
        if seq_num in self.acked and self.acked[seq_num][0] != body:
            raise ViolationError(
                f"{self.name}: record {seq_num} is {body!r}, but {self.acked[seq_num][0]!r} was "
                "acknowledged there"
            )
        if body in self.refused:
            raise ViolationError(f"{self.name}: refused record {body!r} is stored at {seq_num}")
        if self.seen.setdefault(seq_num, body) != body:
            raise ViolationError(
                f"{self.name}: record {seq_num} was {self.seen[seq_num]!r} and is now {body!r}"
            )
        if self.places.setdefault(body, seq_num) != seq_num:
            raise ViolationError(
                f"{self.name}: {body!r} is stored twice, at {self.places[body]} and {seq_num}"
            )

    def _may_be_expired(self, arrived: float, now: float) -> bool:
        return self.retention is not None and now - arrived >= self.retention
