"""Histories by hand: each line of a test is a request or an answer."""

from __future__ import annotations

from typing import Any

from streamfold.testing.linearizability import (
    OperationHistory,
    OperationKind,
    OperationResult,
    ProducerNumber,
    StreamOperation,
    chain_hash,
    record_hash,
)


def hashes(records: str) -> tuple[int, ...]:
    """Hashes of records, which are a letter each."""
    return tuple(record_hash(letter.encode()) for letter in records)


class HistoryScript:
    """A history whose records are letters; every operation has a client of its own unless given."""

    def __init__(self) -> None:
        self.history = OperationHistory()

    def _begin(self, kind: OperationKind) -> StreamOperation:
        return self.history.begin(len(self.history.operations) + 1, kind)

    def append(
        self,
        records: str,
        *,
        match: int | None = None,
        token: str | None = None,
        fence: str | None = None,
        producer: tuple[str, int, int] | None = None,
    ) -> StreamOperation:
        operation = self._begin(OperationKind.APPEND)
        operation.record_hashes = hashes(records)
        operation.match_seq_num, operation.fencing_token = match, token
        operation.set_fencing_token = fence
        operation.producer = None if producer is None else ProducerNumber(*producer)
        return operation

    def ack(self, operation: StreamOperation, end: int, **observed: Any) -> None:
        operation.tail, operation.observed = end, observed
        self.history.end(operation, OperationResult.OK)

    def refuse(self, operation: StreamOperation, **observed: Any) -> None:
        operation.observed = observed
        self.history.end(operation, OperationResult.REFUSED)

    def appended(self, records: str, tail: int, **conditions: Any) -> StreamOperation:
        operation = self.append(records, **conditions)
        self.ack(operation, tail)
        return operation

    def read(self) -> StreamOperation:
        return self._begin(OperationKind.READ)

    def got(self, operation: StreamOperation, records: str, *, contents: bool = False) -> None:
        """A read from the head returned these records."""
        operation.tail = len(records)
        operation.stream_hash = chain_hash(0, hashes(records))
        operation.contents = hashes(records) if contents else None
        self.history.end(operation, OperationResult.OK)

    def has(self, records: str, *, contents: bool = False) -> StreamOperation:
        """A read that nothing happens beside."""
        operation = self.read()
        self.got(operation, records, contents=contents)
        return operation

    def ask_tail(self) -> StreamOperation:
        return self._begin(OperationKind.CHECK_TAIL)

    def told(self, operation: StreamOperation, tail: int) -> None:
        operation.tail = tail
        self.history.end(operation, OperationResult.OK)

    def tail(self, tail: int) -> StreamOperation:
        operation = self.ask_tail()
        self.told(operation, tail)
        return operation
