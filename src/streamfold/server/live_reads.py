"""Read sessions: deliver what a stream holds and what is appended, until the client leaves.

A reader that never waits, because its records are in memory and its client takes them at once,
would occupy the event loop until it reaches the tail: it gives way. Followers at the tail of a stream
all get the same bytes, encoded once.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, Protocol

from streamfold.errors import StoreClosingError
from streamfold.model.positions import StreamPosition
from streamfold.server.auth import ActiveGrant
from streamfold.server.http.drain import DrainGate, WaitGuard
from streamfold.server.http.headers import Headers
from streamfold.server.http.problems import ClientHangupError
from streamfold.server.http.request import Request
from streamfold.server.http.response_stream import SHARED_PIECE, Buffer, ResponseStream
from streamfold.store.read.reader import Reader
from streamfold.store.read.requests import ReadBatch

#: Records, and metered bytes, after which a reader yields: some milliseconds of work.
YIELD_RECORDS: Final = 1_000
YIELD_BYTES: Final = 1 << 20
#: Seconds of silence before a heartbeat, drawn anew after each so that followers spread out;
#: clients give up after 20.
HEARTBEAT: Final = (5.0, 15.0)
#: Bytes that a session holds while it is behind the tail: about 1 MiB that it has read ahead, a batch
#: of as much, and its encoding.
OWN_BATCH: Final = 4 << 20


class ReaderFairness:
    """Counts what one reader has received since it last yielded to others."""

    __slots__ = ("_bytes", "_records")

    def __init__(self) -> None:
        self._records = self._bytes = 0

    async def after(self, batch: ReadBatch) -> None:
        """Call after each batch; returns at once, most of the time."""
        self._records += batch.count
        self._bytes += batch.metered
        if self._records >= YIELD_RECORDS or self._bytes >= YIELD_BYTES:
            self._records = self._bytes = 0
            await asyncio.sleep(0)


class LiveEncoding(Protocol):
    """How a session looks on the wire: frames, or server-sent events."""

    headers: Headers

    @property
    def form(self) -> Hashable:
        """Equal for encodings that make the same bytes of a batch."""

    def is_heavy(self, batch: ReadBatch) -> bool:
        """Whether the batch must be encoded in a thread."""

    def encode(self, batch: ReadBatch) -> tuple[Buffer, ...]:
        """The message for one batch, or for a heartbeat; shared bytes are one part."""

    async def encode_heavy(self, request: Request, batch: ReadBatch) -> tuple[bytes, ...]:
        """The same, made in a thread."""

    async def finish(self, stream: ResponseStream) -> None:
        """End a session that came to its end."""

    async def fail(self, stream: ResponseStream, error: Exception) -> None:
        """End a session that failed."""


class LiveReads:
    """Serves read sessions."""

    def __init__(self, drain_gate: DrainGate, heartbeat: tuple[float, float]) -> None:
        self._gate = drain_gate
        self._heartbeat = heartbeat

    async def serve(
        self,
        request: Request,
        opening: AbstractAsyncContextManager[Reader],
        active_grant: ActiveGrant,
        encoding: LiveEncoding,
    ) -> None:
        """Serve a session; errors before it opens are raised, later ones are sent to the client."""
        async with opening as reading:
            reading.before_own_batch = partial(request.reserve_answer, OWN_BATCH)
            stream = await request.open(200, encoding.headers)
            try:
                async with WaitGuard(request, self._gate) as watch:
                    await self._deliver(request, reading, stream, watch, active_grant, encoding)
            except ClientHangupError:
                raise
            except Exception as error:
                await encoding.fail(stream, error)
            else:
                await encoding.finish(stream)

    async def _deliver(
        self,
        request: Request,
        reading: Reader,
        stream: ResponseStream,
        watch: WaitGuard,
        active_grant: ActiveGrant,
        encoding: LiveEncoding,
    ) -> None:
        timeout, certain, pace = self._heartbeat_timeout(), active_grant.certain, ReaderFairness()
        while not self._gate.draining.is_set():
            watch.interruptible = True
            following = reading.next(timeout)
            batch = await (following if certain else active_grant.during(following))
            watch.interruptible = False
            if batch is None:
                return
            if not certain:
                await active_grant.require()
            await _send(request, stream, batch, encoding)
            if reading.resting:
                await stream.settle()
            if not batch.count:
                timeout = self._heartbeat_timeout()
            await pace.after(batch)
        raise StoreClosingError

    def _heartbeat_timeout(self) -> float:
        """Seconds of silence before the next heartbeat."""
        return random.uniform(*self._heartbeat)  # noqa: S311


async def _send(
    request: Request, stream: ResponseStream, batch: ReadBatch, encoding: LiveEncoding
) -> None:
    if batch.metered <= SHARED_PIECE:
        await stream.send(*encoding.encode(batch))
    elif stream.held:
        await stream.send(*await _encode(request, batch, encoding))
    else:
        async with stream.sharing((encoding.form, *batch.identity), 3 * batch.metered):
            await stream.send(*await _encode(request, batch, encoding))


async def _encode(request: Request, batch: ReadBatch, encoding: LiveEncoding) -> tuple[Buffer, ...]:
    if encoding.is_heavy(batch):
        return await encoding.encode_heavy(request, batch)
    return encoding.encode(batch)


#: Batches that are kept: followers of one stream are seldom more than a few apart.
KEPT: Final = 64
#: Bytes of all of them together, encodings and records: eight large batches and their JSON.
KEPT_BYTES: Final = 16 << 20


class SharedEncodings:
    """Encodes a recent batch once for all followers that need it in the same form.

    Batches are equal if they consist of the same objects in memory. Sealed batches never are: each
    reader decrypts its own. A kept batch keeps its objects alive, so that their ids are not reused.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, tuple[ReadBatch, bytes]] = OrderedDict()
        self._size = 0
        #: What is being encoded in a thread.
        self._under_way: dict[Hashable, asyncio.Future[None]] = {}
        #: The last request, which the next one most likely repeats.
        self._last: tuple[ReadBatch | None, Hashable, bytes] = (None, None, b"")

    def get(self, batch: ReadBatch, form: Hashable, encode: Callable[[ReadBatch], bytes]) -> bytes:
        """The encoding of `batch`, reused if another follower had it made."""
        last, last_form, encoded = self._last
        if last is batch and last_form == form:
            return encoded
        key = _key(batch, form)
        found = self._kept.get(key)
        encoded = found[1] if found else self._keep(key, batch, encode(batch))
        self._last = batch, form, encoded
        return encoded

    async def get_heavy(
        self,
        batch: ReadBatch,
        form: Hashable,
        encode: Callable[[], Awaitable[bytes]],
    ) -> bytes:
        """The same for a heavy batch: encoded in a thread, once for all followers."""
        key = _key(batch, form)
        while True:
            if (found := self._kept.get(key)) is not None:
                return found[1]
            if (under_way := self._under_way.get(key)) is None:
                break
            await asyncio.wait((under_way,))  # if it fails, the next one tries
        done = self._under_way[key] = asyncio.get_running_loop().create_future()
        try:
            return self._keep(key, batch, await encode())
        finally:
            del self._under_way[key]
            done.set_result(None)

    def _keep(self, key: Hashable, batch: ReadBatch, encoded: bytes) -> bytes:
        self._kept[key] = batch, encoded
        self._size += batch.metered + len(encoded)
        while len(self._kept) > KEPT or self._size > KEPT_BYTES:
            _, (dropped, bytes_dropped) = self._kept.popitem(last=False)
            self._size -= dropped.metered + len(bytes_dropped)
        return encoded


def _key(batch: ReadBatch, form: Hashable) -> tuple[Any, ...]:
    return (form, _position(batch.tail), *map(id, batch.parts))


def _position(tail: StreamPosition | None) -> tuple[int, int] | None:
    return None if tail is None else (tail.seq_num, tail.timestamp)
