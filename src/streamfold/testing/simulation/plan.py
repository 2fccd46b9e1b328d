"""A random program as data: client calls, storage behaviour and the end of each server life.

Every operation has its own number and seed, so that shrinking can drop operations without changing the
others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

#: Client calls on the store's own interface, with weights.
STORE_KINDS: Mapping[str, int] = {
    "append": 10,
    "look for nothing": 6,
    "check tail": 3,
    "read": 4,
    "trim": 1,
    "publish": 1,
    "fork": 1,
    "delete": 1,
    "follow": 2,
    "delete basin": 1,
    "produce": 5,
    "wait": 1,
}
#: Client calls through the faces, with weights.
FACE_KINDS: Mapping[str, int] = {
    "s2 append": 10,
    "s2 session": 6,
    "s2 read": 4,
    "s2 tail": 2,
    "s2 follow": 4,
    "s2 list": 1,
    "s2 delete": 1,
    "s2 trim": 1,
    "s2 fence": 1,
    "s2 missing": 2,
    "token": 2,
    "ds append": 8,
    "ds produce": 8,
    "ds read": 4,
    "ds poll": 3,
    "ds events": 3,
    "ds head": 2,
    "ds create": 1,
    "ds delete": 1,
    "ds fork": 1,
    "ds close": 1,
    "ds snapshot": 3,
    "ds parts": 1,
    "ds bootstrap": 3,
    "wait": 1,
    "clock": 1,
}


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One client call."""

    number: int
    kind: str
    seed: int
    #: Simulated seconds the client waits before the call.
    pause: float


@dataclass(frozen=True, slots=True)
class LifePlan:
    """One life of the server, from its opening to its stop, crash or replacement."""

    seed: int
    #: Probability that a storage call fails, and the maximum seconds of an answer.
    failures: float
    slowest: float
    idle_streams: int
    upkeep_interval: float
    recent_bytes: int
    chunk_file_bytes: int
    #: Drain timeout in seconds.
    drain: float
    clients: tuple[tuple[PlannedCall, ...], ...]
    #: "stop", "crash" or "replace". Replacing starts another server while this one runs.
    ending: str
    #: Seconds after which the life ends even if clients are busy. None waits for the clients.
    lasts: float | None
    #: Seconds by which the clock jumps while the server is down.
    jump: float


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """The program of one seed."""

    seed: int
    faces: bool
    streams: int
    lives: tuple[LifePlan, ...]

    @property
    def operations(self) -> list[PlannedCall]:
        return [call for life in self.lives for client in life.clients for call in client]

    def describe(self) -> list[str]:
        """Describe each operation with its life and client."""
        return [
            f"{call.number} {call.kind} (life {life_number}, client {client_number})"
            for life_number, life in enumerate(self.lives, 1)
            for client_number, client in enumerate(life.clients, 1)
            for call in client
        ]

    def keep(self, numbers: Collection[int]) -> SimulationPlan:
        """Return the program reduced to the operations with these numbers."""
        lives = [
            replace(
                life,
                clients=tuple(
                    tuple(call for call in client if call.number in numbers)
                    for client in life.clients
                ),
            )
            for life in self.lives
        ]
        return replace(self, lives=tuple(lives))


def draw_plan(seed: int, *, faces: bool = True) -> SimulationPlan:
    """Return the program of a seed. Without `faces`, clients call only the store itself."""
    random = Random(seed)  # noqa: S311 - repeatable, not secret
    kinds: dict[str, int] = dict(STORE_KINDS)
    if faces:
        # A quarter of the programs mix both. The others use only the faces.
        kinds = dict(FACE_KINDS) if random.random() < 0.75 else kinds | dict(FACE_KINDS)
    numbers = iter(range(1_000_000))
    lives = []
    for first in [True] + [False] * random.randrange(4):
        clients = tuple(
            tuple(
                PlannedCall(
                    next(numbers),
                    _pick(random, kinds),
                    random.getrandbits(32),
                    random.random() ** 2 * 0.1,
                )
                for _ in range(random.randint(2, 12))
            )
            for _ in range(random.randint(2, 6))
        )
        lives.append(
            LifePlan(
                seed=random.getrandbits(32),
                failures=0.0 if first else random.choice((0.0, 0.0, 0.002, 0.02)),
                slowest=random.choice((0.0, 0.02, 0.5)),
                idle_streams=random.choice((1, 3, 100)),
                upkeep_interval=random.choice((0.05, 5.0, 1e6)),
                recent_bytes=random.choice((0, 1 << 20)),
                chunk_file_bytes=random.choice((1, 1 << 20)),
                drain=random.choice((0.0, 0.05, 10.0)),
                clients=clients,
                ending=random.choice(("stop", "stop", "crash", "crash", "replace")),
                lasts=random.choice((None, random.random() ** 2 * 2)),
                jump=random.choice((0.0, 0.0, 0.0, 90.0, -90.0)),
            )
        )
    return SimulationPlan(seed, faces, random.randint(1, 6), tuple(lives))


def _pick(random: Random, kinds: Mapping[str, int]) -> str:
    return random.choices(list(kinds), list(kinds.values()))[0]


def parse_numbers(text: str) -> set[int]:
    """Parse operation numbers such as "3,17,40-44". "none" means no operation."""
    if text == "none":
        return set()
    numbers = set[int]()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def format_numbers(numbers: Sequence[int]) -> str:
    """Format operation numbers for `parse_numbers`."""
    parts = list[str]()
    for number in sorted(numbers):
        first, _, last = parts[-1].partition("-") if parts else ("", "", "")
        if parts and int(last or first) == number - 1:
            parts[-1] = f"{first}-{number}"
        else:
            parts.append(str(number))
    return ",".join(parts) or "none"
