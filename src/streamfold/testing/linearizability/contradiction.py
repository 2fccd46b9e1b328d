"""Contradictions: the few operations of a history that cannot all be true, explained in text."""

from __future__ import annotations

from dataclasses import dataclass

from streamfold.testing.linearizability.history import (
    OperationHistory,
    OperationKind,
    OperationResult,
    StreamOperation,
)


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Why no order of the operations explains all answers."""

    text: str
    operations: tuple[StreamOperation, ...] = ()


def name(operation: StreamOperation) -> str:
    return f"{operation.kind} {operation.id}"


def seq_nums(start: int, count: int) -> str:
    return f"seq_num {start}" if count == 1 else f"seq_nums {start} to {start + count - 1}"


def answer(operation: StreamOperation) -> str:
    """Describe the answer to an operation."""
    kind, result = operation.kind, operation.result
    if kind is not OperationKind.APPEND:
        return f"answered tail {operation.tail}" if result is OperationResult.OK else "failed"
    if result is OperationResult.OK:
        assert operation.tail is not None
        return f"was acknowledged at {seq_nums(operation.tail - operation.count, operation.count)}"
    if result is OperationResult.UNKNOWN:
        return "got no answer"
    if "producer_seq" in operation.observed or "producer_epoch" in operation.observed:
        epoch, seq = (operation.observed.get(f"producer_{key}") for key in ("epoch", "seq"))
        return f"was refused: its producer is at epoch {epoch}, number {seq}"
    if "fencing_token" in operation.observed:
        return f"was refused: the fencing token is {operation.observed['fencing_token']!r}"
    if "tail" in operation.observed:
        return f"was refused: the tail is {operation.observed['tail']}"
    return "was refused"


def out_of_order(first: StreamOperation, second: StreamOperation) -> Contradiction:
    """Report that the log has `first` before `second`, although `first` began after `second` ended."""
    assert second.ended is not None
    pair = (first, second)
    if first.kind is OperationKind.APPEND and first.result is not OperationResult.REFUSED:
        if second.kind is OperationKind.APPEND:
            text = f"{name(first)} lies before {name(second)}, but began after {name(second)} had ended"
        else:
            text = (
                f"{name(second)} {answer(second)}, which includes {name(first)}, but that began only "
                f"after {name(second)} had ended"
            )
    elif second.kind is OperationKind.APPEND and second.result is not OperationResult.REFUSED:
        text = (
            f"{name(first)} began after {name(second)} had ended ({answer(second)}), and "
            f"{answer(first)}: it missed {name(second)}"
        )
    else:
        text = (
            f"{name(second)} {answer(second)}; then {name(first)} began, and {answer(first)}: "
            "the stream went back"
        )
    return Contradiction(text, pair)


def report(history: OperationHistory, contradiction: Contradiction) -> str:
    """Format a contradiction with its operations' events and the server faults among them."""
    numbered: list[tuple[float, str]] = []
    for operation in contradiction.operations:
        numbered.append(
            (operation.began, f"client {operation.client} begins {_request(operation)}")
        )
        if operation.ended is not None:
            numbered.append((operation.ended, f"{name(operation)} {answer(operation)}"))
        else:
            numbered.append((len(history.events), f"{name(operation)} {answer(operation)}"))
    if numbered:
        first, last = min(numbered)[0], max(numbered)[0]
        numbered += [
            (position - 0.5, text) for position, text in history.faults if first <= position <= last
        ]
    shown = [
        f"  event {position:>6}: {text}" if position == int(position) else f"    {text}"
        for position, text in sorted(numbered)
    ]
    return "\n".join([f"{history.name}: {contradiction.text}", *shown])


def _request(operation: StreamOperation) -> str:
    """Describe an operation and all its conditions."""
    parts = [name(operation)]
    if operation.kind is OperationKind.APPEND:
        parts = [f"{name(operation)} of {operation.count} record{'s' * (operation.count > 1)}"]
    if operation.match_seq_num is not None:
        parts.append(f"match_seq_num {operation.match_seq_num}")
    if operation.fencing_token is not None:
        parts.append(f"fencing_token {operation.fencing_token!r}")
    if operation.set_fencing_token is not None:
        parts.append(f"which sets the fencing token {operation.set_fencing_token!r}")
    if operation.producer is not None:
        producer = operation.producer
        parts.append(f"producer {producer.id}, epoch {producer.epoch}, number {producer.seq}")
    return ", ".join(parts)
