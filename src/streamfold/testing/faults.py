"""Faults of test doubles: which call fails, and how."""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from streamfold.errors import InvalidError


class FaultKind(enum.StrEnum):
    """How a call fails. Each double says which errors it raises."""

    #: Reports failure. The call had no effect.
    BEFORE = "before"
    #: Reports an unknown outcome. The call took effect.
    AFTER = "after"
    #: Reports an unknown outcome. The call had no effect.
    LOST = "lost"
    #: Reports failure after `Fault.amount` bytes, entries or records.
    CUT = "cut"


class FaultyCall(enum.StrEnum):
    """The calls of an interface. A subclass has a member for each, and the faults that it can have."""

    @property
    def kinds(self) -> tuple[FaultKind, ...]:
        return (FaultKind.BEFORE,)


C = TypeVar("C", bound=FaultyCall)


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault of one call: a delay in seconds, then a failure. Both are optional."""

    kind: FaultKind | None = None
    amount: int = 0
    delay: float = 0.0


NO_FAULT = Fault()


class FaultPlan(Protocol):
    """Chooses the fault of each call, in the order in which calls start."""

    def next_fault(self, call: FaultyCall, key: str) -> Fault:
        """Return the fault for this call, or `NO_FAULT` to let it through.

        `key` is the blob, stream or event that the call is about.
        """
        ...


class ScriptedFaults:
    """Gives the n-th call of a kind the n-th fault of its script. Later calls succeed."""

    def __init__(self, script: Mapping[C, Sequence[Fault]] | None = None) -> None:
        self._left: dict[str, deque[Fault]] = {}
        for call, faults in (script or {}).items():
            self._left[call] = deque(check_fault(call, fault) for fault in faults)

    def next_fault(self, call: FaultyCall, key: str) -> Fault:
        left = self._left.get(call)
        return left.popleft() if left else NO_FAULT


class SeededFaults:
    """Fails each call with its probability, or all with one. The same seed gives the same faults."""

    def __init__(
        self,
        rng: random.Random,
        chances: Mapping[C, float] | float,
        *,
        longest_delay: float = 0.0,
        most_before_cut: int = 64 * 1024,
    ) -> None:
        self._rng = rng
        self._chances: Mapping[Any, float] | float = chances
        self._longest_delay = longest_delay
        self._most_before_cut = most_before_cut

    def next_fault(self, call: FaultyCall, key: str) -> Fault:
        delay = self._rng.uniform(0, self._longest_delay)
        chances = self._chances
        chance = chances if isinstance(chances, float) else chances.get(call, 0.0)
        if self._rng.random() >= chance:
            return Fault(delay=delay)
        amount = self._rng.randint(0, self._most_before_cut)
        return Fault(self._rng.choice(call.kinds), amount, delay)


def check_fault(call: FaultyCall, fault: Fault) -> Fault:
    """Return the fault if the call can have it. Raises InvalidError otherwise."""
    if fault.kind is not None and fault.kind not in call.kinds:
        raise InvalidError(
            f"a fault {fault.kind.value!r} does not fit {call}: choose from {', '.join(call.kinds)}"
        )
    return fault
