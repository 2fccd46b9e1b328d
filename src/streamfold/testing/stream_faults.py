"""A fault-injecting stream client, for testing code that uses one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from streamfold.errors import OutcomeUnknownError, RetryLaterError
from streamfold.follow.clients.client import Appended, StreamClient, StreamRecord
from streamfold.model.positions import StreamPosition
from streamfold.model.records import Record
from streamfold.testing.faults import Fault, FaultKind, FaultPlan, FaultyCall, check_fault


class StreamCall(FaultyCall):
    """The calls of a stream client.

    A fault raises `RetryLaterError`, or `OutcomeUnknownError` if the outcome of an append is unknown.
    """

    CHECK_TAIL = "check_tail"
    PEEK = "peek"
    READ = "read"
    APPEND = "append"

    @property
    def kinds(self) -> tuple[FaultKind, ...]:
        if self is StreamCall.APPEND:
            return FaultKind.BEFORE, FaultKind.AFTER, FaultKind.LOST
        if self is StreamCall.READ:
            return FaultKind.BEFORE, FaultKind.CUT
        return super().kinds


class FaultyStream:
    """Wraps `inner` and injects the faults of `plan`. Its own errors say "injected".

    An error from `inner` takes precedence over an injected one: a rejected append had no effect.
    """

    def __init__(self, inner: StreamClient, plan: FaultPlan) -> None:
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
                if fault.kind is FaultKind.CUT and len(batch) > left:
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
        if fault.kind is FaultKind.LOST:
            raise OutcomeUnknownError("injected: the append was lost")
        done = await self._inner.append(
            records, match_seq_num=match_seq_num, fencing_token=fencing_token
        )
        if fault.kind is FaultKind.AFTER:
            raise OutcomeUnknownError("injected: the append lost its answer")
        return done

    def _begin(self, call: StreamCall) -> Fault:
        fault = check_fault(call, self._plan.next_fault(call, self.name))
        if fault.kind is FaultKind.BEFORE:
            raise RetryLaterError(f"injected: {call} failed before its effect")
        return fault
