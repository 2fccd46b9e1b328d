"""Ledgers: what clients learned about a stream, to compare with what the store returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streamfold.model.records import SequencedRecord, is_command


class ViolationError(Exception):
    """The store violated a guarantee."""


@dataclass
class ProducerBook:
    """An idempotent producer of one stream, which retries an append until it is answered."""

    name: str
    epoch: int = 0
    seq: int = 0
    #: The body still without an answer.
    pending: bytes | None = None
    busy: bool = False


@dataclass
class StreamLedger:
    """Acknowledged, rejected and read records of one stream, from creation to deletion."""

    name: str
    #: Retention in seconds, or None for infinite.
    retention: int | None = None
    #: Acknowledged records by seq_num: body and arrival in wall-clock seconds.
    acked: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    refused: set[bytes] = field(default_factory=set)
    #: The highest tail that any client has received.
    tail: int = 0
    #: Records below an acknowledged trim are gone. Records below an attempted trim may be.
    trimmed: int = 0
    trim_attempted: int = 0
    #: The body read at each seq_num, and the seq_num of each body. Neither may change.
    seen: dict[int, bytes] = field(default_factory=dict)
    places: dict[bytes, int] = field(default_factory=dict)
    #: Answered bodies of idempotent producers. Each must be stored exactly once.
    produced: set[bytes] = field(default_factory=set)
    producers: dict[int, ProducerBook] = field(default_factory=dict)
    #: Fencing tokens that any client tried to set.
    fences: set[str] = field(default_factory=lambda: {""})
    #: Attempted snapshots by position, and the last acknowledged position.
    snapshots: dict[int, set[bytes]] = field(default_factory=dict)
    published: int = -1
    #: Whether the stream holds JSON messages.
    json: bool = False
    #: Whether any client has learned that the stream is closed.
    closed: bool = False
    #: Whether the first append creates the stream, which may not have happened yet.
    lazy: bool = False
    #: TTL in seconds since the last use, and the wall-clock time of that use.
    ttl: int | None = None
    used: float = 0.0
    #: Whether the stream was deleted, or its fate is unknown.
    over: bool = False

    def acknowledge(self, start: int, bodies: Sequence[bytes], arrived: float) -> None:
        """Record an ack. Raises ViolationError if it contradicts earlier acks or reads."""
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
            if self.places.setdefault(body, seq_num) != seq_num:
                raise ViolationError(
                    f"{self.name}: {body!r} was acknowledged at {seq_num} and is at "
                    f"{self.places[body]}"
                )
            self.acked[seq_num] = body, arrived
        self.tail = max(self.tail, start + len(bodies))

    def fork(self, name: str, point: int) -> StreamLedger:
        """Return the ledger of a fork that inherits the records before `point`."""
        inherited = {n: record for n, record in self.acked.items() if n < point}
        places = {body: seq_num for seq_num, (body, _) in inherited.items()}
        return StreamLedger(
            name,
            acked=inherited,
            tail=point,
            places=places,
            json=self.json,
            refused=set(self.refused),
            ttl=self.ttl,
            used=self.used,
        )

    def refuse(self, bodies: Sequence[bytes]) -> None:
        """Record a rejection. Raises ViolationError if a rejected body is known to be stored."""
        for body in bodies:
            if body in self.places:
                raise ViolationError(
                    f"{self.name}: {body!r} was refused, and a reader got it at {self.places[body]}"
                )
        self.refused.update(bodies)

    def may_be_missing(self, latest: float) -> bool:
        """Return whether the stream may legitimately be missing. `latest` is as in `check_read`."""
        if self.over or self.lazy:
            return True
        return self.ttl is not None and latest - self.used >= self.ttl

    def check_tail(self, tail: int, at_least: int) -> None:
        if tail < at_least:
            raise ViolationError(f"{self.name}: the tail went back from {at_least} to {tail}")
        self.tail = max(self.tail, tail)

    def check_batch(self, records: Sequence[SequencedRecord]) -> None:
        """Raise ViolationError if the seq_nums of one batch are not consecutive."""
        numbers = [int(record.seq_num) for record in records]
        if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise ViolationError(f"{self.name}: a batch has gaps: {numbers}")

    def check_read(
        self, records: Sequence[SequencedRecord], first: int, tail: int, latest: float
    ) -> None:
        """Compare a read from `first` to `tail` with what clients learned.

        `latest` is the latest time the wall clock has shown.
        """
        for record in records:
            seq_num = int(record.seq_num)
            if seq_num < self.trimmed:
                raise ViolationError(
                    f"{self.name}: record {seq_num} is back although it was trimmed"
                )
            if not is_command(record):
                self.see(seq_num, record.body)
        present = {int(record.seq_num) for record in records}
        self.check_complete(present, first, tail, latest)

    def check_complete(self, present: set[int], first: int, end: int, latest: float) -> None:
        """Raise ViolationError if an acknowledged record of the range is missing."""
        for seq_num, (body, arrived) in self.acked.items():
            if not first <= seq_num < end or seq_num in present:
                continue
            if seq_num < self.trim_attempted or self._may_be_expired(arrived, latest):
                continue
            raise ViolationError(
                f"{self.name}: acknowledged record {seq_num} ({body!r}) is missing from a read of "
                f"[{first}, {end})"
            )

    def check_bodies(self, bodies: Sequence[bytes], first: int, end: int, latest: float) -> None:
        """Compare bodies read without seq_nums from [`first`, `end`) with what clients learned."""
        present, last = set[int](), -1
        for body in bodies:
            if body in self.refused:
                raise ViolationError(f"{self.name}: a read returned refused {body!r}")
            place = self.places.get(body)
            if place is None:
                continue
            if not first <= place < end:
                raise ViolationError(
                    f"{self.name}: {body!r}, which is at {place}, is in a read of [{first}, {end})"
                )
            if place <= last:
                raise ViolationError(f"{self.name}: {body!r} at {place} came after {last}")
            present.add(place)
            last = place
        if len(set(bodies)) < len(bodies):
            raise ViolationError(f"{self.name}: a read returned something twice: {bodies}")
        self.check_complete(present, first, end, latest)

    def check_produced(self) -> None:
        """Raise ViolationError if an answered producer append is missing. Call after a full read."""
        if self.trim_attempted or self.retention is not None:
            return
        for body in self.produced:
            if body not in self.places:
                raise ViolationError(f"{self.name}: {body!r} of a producer is missing")

    def see(self, seq_num: int, body: bytes) -> None:
        """Record a body that a reader got. Raises ViolationError if it contradicts the ledger."""
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

    def _may_be_expired(self, arrived: float, latest: float) -> bool:
        return self.retention is not None and latest - arrived >= self.retention
