"""Writers, which choose a client's next append and learn from every answer.

They append unconditionally, with match_seq_num, with fencing tokens, or as a Durable Streams producer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from streamfold.testing.linearizability.history import (
    OperationResult,
    ProducerNumber,
    StreamOperation,
)


@dataclass(slots=True)
class AppendPlan:
    """An append to send. Bodies make every record of a stream unique."""

    bodies: list[str]
    match_seq_num: int | None = None
    fencing_token: str | None = None
    #: The fencing token that the append's only record sets.
    set_fencing_token: str | None = None
    producer: ProducerNumber | None = None


class AppendPlanner(Protocol):
    """Chooses the appends of one client, one at a time."""

    def plan(self, bodies: list[str]) -> AppendPlan:
        """Return the next append. A retry of an earlier append keeps its own bodies."""
        ...

    def learn(self, operation: StreamOperation, plan: AppendPlan | None) -> None:
        """Learn from an answered or lost operation. `plan` is set for appends."""
        ...


class PlainWriter:
    """Appends without conditions."""

    def plan(self, bodies: list[str]) -> AppendPlan:
        return AppendPlan(bodies)

    def learn(self, operation: StreamOperation, plan: AppendPlan | None) -> None:
        """Do nothing: answers do not influence this writer."""


class _TailGuess:
    """The tail that the client last heard of."""

    def __init__(self) -> None:
        self.tail = 0

    def learn(self, operation: StreamOperation) -> None:
        for tail in (operation.tail, operation.observed.get("tail")):
            if tail is not None:
                self.tail = tail


class MatchingWriter:
    """Appends at the tail it believes in, and sometimes deliberately one off."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._guess = _TailGuess()

    def plan(self, bodies: list[str]) -> AppendPlan:
        tail = self._guess.tail
        if self._dice.random() < 0.05:
            tail = max(0, tail + self._dice.choice([-1, 1]))
        return AppendPlan(bodies, match_seq_num=tail)

    def learn(self, operation: StreamOperation, plan: AppendPlan | None) -> None:
        self._guess.learn(operation)


class FencingWriter:
    """Occasionally fences the stream with its own token, and appends with that token."""

    def __init__(self, name: str, dice: random.Random) -> None:
        self._name, self._dice = name, dice
        self._guess = _TailGuess()
        self._token: str | None = None
        self._fences = 0

    def plan(self, bodies: list[str]) -> AppendPlan:
        roll = self._dice.random()
        if self._token is None or roll < 0.06:
            self._fences += 1
            token = f"{self._name}-{self._fences}"
            # The token is the body, which makes a fence as unique as any other record.
            return AppendPlan([token], self._guess.tail, None, token)
        return AppendPlan(bodies, fencing_token=self._token if roll < 0.9 else None)

    def learn(self, operation: StreamOperation, plan: AppendPlan | None) -> None:
        self._guess.learn(operation)
        if operation.set_fencing_token is not None:
            if operation.result is OperationResult.OK:
                self._token = operation.set_fencing_token
        elif "fencing_token" in operation.observed:
            theirs = operation.observed["fencing_token"]
            self._token = theirs if self._dice.random() < 0.5 else None


class ProducingWriter:
    """An idempotent producer that retries an append until answered. Two clients share one ID."""

    def __init__(self, name: str, dice: random.Random) -> None:
        self._name, self._dice = name, dice
        self._epoch = self._seq = 0
        self._pending: AppendPlan | None = None
        self._last: AppendPlan | None = None

    def plan(self, bodies: list[str]) -> AppendPlan:
        if self._pending is not None:
            return self._pending
        roll = self._dice.random()
        if roll < 0.10 and self._last is not None:
            return self._last
        if roll < 0.14:
            return AppendPlan(bodies, producer=self._number(self._epoch, self._seq + 2))
        if roll < 0.18 and self._epoch:
            return AppendPlan(bodies, producer=self._number(self._epoch - 1, self._seq))
        if roll < 0.24:
            self._epoch, self._seq = self._epoch + 1, 0
        if roll > 0.9:
            return AppendPlan(bodies)
        return AppendPlan(bodies, producer=self._number(self._epoch, self._seq))

    def _number(self, epoch: int, seq: int) -> ProducerNumber:
        return ProducerNumber(self._name, epoch, seq)

    def learn(self, operation: StreamOperation, plan: AppendPlan | None) -> None:
        if plan is None or plan.producer is None:
            return
        observed = operation.observed
        if operation.result is OperationResult.UNKNOWN:
            self._pending = plan
        elif operation.result is OperationResult.OK:
            self._pending, self._last = None, plan
            self._epoch, self._seq = plan.producer.epoch, plan.producer.seq + 1
        elif "producer_seq" in observed:
            self._pending = None
            self._epoch, self._seq = observed["producer_epoch"], observed["producer_seq"] + 1
        elif "producer_epoch" in observed:  # another client took over, so claim the next epoch
            self._pending = None
            self._epoch, self._seq = observed["producer_epoch"] + 1, 0
