"""The books of one run: stream ledgers, simulated clocks and the trace of every call."""

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
#: Start of simulated time: 2026-01-01T00:00:00Z in milliseconds.
EPOCH = 1_767_225_600_000
#: Retention in seconds for half of the streams.
RETENTION = 60
#: Maximum bodies per operation.
BODIES_MAX = 100


@dataclass
class SimulationReport:
    """Counters and trace of one run."""

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
    #: Requests through the faces, vanished clients, and answers cut off.
    requests: int = 0
    vanished: int = 0
    broken: int = 0
    #: Records checked by readers and followers.
    compared: int = 0
    #: Storage faults, by kind.
    faults: Counter[str] = field(default_factory=Counter)
    #: One line per call or event.
    trace: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Hash of the trace. Equal for identical runs."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()


class Books:
    """Everything the clients of one run know."""

    def __init__(self, report: SimulationReport) -> None:
        self.report = report
        #: Assigned before anything runs.
        self.loop: asyncio.AbstractEventLoop
        self.streams: dict[str, StreamLedger] = {}
        #: Highest trim point attempted for each stream name. A late trim may reach a stream that
        #: replaced the intended one under its name.
        self.trims: dict[str, int] = {}
        self._names = 0
        self._offset = 0.0
        #: Wall clock right after each jump, and the latest time it has ever shown.
        self._jumps: list[float] = []
        self._latest = 0.0
        #: Whether the server is stopping. Clients then begin no new calls.
        self.closing = False

    # Time

    @property
    def wall(self) -> float:
        """Wall-clock seconds since simulated time began."""
        return self.loop.time() + self._offset

    @property
    def latest(self) -> float:
        """The latest time the wall clock has shown."""
        self._latest = max(self._latest, self.wall)
        return self._latest

    def now(self) -> int:
        """Return wall-clock time in milliseconds."""
        return EPOCH + round(self.wall * 1000)

    def jump(self, seconds: float) -> None:
        """Move the wall clock by `seconds`, in either direction."""
        self._latest = self.latest
        self._offset += seconds
        self._jumps.append(self.wall)
        self.note(f" -- the clock jumps by {seconds:g} s")

    def mark(self) -> tuple[int, float]:
        """Return the start of a call, for `arrival`."""
        return len(self._jumps), self.wall

    def arrival(self, mark: tuple[int, float]) -> float:
        """Return the earliest time the wall clock has shown since `mark`."""
        return min(mark[1], self.wall, *self._jumps[mark[0] :], mark[1])

    # The trace

    def note(self, line: str) -> None:
        self.report.trace.append(f"{self.loop.time():.6f} {line}")

    def fail(self, call: str, ledger: StreamLedger | None, error: StreamfoldError) -> None:
        """Record a failed call. Raises if records are damaged or a stream is wrongly missing."""
        self.note(f"{call} -> {error.code}")
        if isinstance(error, DataCorruptError):
            raise ViolationError(f"{ledger.name if ledger else call}: {error}")
        missing = isinstance(error, NotFoundError | StreamDeletingError)
        if missing and ledger and not ledger.may_be_missing(self.latest):
            raise ViolationError(f"{ledger.name}: {call}: {error.code}, but it exists")

    def tell(self, violation: str, most: int) -> list[str]:
        """Return the last trace lines of the violating stream, or of all streams if none is named."""
        stream = violation.partition(":")[0]
        is_stream = stream in self.streams
        steps = [
            line for line in self.report.trace if not is_stream or stream in line or " -- " in line
        ]
        return steps[-most:]

    # Streams

    def pick(self, *, json: bool | None = None) -> StreamLedger | None:
        """Pick a random stream that clients may use, or None if there is none."""
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
        """Return whether a stream must exist now. Retires it once its TTL may have passed."""
        if ledger.ttl is not None and ledger.may_be_missing(self.latest):
            ledger.over = True
        return not ledger.may_be_missing(self.latest)

    def open_ledger(self, ledger: StreamLedger) -> StreamLedger:
        """Register the ledger of a newly created stream."""
        ledger.trim_attempted = max(ledger.trim_attempted, self.trims.get(ledger.name, 0))
        self.streams[ledger.name] = ledger
        return ledger

    def attempt_trim(self, ledger: StreamLedger, point: int) -> None:
        """Record that records below `point` may now disappear."""
        ledger.trim_attempted = max(ledger.trim_attempted, point)
        self.trims[ledger.name] = max(self.trims.get(ledger.name, 0), point)
        current = self.streams.get(ledger.name)
        if current is not None:
            current.trim_attempted = max(current.trim_attempted, point)

    def bodies(self, number: int, ledger: StreamLedger, count: int) -> list[bytes]:
        """Return bodies that no other operation uses. Octet bodies end with a separator."""
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
        """Count an append of unknown outcome."""
        self.report.unknown += 1
