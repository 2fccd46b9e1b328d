"""The adversary's ledger: all its requests and the answers that it got.

An append has a *place*, the seq_num of its first record, once an answer or a reader has shown it. A
stream name has *lives*, one per creation. An append that overlaps no creation or deletion of its stream
belongs to the current life, any other to the life in which it is found.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Breach(enum.StrEnum):
    """The kind of broken guarantee, for a report's figures."""

    LOST = "lost"
    DOUBLED = "doubled"
    REORDERED = "reordered"
    UNEXPLAINED = "unexplained 500s"
    OTHER = "other violations"


class BrokenPromiseError(AssertionError):
    """The store broke a guarantee. `history` belongs to the affected stream, if any."""

    def __init__(
        self, history: StreamHistory | None, text: str, breach: Breach = Breach.OTHER
    ) -> None:
        super().__init__(text)
        self.history = history
        self.breach = breach


#: Maximum steps kept for scripts: of servers and storage, and of one stream.
_EVENTS_KEPT, _LINES_KEPT = 2000, 4000


class OperationOutcome(enum.StrEnum):
    """What the client knows about an operation."""

    PENDING = "no answer yet"
    KEPT = "acknowledged"
    REFUSED = "refused"
    UNKNOWN = "outcome unknown"
    SEEN = "outcome unknown, then seen"
    ABSENT = "outcome unknown, then found missing"


class PlannedRecord(NamedTuple):
    """One record of an append. `command` names a command, or is empty."""

    command: str
    body: bytes


@dataclass(slots=True)
class Clock:
    """Logical and server time. Each beginning and end of an operation has its own tick."""

    tick: int = 0
    #: Milliseconds by which the server's system clock is ahead of the real one.
    ahead_ms: int = 0
    #: The latest time of any server. No stored time is later.
    latest_ms: int = 0

    def advance(self) -> int:
        self.tick += 1
        return self.tick

    def wall_ms(self) -> int:
        """Milliseconds since the Unix epoch by the server's clock."""
        now = time.time_ns() // 1_000_000 + self.ahead_ms
        self.latest_ms = max(self.latest_ms, now)
        return now


@dataclass(slots=True, eq=False)
class Append:
    """One append. All its records derive from its fields."""

    id: int
    history: StreamHistory
    count: int
    size: int
    #: Generation of the server that it was sent to.
    generation: int
    began: int
    began_ms: int
    match: int | None = None
    token: str | None = None
    #: Commands follow the data records, which identify them.
    fence: str | None = None
    trim: int | None = None
    producer: tuple[str, int, int] | None = None
    outcome: OperationOutcome = OperationOutcome.PENDING
    ended: int | None = None
    #: When its records had arrived, by a monotonic clock.
    ended_ms: int | None = None
    #: The seq_num of its first record, once known.
    place: int | None = None
    #: None while several are possible.
    life: Life | None = None
    #: Whether an attempt got no answer. If so, a rejection of another attempt proves nothing.
    doubtful: bool = False
    #: The stream's `changes`, and the tail of its life, when it began.
    changes: int = 0
    floor: int = 0

    @property
    def length(self) -> int:
        return self.count + (self.fence is not None) + (self.trim is not None)

    def record(self, index: int) -> PlannedRecord:
        if index < self.count:
            return PlannedRecord("", self.body(index))
        if self.fence is not None and index == self.count:
            return PlannedRecord("fence", self.fence.encode())
        if self.trim is not None and index == self.length - 1:
            return PlannedRecord("trim", self.trim.to_bytes(8, "big"))
        raise IndexError(index)

    def records(self) -> list[PlannedRecord]:
        return [self.record(index) for index in range(self.length)]

    def body(self, index: int) -> bytes:
        name = f"{self.id}.{index}."
        filler = (name * (self.size // len(name) + 1))[: self.size]
        text = name + filler
        return f'"{text}"'.encode() if self.history.json else text.encode()

    def __str__(self) -> str:
        parts = [f"append {self.id}: {self.count} records of {self.size} bytes"]
        parts += [f"match_seq_num {self.match}"] if self.match is not None else []
        parts += [f"token {self.token!r}"] if self.token is not None else []
        parts += [f"fence {self.fence!r}"] if self.fence is not None else []
        parts += [f"trim {self.trim}"] if self.trim is not None else []
        parts += ["producer {} epoch {} seq {}".format(*self.producer)] if self.producer else []
        return ", ".join(parts)


@dataclass(slots=True, eq=False)
class SnapshotPublication:
    """One published snapshot."""

    id: int
    position: int
    trims: bool
    generation: int
    life: Life | None = None
    outcome: OperationOutcome = OperationOutcome.PENDING

    def content(self) -> bytes:
        return f"snapshot {self.id} at {self.position} ".encode() * 50


@dataclass(slots=True, eq=False)
class Life:
    """A stream from one creation to its deletion."""

    history: StreamHistory
    number: int
    born: int
    #: When its creation was requested and answered, by the server's clock.
    born_ms: int
    answered_ms: int | None = field(default=None, kw_only=True)
    #: For forks, the source and the seq_num where the fork begins.
    source: tuple[Life, int] | None = None
    died: int | None = None
    #: As listed, once known.
    created_at: str | None = None
    #: Minimum tail, and minimum first record.
    tail: int = 0
    first: int = 0
    #: The server's clock when `first` may have moved by age. An earlier clock makes records young.
    first_ms: int = 0
    #: Maximum trim point at the last accounting. Its trim commands may have been forgotten since.
    trimmed: int = 0
    #: Records that readers got, as (append, index) by seq_num.
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)
    snapshots: list[SnapshotPublication] = field(default_factory=list)

    def owner(self, seq_num: int) -> Life:
        """Return the life whose append wrote `seq_num`: this one, or one that it was forked from."""
        life = self
        while life.source is not None and seq_num < life.source[1]:
            life = life.source[0]
        return life

    def ancestors(self) -> Iterator[Life]:
        life: Life | None = self
        while life is not None:
            yield life
            life = life.source[0] if life.source else None


class Existence(enum.StrEnum):
    ALIVE = "exists"
    GONE = "does not exist"
    UNSETTLED = "may or may not exist"


@dataclass(slots=True, eq=False)
class StreamHistory:
    """The history of one stream name."""

    basin: str
    name: str
    #: Whether it is an application/json stream, created through Durable Streams.
    json: bool
    #: Seconds, for streams with finite retention.
    age: int | None
    #: Whether an append creates the stream.
    creates: bool
    clock: Clock
    existence: Existence = Existence.GONE
    lives: list[Life] = field(default_factory=list)
    appends: list[Append] = field(default_factory=list)
    births: int = 0
    #: Number of creations and deletions begun or ended, and of those in progress.
    changes: int = 0
    changing: int = 0
    #: When the last deletion began.
    deleted: int = 0
    deleted_ms: int = 0
    #: Number of forks being created. The stream is not deleted meanwhile.
    forking: int = 0
    lines: list[tuple[int, str]] = field(default_factory=list)

    @property
    def life(self) -> Life | None:
        return self.lives[-1] if self.lives else None

    @property
    def settled(self) -> bool:
        """Whether no creation or deletion is in progress."""
        return not self.changing and self.existence is not Existence.UNSETTLED

    @property
    def living(self) -> Life | None:
        """The current life, or None if there is none or it is uncertain."""
        return self.life if self.settled and self.existence is Existence.ALIVE else None

    def note(self, text: str) -> int:
        tick = self.clock.advance()
        self.lines.append((tick, text))
        return tick

    def begin_change(self, text: str, *, deletes: bool = False) -> int:
        """Record the beginning of a creation or deletion. Until its end, existence is uncertain."""
        self.changing += 1
        self.changes += 1
        tick = self.note(text)
        if deletes:
            self.deleted, self.deleted_ms = tick, self.clock.wall_ms()
        return tick

    def end_change(self, text: str) -> None:
        self.changing -= 1
        self.changes += 1
        self.note(text)

    def be_born(self, tick: int, born_ms: int, source: tuple[Life, int] | None = None) -> Life:
        self.births += 1
        life = Life(self, self.births, tick, born_ms, source)
        if source is not None:
            life.tail, life.first = source[1], min(source[0].first, source[1])
            life.first_ms = source[0].first_ms
        self.lives.append(life)
        self.existence = Existence.ALIVE
        return life

    def die(self) -> None:
        if self.life is not None and self.life.died is None:
            self.life.died = self.clock.advance()
        self.existence = Existence.GONE

    def may_hide(self, append: Append) -> bool:
        """Return whether `append` may be expired for now. An earlier clock makes it young again.

        Only positions from its `floor` on count, and only while its stream exists.
        """
        life = self.living
        if self.age is None or life is None or append.life not in (None, life):
            return False
        if append.ended is not None and append.ended < life.born:
            return False
        floor = append.floor if append.changes == self.changes else 0
        return life.first > (floor if append.place is None else append.place)

    def forget(self, needed: set[Life], appends: dict[int, Append]) -> None:
        """Forget lives that are not needed, and their appends."""
        present = []
        for append in self.appends:
            pending = append.outcome in (OperationOutcome.PENDING, OperationOutcome.UNKNOWN)
            repeated = append.producer is not None and append.outcome is OperationOutcome.ABSENT
            hidden = append.outcome in (
                OperationOutcome.KEPT,
                OperationOutcome.SEEN,
            ) and self.may_hide(append)
            if pending or repeated or hidden or append.life in needed:
                present.append(append)
            else:
                del appends[append.id]
        self.appends = present
        self.lives = [life for life in self.lives if life in needed or life is self.life]
        del self.lines[:-_LINES_KEPT]

    def __str__(self) -> str:
        return f"{self.basin}/{self.name}"


@dataclass
class Totals:
    """Figures of a run."""

    rounds: int = 0
    kills: int = 0
    stops: int = 0
    pauses: int = 0
    takeovers: int = 0
    power_cuts: int = 0
    clock_moves: int = 0
    storage_faults: int = 0
    acknowledged: int = 0
    refused: int = 0
    unknown: int = 0
    seen_later: int = 0
    missing_later: int = 0
    reads: int = 0
    followed: int = 0
    accountings: int = 0
    records_checked: int = 0
    snapshots: int = 0
    forks: int = 0
    deletions: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in vars(self).items())


@dataclass
class Ledger:
    """The ledger of one store."""

    clock: Clock = field(default_factory=Clock)
    histories: dict[tuple[str, str], StreamHistory] = field(default_factory=dict)
    appends: dict[int, Append] = field(default_factory=dict)
    #: Events of servers and storage, for all scripts.
    events: list[tuple[int, str]] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    publications: int = 0
    #: Appends so far.
    numbers: int = 0

    def event(self, text: str) -> None:
        self.events.append((self.clock.advance(), text))

    def begin(self, history: StreamHistory, generation: int, count: int, size: int) -> Append:
        number, self.numbers = self.numbers, self.numbers + 1
        append = Append(
            number, history, count, size, generation, self.clock.advance(), self.clock.wall_ms()
        )
        append.life, append.changes = history.living, history.changes
        append.floor = append.life.tail if append.life is not None else 0
        self.appends[number] = append
        history.appends.append(append)
        return append

    def repeat(self, append: Append) -> None:
        """Prepare a producer's append to be sent again."""
        append.outcome, append.ended, append.ended_ms = OperationOutcome.PENDING, None, None
        append.life, append.changes = append.history.living, append.history.changes

    def end(
        self, append: Append, outcome: OperationOutcome, place: int | None, answer: str
    ) -> None:
        """Record the answer to an append. Its place must be after everything acknowledged before."""
        append.doubtful |= outcome is OperationOutcome.UNKNOWN
        if outcome is OperationOutcome.REFUSED and append.doubtful:
            outcome = OperationOutcome.UNKNOWN
        if outcome is OperationOutcome.UNKNOWN and append.place is not None:
            outcome = OperationOutcome.SEEN
        if outcome is OperationOutcome.REFUSED and append.place is not None:
            raise BrokenPromiseError(
                append.history, f"append {append.id} is at {append.place}, and refused: {answer}"
            )
        append.outcome = outcome
        tick = self.clock.advance()
        open_ended = outcome in (OperationOutcome.UNKNOWN, OperationOutcome.SEEN)
        if open_ended or append.changes != append.history.changes:
            append.life = None
        if not open_ended:  # otherwise it may still happen until its server is gone
            self.clock.wall_ms()
            append.ended, append.ended_ms = tick, self.clock.latest_ms
        append.history.lines.append((append.began, f"{append} begins"))
        where = f" at {place}" if place is not None else ""
        append.history.lines.append((tick, f"append {append.id} {outcome}{where}: {answer}"))
        if outcome is OperationOutcome.KEPT:
            self.totals.acknowledged += append.length
        elif outcome is OperationOutcome.REFUSED:
            self.totals.refused += 1
        else:
            self.totals.unknown += 1
        if place is None:
            return
        self.put(append, place)
        if (life := append.life) is not None:
            if place < append.floor:
                raise BrokenPromiseError(
                    append.history,
                    f"append {append.id} was acknowledged at seq_num {place}, although the tail had "
                    f"reached {append.floor} before it began: acknowledged records are lost",
                    Breach.LOST,
                )
            life.tail = max(life.tail, place + append.length)

    def give_up_unknown(self, generation: int) -> None:
        """Declare unknown appends to servers before `generation` missing. They must never appear.

        If age may hide an append, its outcome stays unknown.
        """
        tick = self.clock.advance()
        for append in self.appends.values():
            if append.outcome is not OperationOutcome.UNKNOWN or append.generation >= generation:
                continue
            append.ended = append.ended or tick  # its server is gone
            if not append.history.may_hide(append):
                append.outcome = OperationOutcome.ABSENT
                self.totals.missing_later += 1

    def forget_past(self) -> None:
        """Forget appends of deleted streams and missing appends. Call right after an accounting.

        If one of their records appears after all, it counts as one that nobody appended.
        """
        needed = {
            ancestor
            for history in self.histories.values()
            if history.existence is not Existence.GONE and history.life is not None
            for ancestor in history.life.ancestors()
        }
        for history in self.histories.values():
            history.forget(needed, self.appends)
        del self.events[:-_EVENTS_KEPT]

    def put(self, append: Append, place: int) -> None:
        """Record an append's place, which never changes."""
        if append.place is None:
            append.place = place
        elif append.place != place:
            raise BrokenPromiseError(
                append.history,
                f"append {append.id} is at seq_num {append.place} and also at {place}",
                Breach.DOUBLED,
            )
