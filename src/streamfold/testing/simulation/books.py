"""The books of one run: streams with their ledgers, simulated clocks, and the trace of every call."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamfold.errors import (
    DataCorruptError,
    NotFoundError,
    StreamDeletingError,
    StreamfoldError,
)
from streamfold.testing.simulation.ledger import StreamLedger, ViolationError
from streamfold.testing.simulation.loop import chance

BASIN = "simulated-basin"
#: 2026-01-01T00:00:00Z in milliseconds: where simulated time starts.
EPOCH = 1_767_225_600_000
#: Seconds that records of half the streams are kept.
RETENTION = 60
#: Bodies of one operation at most.
BODIES_MAX = 100


@dataclass
class SimulationReport:
    """What one run did."""

    seed: int
    #: Callbacks that the event loop ran.
    steps: int = 0
    calls: int = 0
    acked: int = 0
    refused: int = 0
    unknown: int = 0
    stops: int = 0
    crashes: int = 0
    replacements: int = 0
    #: Requests through the faces, clients that vanished, answers that broke off.
    requests: int = 0
    vanished: int = 0
    broken: int = 0
    #: Records that readers and followers compared.
    compared: int = 0
    #: Faults of storage, by kind.
    faults: Counter[str] = field(default_factory=Counter)
    #: One line for each call and event.
    trace: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """The same for two runs that did the same."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()


class Books:
    """Everything that clients of one run know."""

    def __init__(self, report: SimulationReport) -> None:
        self.report = report
        #: Set before anything runs.
        self.loop: asyncio.AbstractEventLoop
        self.streams: dict[str, StreamLedger] = {}
        #: Positions up to which somebody may still trim a stream of that name: a request may reach the
        #: stream that replaced the one it was meant for.
        self.trims: dict[str, int] = {}
        self._names = 0
        self._offset = 0.0
        #: What the wall clock showed right after each jump, and the latest time that it has shown.
        self._jumps: list[float] = []
        self._latest = 0.0
        #: Whether the server is being stopped: clients begin nothing new.
        self.closing = False

    # Time

    @property
    def wall(self) -> float:
        """Seconds by the wall clock since simulated time began."""
        return self.loop.time() + self._offset

    @property
    def latest(self) -> float:
        """The latest time that the wall clock has shown."""
        self._latest = max(self._latest, self.wall)
        return self._latest

    def now(self) -> int:
        """Milliseconds by the wall clock."""
        return EPOCH + round(self.wall * 1000)

    def jump(self, seconds: float) -> None:
        """Move the wall clock."""
        self._latest = self.latest
        self._offset += seconds
        self._jumps.append(self.wall)
        self.note(f" -- the clock jumps by {seconds:g} s")

    def mark(self) -> tuple[int, float]:
        """The start of a call, for `arrival`."""
        return len(self._jumps), self.wall

    def arrival(self, mark: tuple[int, float]) -> float:
        """The earliest time that the wall clock has shown since `mark`."""
        return min(mark[1], self.wall, *self._jumps[mark[0] :], mark[1])

    # The trace

    def note(self, line: str) -> None:
        self.report.trace.append(f"{self.loop.time():.6f} {line}")

    def fail(self, call: str, ledger: StreamLedger | None, error: StreamfoldError) -> None:
        """Note a failed call; no fault of this storage excuses damaged records."""
        self.note(f"{call} -> {error.code}")
        if isinstance(error, DataCorruptError):
            raise ViolationError(f"{ledger.name if ledger else call}: {error}")
        missing = isinstance(error, NotFoundError | StreamDeletingError)
        if missing and ledger and not ledger.may_be_missing(self.latest):
            raise ViolationError(f"{ledger.name}: {call}: {error.code}, but it exists")

    def tell(self, violation: str, most: int) -> list[str]:
        """The last steps of the stream that a violation is about, or of all."""
        stream = violation.partition(":")[0]
        known = stream in self.streams
        steps = [
            line for line in self.report.trace if not known or stream in line or " -- " in line
        ]
        return steps[-most:]

    # Streams

    def pick(self, *, json: bool | None = None) -> StreamLedger | None:
        """A stream that clients may use."""
        streams = [
            ledger
            for ledger in self.streams.values()
            if json in (None, ledger.json) and (ledger.lazy or self.exists(ledger))
            if not ledger.over
        ]
        return chance().choice(streams) if streams else None

    def new_name(self) -> str:
        self._names += 1
        return f"s{self._names}."

    def exists(self, ledger: StreamLedger) -> bool:
        """Whether a stream must exist now; one that may have ended is not used any more."""
        if ledger.ttl is not None and ledger.may_be_missing(self.latest):
            ledger.over = True
        return not ledger.may_be_missing(self.latest)

    def open_ledger(self, ledger: StreamLedger) -> StreamLedger:
        """Begin the books of a stream that was created just now."""
        ledger.trim_attempted = max(ledger.trim_attempted, self.trims.get(ledger.name, 0))
        self.streams[ledger.name] = ledger
        return ledger

    def attempt_trim(self, ledger: StreamLedger, point: int) -> None:
        """Note that records below `point` may be gone from now on."""
        ledger.trim_attempted = max(ledger.trim_attempted, point)
        self.trims[ledger.name] = max(self.trims.get(ledger.name, 0), point)
        current = self.streams.get(ledger.name)
        if current is not None:
            current.trim_attempted = max(current.trim_attempted, point)

    def bodies(self, number: int, ledger: StreamLedger, count: int) -> list[bytes]:
        """Bodies that no other operation has; those of octets end with a mark."""
        form = b"%d" if ledger.json else b"%d;"
        return [form % (number * BODIES_MAX + index + 1) for index in range(count)]

    def acknowledge(
        self, ledger: StreamLedger, start: int, bodies: Sequence[bytes], mark: tuple[int, float]
    ) -> None:
        self.report.acked += len(bodies)
        if not ledger.over:
            ledger.acknowledge(start, bodies, self.arrival(mark))

    def refuse(self, ledger: StreamLedger, bodies: Sequence[bytes]) -> None:
        self.report.refused += len(bodies)
        ledger.refuse(bodies)

    def lose(self) -> None:
        """Count an append whose outcome nobody knows."""
        self.report.unknown += 1
