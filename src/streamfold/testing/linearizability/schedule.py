"""Scheduling: whether answers that match several log states fit into one schedule.

A rejection names a fencing token or a producer's number, which many states of a stream may share. No
state can have been reached before a certain event (`earliest`). A rejection therefore belongs at the
latest to the last matching state that can have been reached before the rejection ended, and no later
state can have been reached before it began. This delays later states, and may move other rejections to
earlier states, until nothing moves. Every move was forced, so the result is the earliest possible
schedule, or none exists.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamfold.testing.linearizability.contradiction import (
    Contradiction,
    answer,
    name,
    out_of_order,
)
from streamfold.testing.linearizability.history import (
    OperationHistory,
    OperationKind,
    OperationResult,
    ProducerNumber,
    StreamOperation,
)


@dataclass(slots=True)
class Observation:
    """A fact from an answer, and the states of the stream in which it holds."""

    operation: StreamOperation
    states: Sequence[int]


@dataclass
class Timeline:
    """The states that appends produce in this order. State n follows n appends."""

    appends: Sequence[StreamOperation]
    #: Maps an attribute and its value to the states in which it had that value.
    _states: dict[tuple[object, ...], list[int]] = field(default_factory=lambda: defaultdict(list))
    _numbers: dict[str, list[tuple[int, int | None, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def __post_init__(self) -> None:
        tail, token = 0, ""
        for state, append in enumerate([None, *self.appends]):
            if append is not None:
                tail += append.count
                token = token if append.set_fencing_token is None else append.set_fencing_token
                if append.producer is not None:
                    number = append.producer
                    self._numbers[number.id].append((state, number.epoch, number.seq))
            self._states["tail", tail].append(state)
            self._states["fencing_token", token].append(state)

    def observations(self, operation: StreamOperation) -> list[Observation]:
        """Return every fact in an answer with the states that match it."""
        observed = operation.observed
        result = [
            Observation(operation, self._states.get((key, observed[key]), ()))
            for key in ("tail", "fencing_token")
            if key in observed
        ]
        if operation.tail is not None and operation.kind is not OperationKind.APPEND:
            result.append(Observation(operation, self._states.get(("tail", operation.tail), ())))
        if operation.producer is not None and "producer_epoch" in observed:
            number = observed["producer_epoch"], observed.get("producer_seq")
            result.append(Observation(operation, self._at_number(operation.producer, *number)))
        return result

    def _at_number(self, producer: ProducerNumber, epoch: int, seq: int | None) -> Sequence[int]:
        """Return states in which a producer was at `epoch`, with `seq` as highest number if given."""
        unheard = producer.epoch if seq is not None else None
        changes = [(0, unheard, -1), *self._numbers.get(producer.id, ())]
        ends = [state for state, _, _ in changes[1:]] + [len(self.appends) + 1]
        states: list[int] = []
        for (state, its_epoch, its_seq), end in zip(changes, ends, strict=True):
            if its_epoch == epoch and seq in (None, its_seq):
                states += range(state, end)
        return states


def unjustified(operation: StreamOperation) -> Contradiction | None:
    """Return a contradiction if a rejection's own reason would have allowed the append."""
    observed, producer = operation.observed, operation.producer
    if operation.result is not OperationResult.REFUSED:
        return None
    if producer is not None and "producer_epoch" in observed:
        epoch, seq = observed["producer_epoch"], observed.get("producer_seq")
        agrees = (epoch == producer.epoch and seq == producer.seq - 1) or (
            epoch < producer.epoch and producer.seq == 0
        )
    elif "fencing_token" in observed:
        agrees = operation.fencing_token in (None, observed["fencing_token"])
    else:
        agrees = "tail" in observed and operation.match_seq_num in (None, observed["tail"])
    if not agrees:
        return None
    text = f"{name(operation)} {answer(operation)}, but that is what it asked for"
    return Contradiction(text, (operation,))


def went_back(history: OperationHistory) -> Contradiction | None:
    """Return a contradiction if an answer has a smaller tail than one known before its request."""
    highest: tuple[int, StreamOperation | None] = (0, None)
    before: dict[int, tuple[int, StreamOperation | None]] = {}
    for position, operation in enumerate(history.events):
        if operation.began == position:
            before[operation.id] = highest
            continue
        tails = [
            tail for tail in (operation.tail, operation.observed.get("tail")) if tail is not None
        ]
        if not tails:
            continue
        start = operation.count if operation.acknowledged else 0
        tail, other = before[operation.id]
        if other is not None and min(tails) - start < tail:
            if tail == other.tail:
                return out_of_order(operation, other)
            text = (
                f"{name(other)} was told that the tail is {tail}; then {name(operation)} began, and "
                f"{answer(operation)}: the stream went back"
            )
            return Contradiction(text, (other, operation))
        if max(tails) > highest[0]:
            highest = max(tails), operation
    return None


def contradiction_in_time(
    history: OperationHistory, appends: Sequence[StreamOperation]
) -> Contradiction | None:
    """Return why no schedule fits this append order and all answers, or None if one does."""
    timeline = Timeline(appends)
    observations = [
        observation
        for operation in history.operations
        for observation in timeline.observations(operation)
    ]
    # Append n cannot have taken effect before event floors[n].
    floors = [append.began for append in appends]
    while True:
        earliest = [-1]
        for floor in floors:
            earliest.append(max(earliest[-1], floor))
        moved = False
        for observation in observations:
            operation = observation.operation
            assert operation.ended is not None
            last = bisect_left(earliest, operation.ended) - 1
            place = bisect_right(observation.states, last) - 1
            if place < 0:
                return _never(history, observation, earliest)
            state = observation.states[place]
            if state < len(floors) and floors[state] < operation.began:
                floors[state] = operation.began
                moved = True
        if not moved:
            break
    for append, earliest_event in zip(appends, earliest[1:], strict=True):
        if append.ended is not None and earliest_event > append.ended:
            return out_of_order(history.events[earliest_event], append)
    return None


def _never(
    history: OperationHistory, observation: Observation, earliest: Sequence[int]
) -> Contradiction:
    operation = observation.operation
    if not observation.states:
        text = f"{name(operation)} {answer(operation)}, which the stream never was"
        return Contradiction(text, (operation,))
    return out_of_order(history.events[earliest[observation.states[0]]], operation)
