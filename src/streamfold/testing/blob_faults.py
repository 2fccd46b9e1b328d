"""A blob store that fails as planned, for tests of code that uses blobs."""

from __future__ import annotations

import asyncio
import enum
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from streamfold.blob.blob_store import DEFAULT_CHUNK_SIZE, BlobMeta, BlobStore
from streamfold.errors import BlobOutcomeUnknownError, BlobUnavailableError, InvalidError

T = TypeVar("T")


class Operation(enum.StrEnum):
    """The calls of a blob store."""

    PUT = "put"
    PUT_IF_ABSENT = "put_if_absent"
    PUT_IF_MATCH = "put_if_match"
    GET = "get"
    GET_WITH_ETAG = "get_with_etag"
    GET_RANGE = "get_range"
    STREAM = "stream"
    HEAD = "head"
    LIST = "list"
    DELETE = "delete"


class FaultKind(enum.StrEnum):
    """How a call fails."""

    #: `BlobUnavailableError`; the call had no effect.
    BEFORE = "before"
    #: `BlobOutcomeUnknownError`; the write took effect.
    AFTER = "after"
    #: `BlobUnavailableError` after `amount` bytes of a stream, or entries of a listing.
    CUT = "cut"


WRITES = frozenset(
    {Operation.PUT, Operation.PUT_IF_ABSENT, Operation.PUT_IF_MATCH, Operation.DELETE}
)
CUTTABLE = frozenset({Operation.STREAM, Operation.LIST})


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one call: a delay in seconds, then a failure, or either alone."""

    kind: FaultKind | None = None
    amount: int = 0
    delay: float = 0.0


NO_FAULT = Fault()


class FaultPlan(Protocol):
    """Decides about each call, in the order in which calls begin."""

    def next_fault(self, operation: Operation, key: str) -> Fault:
        """Return what happens to this call; `NO_FAULT` to leave it alone."""
        ...


class ScriptedFaults:
    """The n-th call of an operation gets the n-th fault of its script; later calls succeed."""

    def __init__(self, script: Mapping[Operation, Sequence[Fault]] | None = None) -> None:
        for operation, faults in (script or {}).items():
            for fault in faults:
                _check(operation, fault)
        self._left = {operation: deque(faults) for operation, faults in (script or {}).items()}

    def next_fault(self, operation: Operation, key: str) -> Fault:
        left = self._left.get(operation)
        return left.popleft() if left else NO_FAULT


class SeededFaults:
    """Each call fails with the chance of its operation; the same `rng` gives the same faults."""

    def __init__(
        self,
        rng: random.Random,
        chances: Mapping[Operation, float],
        *,
        longest_delay: float = 0.0,
        most_before_cut: int = 64 * 1024,
    ) -> None:
        self._rng = rng
        self._chances = dict(chances)
        self._longest_delay = longest_delay
        self._most_before_cut = most_before_cut

    def next_fault(self, operation: Operation, key: str) -> Fault:
        delay = self._rng.uniform(0, self._longest_delay)
        if self._rng.random() >= self._chances.get(operation, 0.0):
            return Fault(delay=delay)
        kinds = [FaultKind.BEFORE]
        kinds += [FaultKind.AFTER] if operation in WRITES else []
        kinds += [FaultKind.CUT] if operation in CUTTABLE else []
        amount = self._rng.randint(0, self._most_before_cut)
        return Fault(self._rng.choice(kinds), amount, delay)


class FaultyBlobStore(BlobStore):
    """`inner`, failing as `plan` says; errors of its own always name themselves as injected.

    An error of `inner` wins over an injected one: a write that was refused did not take effect.
    """

    def __init__(
        self,
        inner: BlobStore,
        plan: FaultPlan,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._inner = inner
        self._plan = plan
        self._sleep = sleep

    async def put(self, key: str, data: bytes | AsyncIterator[bytes]) -> None:
        await self._call(Operation.PUT, key, lambda: self._inner.put(key, data))

    async def put_if_absent(self, key: str, data: bytes) -> str:
        return await self._call(
            Operation.PUT_IF_ABSENT, key, lambda: self._inner.put_if_absent(key, data)
        )

    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        return await self._call(
            Operation.PUT_IF_MATCH, key, lambda: self._inner.put_if_match(key, data, etag)
        )

    async def get_with_etag(self, key: str) -> tuple[bytes, str]:
        return await self._call(
            Operation.GET_WITH_ETAG, key, lambda: self._inner.get_with_etag(key)
        )

    async def get(self, key: str) -> bytes:
        return await self._call(Operation.GET, key, lambda: self._inner.get(key))

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return await self._call(
            Operation.GET_RANGE, key, lambda: self._inner.get_range(key, start, length)
        )

    async def stream(self, key: str, chunk_size: int = DEFAULT_CHUNK_SIZE) -> AsyncIterator[bytes]:
        fault = await self._begin(Operation.STREAM, key)
        left = fault.amount
        async for piece in self._inner.stream(key, chunk_size):
            if fault.kind is FaultKind.CUT and len(piece) > left:
                if left:
                    yield piece[:left]
                break
            left -= len(piece)
            yield piece
        self._end(Operation.STREAM, key, fault)

    async def head(self, key: str) -> BlobMeta:
        return await self._call(Operation.HEAD, key, lambda: self._inner.head(key))

    async def list(self, prefix: str = "") -> AsyncIterator[BlobMeta]:
        fault = await self._begin(Operation.LIST, prefix)
        left = fault.amount
        async for meta in self._inner.list(prefix):
            if fault.kind is FaultKind.CUT and left == 0:
                break
            left -= 1
            yield meta
        self._end(Operation.LIST, prefix, fault)

    async def delete(self, key: str) -> None:
        await self._call(Operation.DELETE, key, lambda: self._inner.delete(key))

    async def _call(self, operation: Operation, key: str, call: Callable[[], Awaitable[T]]) -> T:
        fault = await self._begin(operation, key)
        result = await call()
        self._end(operation, key, fault)
        return result

    async def _begin(self, operation: Operation, key: str) -> Fault:
        fault = self._plan.next_fault(operation, key)
        _check(operation, fault)
        if fault.delay:
            await self._sleep(fault.delay)
        if fault.kind is FaultKind.BEFORE:
            raise BlobUnavailableError(f"injected: {operation} of {key!r} failed before its effect")
        return fault

    def _end(self, operation: Operation, key: str, fault: Fault) -> None:
        if fault.kind is FaultKind.AFTER:
            raise BlobOutcomeUnknownError(f"injected: {operation} of {key!r} lost its answer")
        if fault.kind is FaultKind.CUT:
            raise BlobUnavailableError(f"injected: {operation} of {key!r} was cut off")


def _check(operation: Operation, fault: Fault) -> None:
    if fault.kind is FaultKind.AFTER and operation not in WRITES:
        raise InvalidError(f"a fault 'after' fits only writes, not {operation}: use 'before'")
    if fault.kind is FaultKind.CUT and operation not in CUTTABLE:
        raise InvalidError(f"a fault 'cut' fits only stream and list, not {operation}")
