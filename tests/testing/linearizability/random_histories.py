"""Small random histories of a correct stream, and the same with one wrong answer."""

from __future__ import annotations

import random
from dataclasses import replace

from streamfold.testing.linearizability import (
    OperationHistory,
    OperationKind,
    OperationResult,
    ProducerNumber,
    StreamOperation,
    chain_hash,
    parse_history,
)
from streamfold.testing.linearizability.history import lines
from tests.testing.linearizability.exhaustive import ModelState, acceptable, applied
from tests.testing.linearizability.script import HistoryScript


def random_history(seed: int, operations: int = 7) -> OperationHistory:
    """Operations begin, take effect and end at random; some never take effect, some never end."""
    dice = random.Random(seed)
    script = HistoryScript()
    state = ModelState()
    begun: list[StreamOperation] = []
    effective: list[StreamOperation] = []
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    while len(script.history.operations) < operations or begun or effective:
        roll = dice.random()
        if roll < 0.4 and len(script.history.operations) < operations:
            begun.append(_request(script, dice, letters, state))
        elif roll < 0.7 and begun:
            operation = begun.pop(dice.randrange(len(begun)))
            if dice.random() < 0.1:
                if operation.kind is not OperationKind.APPEND:
                    script.history.end(operation, OperationResult.REFUSED)
                continue  # it never takes effect
            state = _take_effect(operation, state)
            effective.append(operation)
        elif effective:
            operation = effective.pop(dice.randrange(len(effective)))
            result = operation.result
            if dice.random() < 0.2 and operation.kind is OperationKind.APPEND:
                operation.result, operation.tail = OperationResult.UNKNOWN, None
                operation.observed = {}
            else:
                script.history.end(operation, result)
    if dice.random() < 0.7:
        closing = script.read()
        closing.tail, closing.stream_hash = len(state.records), chain_hash(0, state.records)
        closing.contents = state.records if dice.random() < 0.7 else None
        script.history.end(closing, OperationResult.OK)
    if dice.random() < 0.6:
        spoil(script.history, dice)
    return script.history


def _request(
    script: HistoryScript, dice: random.Random, letters: object, state: ModelState
) -> StreamOperation:
    roll = dice.random()
    if roll < 0.2:
        return script.read()
    if roll < 0.4:
        return script.ask_tail()
    records = "".join(next(letters) for _ in range(dice.randint(1, 2)))  # type: ignore[call-overload]
    append = script.append(records)
    kind = dice.randrange(4)
    if kind == 1:
        append.match_seq_num = max(0, len(state.records) + dice.choice([0, 0, 0, -1, 1]))
    elif kind == 2:
        append.fencing_token = dice.choice([None, state.token, "x"])
        append.set_fencing_token = dice.choice([None, "x", "y"])
    elif kind == 3:
        append.producer = ProducerNumber("p", dice.choice([0, 0, 1]), dice.choice([0, 0, 1, 2]))
        earlier = [
            other for other in script.history.operations if other.producer == append.producer
        ]
        append.record_hashes = earlier[0].record_hashes
    return append


def _take_effect(operation: StreamOperation, state: ModelState) -> ModelState:
    """Decide the answer, as a stream would."""
    if operation.kind is not OperationKind.APPEND:
        operation.result, operation.tail = OperationResult.OK, len(state.records)
        if operation.kind is OperationKind.READ:
            operation.stream_hash = chain_hash(0, state.records)
        return state
    if acceptable(operation, state):
        following = applied(operation, state)
        operation.result, operation.tail = OperationResult.OK, len(following.records)
        operation.observed = {"tail": operation.tail}
        return following
    operation.result = OperationResult.REFUSED
    if operation.producer is not None:
        current = dict(state.producers).get(operation.producer.id)
        epoch, seq = current or (operation.producer.epoch, -1)
        if epoch >= operation.producer.epoch:
            operation.observed = {"producer_epoch": epoch}
        if epoch == operation.producer.epoch:
            operation.observed["producer_seq"] = seq
    elif operation.fencing_token not in (None, state.token):
        operation.observed = {"fencing_token": state.token}
    else:
        operation.observed = {"tail": len(state.records)}
    return state


def spoil(history: OperationHistory, dice: random.Random) -> None:
    """Change one answer."""
    answered = [operation for operation in history.operations if operation.ended is not None]
    if not answered:
        return
    operation = dice.choice(answered)
    if operation.acknowledged and dice.random() < 0.3:
        operation.result, operation.tail, operation.observed = OperationResult.REFUSED, None, {}
    elif operation.tail is not None and operation.contents is None:
        operation.tail += dice.choice([-2, -1, 1, 2])
        if operation.tail < operation.count:
            operation.tail = operation.count
    elif "fencing_token" in operation.observed:
        operation.observed = {"fencing_token": dice.choice(["", "x", "y"])}
    elif operation.producer is not None and operation.result is OperationResult.REFUSED:
        operation.observed = {
            "producer_epoch": dice.choice([0, 1]),
            "producer_seq": dice.choice([-1, 0, 1]),
        }
    elif operation.kind is OperationKind.APPEND and operation.match_seq_num is not None:
        operation.match_seq_num += 1
    elif operation.producer is not None:
        operation.producer = replace(operation.producer, seq=operation.producer.seq + 1)


def public_part(history: OperationHistory) -> OperationHistory:
    """The history as the public model sees it: without producers, and without reasons of refusals."""
    copy = parse_history(history.name, list(lines(history)))
    for operation in copy.operations:
        operation.producer, operation.observed, operation.contents = None, {}, None
        if operation.fencing_token == "":
            operation.fencing_token = None  # its model has no such token
    return copy
