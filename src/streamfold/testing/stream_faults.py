"""A stream client that fails as planned, for tests of code that uses one."""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from streamfold.errors import InvalidError, OutcomeUnknownError, RetryLaterError
from streamfold.follow.clients.client import Appended, StreamClient, StreamRecord
from streamfold.model.positions import StreamPosition
from streamfold.model.records import Record


class StreamCall(enum.StrEnum):
    """The calls of a stream client."""

    CHECK_TAIL = "check_tail"
    PEEK = "peek"
    READ = "read"
    APPEND = "append"


class StreamFaultKind(enum.StrEnum):
    """How a call fails."""

    #: `RetryLaterError`; the call had no effect.
    BEFORE = "before"
    #: `OutcomeUnknownError`; the append took effect.
    AFTER = "after"
    #: `OutcomeUnknownError`; the append did not take effect.
    LOST = "lost"
    #: `RetryLaterError` after `amount` records of a read.
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class StreamFault:
    """What happens to one call."""

    kind: StreamFaultKind | None = None
    amount: int = 0


NO_STREAM_FAULT = StreamFault()


class StreamFaultPlan(Protocol):
    """Decides about each call, in the order in which calls begin."""

    def next_fault(self, call: StreamCall) -> StreamFault:
        """Return what happens to this call; `NO_STREAM_FAULT` to leave it alone."""
        ...


class ScriptedStreamFaults:
    """The n-th call of a kind gets the n-th fault of its script; later calls succeed."""

    def __init__(self, script: Mapping[StreamCall, Sequence[StreamFault]]) -> None:
        for call, faults in script.items():
            for fault in faults:
                _check(call, fault)
        self._left = {call: deque(faults) for call, faults in script.items()}

    def next_fault(self, call: StreamCall) -> StreamFault:
        left = self._left.get(call)
        return left.popleft() if left else NO_STREAM_FAULT


class SeededStreamFaults:
    """Each call fails with a chance; the same `rng` gives the same faults."""

    def __init__(self, rng: random.Random, chance: float, *, most_before_cut: int = 20) -> None:
        self._rng = rng
        self._chance = chance
        self._most_before_cut = most_before_cut

    def next_fault(self, call: StreamCall) -> StreamFault:
        if self._rng.random() >= self._chance:
            return NO_STREAM_FAULT
        kinds = [StreamFaultKind.BEFORE]
        if call is StreamCall.APPEND:
            kinds += [StreamFaultKind.AFTER, StreamFaultKind.LOST]
        if call is StreamCall.READ:
            kinds += [StreamFaultKind.CUT]
        return StreamFault(self._rng.choice(kinds), self._rng.randint(0, self._most_before_cut))


class FaultyStream:
    """`inner`, failing as `plan` says; errors of its own always name themselves as injected.

    An error of `inner` wins over an injected one: an append that was refused did not take effect.
    """

    def __init__(self, inner: StreamClient, plan: StreamFaultPlan) -> None:
        self._inner = inner
        self._plan = plan

    @property
    def name(self) -> str:
        return self._inner.name

    async def check_tail(self) -> StreamPosition:
        self._begin(StreamCall.CHECK_TAIL)
        return await self._inner.check_tail()

    async def peek(self, seq_num: int, count: int) -> Sequence[StreamRecord]:
        self._begin(StreamCall.PEEK)
        return await self._inner.peek(seq_num, count)

    async def read(self, seq_num: int) -> AsyncGenerator[Sequence[StreamRecord]]:
        fault = self._begin(StreamCall.READ)
        left = fault.amount
        async with aclosing(self._inner.read(seq_num)) as session:
            async for batch in session:
                if fault.kind is StreamFaultKind.CUT and len(batch) > left:
                    if left:
                        yield batch[:left]
                    raise RetryLaterError("injected: the read was cut off")
                left -= len(batch)
                yield batch

    async def append(
        self,
        records: Sequence[Record],
        *,
        match_seq_num: int | None = None,
        fencing_token: str | None = None,
    ) -> Appended:
        fault = self._begin(StreamCall.APPEND)
        if fault.kind is StreamFaultKind.LOST:
            raise OutcomeUnknownError("injected: the append was lost")
        done = await self._inner.append(
            records, match_seq_num=match_seq_num, fencing_token=fencing_token
        )
        if fault.kind is StreamFaultKind.AFTER:
            raise OutcomeUnknownError("injected: the append lost its answer")
        return done

    def _begin(self, call: StreamCall) -> StreamFault:
        fault = self._plan.next_fault(call)
        _check(call, fault)
        if fault.kind is StreamFaultKind.BEFORE:
            raise RetryLaterError(f"injected: {call} failed before its effect")
        return fault


def _check(call: StreamCall, fault: StreamFault) -> None:
    outcome = fault.kind in (StreamFaultKind.AFTER, StreamFaultKind.LOST)
    if outcome and call is not StreamCall.APPEND:
        raise InvalidError(f"a fault {fault.kind} fits only appends, not {call}: use 'before'")
    if fault.kind is StreamFaultKind.CUT and call is not StreamCall.READ:
        raise InvalidError(f"a fault 'cut' fits only reads, not {call}")
