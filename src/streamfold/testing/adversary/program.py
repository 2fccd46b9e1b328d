"""An attack program: its operations, faults and limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from streamfold.errors import InvalidError

#: Client operations with their weights.
OPERATIONS: dict[str, float] = {
    "append": 40,
    #: Not an operation: gives appends conditions, fencing tokens, trims and fences.
    "condition": 0,
    "append to a busy stream": 30,
    "session": 6,
    "producer": 12,
    "read nothing": 20,
    "check a tail": 10,
    "long poll": 3,
    "list": 2,
    "herd": 1,
    "delete": 2,
    "replace": 1,
    "fork": 2,
    "snapshot": 4,
    "delete a basin": 0.05,
}
#: Faults of the server, its machine and its storage.
FAULTS = ("kill", "stop", "pause", "take over", "storage", "clock", "power")


@dataclass(frozen=True, slots=True)
class Program:
    """One attack. The seed decides what is tried, but timing varies between runs."""

    seed: int
    rounds: int = 50
    #: Minimum kills and stops, and acknowledged records. The program continues beyond `rounds`
    #: until then.
    ends: int = 0
    acks: int = 0
    storage: str = "local"
    workers: int = 16
    followers: int = 3
    seconds: float = 1.5
    busy_streams: int = 4
    small_streams: int = 40
    operations: tuple[str, ...] = tuple(OPERATIONS)
    faults: tuple[str, ...] = FAULTS

    def __post_init__(self) -> None:
        for kind, names, choice in (
            ("operation", self.operations, tuple(OPERATIONS)),
            ("fault", self.faults, FAULTS),
        ):
            for name in names:
                if name not in choice:
                    raise InvalidError(
                        f"{kind} {name!r} is unknown: choose from {', '.join(choice)}"
                    )
        if not self.operations or self.rounds < 1 or self.workers < 1:
            raise InvalidError("an attack needs a round, a client and an operation at least")

    @property
    def size(self) -> int:
        """The program's size, for shrinking."""
        streams = self.busy_streams + self.small_streams
        kinds = len(self.operations) + len(self.faults)
        return self.rounds + self.workers + self.followers + streams + 4 * kinds

    def smaller(self) -> Iterator[Program]:
        """Yield smaller programs, large steps first."""
        yield from self._with_fewer("operations", self.operations)
        yield from self._with_fewer("faults", self.faults)
        for name, least in (
            ("rounds", 1),
            ("workers", 1),
            ("small_streams", 1),
            ("busy_streams", 1),
            ("followers", 0),
        ):
            number = getattr(self, name)
            for fewer in (least, (least + number) // 2):
                if fewer < number:
                    yield self.having(**{name: fewer})

    def _with_fewer(self, field: str, names: tuple[str, ...]) -> Iterator[Program]:
        """Yield programs without one half, without the other, and then without each name."""
        least = 1 if field == "operations" else 0
        half = len(names) // 2
        without = [names[half:], names[:half]] if len(names) > 3 else []
        without += [tuple(name for name in names if name != one) for one in names]
        for left in without:
            if least <= len(left) < len(names):
                yield self.having(**{field: left})

    def having(self, **fields: Any) -> Program:
        """Return the program with some fields replaced."""
        return replace(self, **fields)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Program:
        """Read a program from a file. Raises InvalidError if it contains none."""
        try:
            content = json.loads(path.read_text())
            for field in ("operations", "faults"):
                content[field] = tuple(content[field])
            return cls(**content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidError(
                f"{path} does not hold a program of the adversary: {error}"
            ) from None

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds of {self.seconds:g} s on {self.storage} storage, seed {self.seed}; "
            f"{self.workers} clients and {self.followers} followers on {self.busy_streams} busy and "
            f"{self.small_streams} small streams of each kind; they {', '.join(self.operations)}; "
            f"faults: {', '.join(self.faults) or 'none'}"
        )
