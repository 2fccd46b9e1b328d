"""A judge for tiny histories that tries every order. It shares no step with the checker under test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from streamfold.testing.linearizability import (
    OperationHistory,
    OperationKind,
    OperationResult,
    StreamOperation,
    chain_hash,
)


class ModelState(NamedTuple):
    records: tuple[int, ...] = ()
    token: str = ""
    producers: tuple[tuple[str, tuple[int, int]], ...] = ()


class Point(NamedTuple):
    """Something that happened at one moment between two events."""

    operation: StreamOperation
    #: Whether it is only the tail that an acknowledgement mentions.
    mention: bool = False


def linearizable(history: OperationHistory) -> bool:
    points = [Point(operation) for operation in history.operations]
    points += [
        Point(operation, mention=True)
        for operation in history.operations
        if operation.acknowledged and "tail" in operation.observed
    ]
    visited: set[tuple[frozenset[int], ModelState]] = set()
    stack = [(frozenset(range(len(points))), ModelState())]
    while stack:
        remaining, state = stack.pop()
        if (remaining, state) in visited:
            continue
        visited.add((remaining, state))
        if all(points[index].operation.unknown for index in remaining):
            return True
        ends = [points[index].operation.ended for index in remaining]
        first_end = min(end for end in ends if end is not None)
        for index in remaining:
            if points[index].operation.began < first_end:
                following = steps(points[index], state)
                stack += [(remaining - {index}, next_state) for next_state in following]
    return False


def steps(point: Point, state: ModelState) -> Iterator[ModelState]:
    """The states in which a moment may leave the stream."""
    operation = point.operation
    if operation.kind is OperationKind.APPEND and not point.mention:
        if operation.result is OperationResult.REFUSED:
            if refusable(operation, state):
                yield state
        elif acceptable(operation, state):
            following = applied(operation, state)
            if operation.tail in (None, len(following.records)):
                yield following
    elif point.mention:
        if operation.observed["tail"] == len(state.records):
            yield state
    elif operation.result is OperationResult.REFUSED or (
        operation.tail == len(state.records)
        and operation.stream_hash in (None, chain_hash(0, state.records))
    ):
        yield state


def refusable(operation: StreamOperation, state: ModelState) -> bool:
    observed = operation.observed
    if "producer_epoch" in observed:
        assert operation.producer is not None
        producer = dict(state.producers).get(operation.producer.id)
        if producer is None:
            producer = (operation.producer.epoch, -1)
            if observed.get("producer_seq") is None:
                return False
        if producer[0] != observed["producer_epoch"]:
            return False
        if observed.get("producer_seq") not in (None, producer[1]):
            return False
    if observed.get("fencing_token", state.token) != state.token:
        return False
    if observed.get("tail", len(state.records)) != len(state.records):
        return False
    return not observed or not acceptable(operation, state)


def acceptable(operation: StreamOperation, state: ModelState) -> bool:
    if operation.match_seq_num not in (None, len(state.records)):
        return False
    if operation.fencing_token not in (None, state.token):
        return False
    number = operation.producer
    if number is None:
        return True
    current = dict(state.producers).get(number.id)
    if current is None or current[0] < number.epoch:
        return number.seq == 0
    return current[0] == number.epoch and current[1] + 1 == number.seq


def applied(operation: StreamOperation, state: ModelState) -> ModelState:
    token = state.token if operation.set_fencing_token is None else operation.set_fencing_token
    producers = dict(state.producers)
    if operation.producer is not None:
        producers[operation.producer.id] = operation.producer.epoch, operation.producer.seq
    records = state.records + operation.record_hashes
    return ModelState(records, token, tuple(sorted(producers.items())))
