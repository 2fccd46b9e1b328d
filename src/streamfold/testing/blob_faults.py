"""A fault-injecting blob store, for testing code that uses blobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from streamfold.blob.blob_store import DEFAULT_CHUNK_SIZE, BlobMeta, BlobStore
from streamfold.errors import BlobOutcomeUnknownError, BlobUnavailableError
from streamfold.testing.faults import Fault, FaultKind, FaultPlan, FaultyCall, check_fault

T = TypeVar("T")


class Operation(FaultyCall):
    """The operations of a blob store.

    A fault raises `BlobUnavailableError`, or `BlobOutcomeUnknownError` if the write took effect.
    """

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

    @property
    def kinds(self) -> tuple[FaultKind, ...]:
        if self in (Operation.STREAM, Operation.LIST):
            return FaultKind.BEFORE, FaultKind.CUT
        if self in (
            Operation.PUT,
            Operation.PUT_IF_ABSENT,
            Operation.PUT_IF_MATCH,
            Operation.DELETE,
        ):
            return FaultKind.BEFORE, FaultKind.AFTER
        return super().kinds


class FaultyBlobStore(BlobStore):
    """Wraps `inner` and injects the faults of `plan`. Its own errors say "injected".

    An error from `inner` takes precedence over an injected one: a rejected write had no effect.
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
        fault = check_fault(operation, self._plan.next_fault(operation, key))
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
