"""Read sessions: deliver a stream's records, then follow it until the client leaves.

A reader that never has to wait, because its records are in memory and its client reads at once,
yields to others regularly. Followers at the tail of a stream share one encoding of each batch.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol

from streamfold.errors import StoreClosingError
from streamfold.model.positions import StreamPosition
from streamfold.server.auth import ActiveGrant
from streamfold.server.http.drain import DrainGate, WaitGuard
from streamfold.server.http.exchange import Buffer
from streamfold.server.http.headers import Headers
from streamfold.server.http.problems import ClientHangupError
from streamfold.server.http.request import Request
from streamfold.server.http.response_stream import SHARED_AHEAD, ResponseStream
from streamfold.store.read.reader import Reader
from streamfold.store.read.requests import ReadBatch

#: Records or metered bytes after which a reader yields: some milliseconds of work.
YIELD_RECORDS: Final = 1_000
YIELD_BYTES: Final = 1 << 20
#: Range of seconds of silence before a heartbeat. Drawn randomly each time, so that followers
#: spread out. Clients give up after 20.
HEARTBEAT: Final = (5.0, 15.0)
#: Bytes that a session behind the tail holds: about 1 MiB read ahead, a batch of equal size, and
#: its encoding.
OWN_BATCH: Final = 4 << 20


class ReaderFairness:
    """Counts the records that one reader received since it last yielded."""

    __slots__ = ("_bytes", "_records")

    def __init__(self) -> None:
        self._records = self._bytes = 0

    async def after(self, batch: ReadBatch) -> None:
        """Count a batch. Yields if the reader has had its share."""
        if self.should_yield(batch):
            await asyncio.sleep(0)

    def should_yield(self, batch: ReadBatch) -> bool:
        """Count a batch, as `after` does, and return whether to yield now."""
        self._records += batch.count
        self._bytes += batch.metered
        if self._records < YIELD_RECORDS and self._bytes < YIELD_BYTES:
            return False
        self._records = self._bytes = 0
        return True


class LiveEncoding(Protocol):
    """A session's wire format: frames, or server-sent events of either face."""

    headers: Headers

    @property
    def form(self) -> Hashable:
        """Equal for encodings that produce the same bytes."""

    def is_heavy(self, batch: ReadBatch) -> bool:
        """Return whether the batch must be encoded in a thread."""

    def encode(self, batch: ReadBatch) -> tuple[Buffer, ...]:
        """Return the message for a batch or heartbeat, if any.

        Bytes shared by followers form one part.
        """

    async def encode_heavy(self, request: Request, batch: ReadBatch) -> tuple[Buffer, ...]:
        """Encode in a thread."""

    async def finish(self, stream: ResponseStream) -> None:
        """End a session normally."""

    async def fail(self, stream: ResponseStream, error: Exception) -> None:
        """End a failed session, or raise the error to break it off."""


class LiveReads:
    """Serves read sessions."""

    def __init__(
        self,
        drain_gate: DrainGate,
        heartbeat: tuple[float, float],
        lifetime: float = math.inf,
    ) -> None:
        """`lifetime`: seconds after which a session ends once it reaches the tail."""
        self._gate = drain_gate
        self._heartbeat = heartbeat
        self._lifetime = lifetime

    async def serve(
        self,
        request: Request,
        opening: AbstractAsyncContextManager[Reader],
        active_grant: ActiveGrant,
        encode: Callable[[Reader], LiveEncoding],
    ) -> None:
        """Serve a session.

        Errors before it opens are raised, and later ones are sent to the client.
        """
        async with opening as reading:
            encoding = encode(reading)
            stream = await request.open(200, encoding.headers)
            try:
                async with WaitGuard(request, self._gate) as watch:
                    # A separate task, because each batch would otherwise resume all callers too.
                    delivering = self._deliver(
                        request, reading, stream, watch, active_grant, encoding
                    )
                    await asyncio.create_task(delivering)
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
        certain, pace, clock = (
            active_grant.certain,
            ReaderFairness(),
            asyncio.get_running_loop().time,
        )
        ends = clock() + self._lifetime
        timeout = self._heartbeat_timeout()
        while not self._gate.draining.is_set():
            watch.interruptible = True
            following = reading.next(min(timeout, max(0.0, ends - clock())))
            batch = await (following if certain else active_grant.during(following))
            watch.interruptible = False
            if batch is None:
                return
            if not certain:
                await active_grant.require()
            if batch.metered > SHARED_AHEAD:
                await _send_large(request, stream, batch, encoding)
            elif parts := encoding.encode(batch):
                await stream.send(*parts)
            if stream.reserved and reading.resting:
                await stream.settle()
            if not batch.count:
                timeout = self._heartbeat_timeout()
            if pace.should_yield(batch):
                await asyncio.sleep(0)
            if clock() >= ends and reading.at_tail:
                return
        raise StoreClosingError

    def _heartbeat_timeout(self) -> float:
        """Return the seconds of silence before the next heartbeat."""
        return random.uniform(*self._heartbeat)  # noqa: S311


async def _send_large(
    request: Request, stream: ResponseStream, batch: ReadBatch, encoding: LiveEncoding
) -> None:
    if stream.reserved:
        await _encode_and_send(request, stream, batch, encoding)
    else:
        async with stream.sharing((encoding.form, *batch.identity), 3 * batch.metered):
            await _encode_and_send(request, stream, batch, encoding)


async def _encode_and_send(
    request: Request, stream: ResponseStream, batch: ReadBatch, encoding: LiveEncoding
) -> None:
    if encoding.is_heavy(batch):
        parts = await encoding.encode_heavy(request, batch)
    else:
        parts = encoding.encode(batch)
    if parts:
        await stream.send(*parts)


#: Batches kept: followers of one stream are seldom more than a few batches apart.
KEPT: Final = 64
#: Bytes of all kept batches and encodings: eight large batches with their JSON.
KEPT_BYTES: Final = 16 << 20


class SharedEncodings:
    """Encodes a recent batch once for all followers that need it in the same form.

    Batches are equal if they consist of the same objects in memory. Sealed batches never are,
    because each reader decrypts its own. A kept batch keeps its objects alive, so their ids are not
    reused.
    """

    def __init__(self) -> None:
        self._encodings: OrderedDict[Hashable, tuple[ReadBatch, bytes]] = OrderedDict()
        self._size = 0
        #: Encodings in progress in threads.
        self._under_way: dict[Hashable, asyncio.Future[None]] = {}
        #: The last result, because the next call is most likely the same.
        self._last: tuple[ReadBatch | None, Hashable, bytes] = (None, None, b"")

    def get(self, batch: ReadBatch, form: Hashable, encode: Callable[[ReadBatch], bytes]) -> bytes:
        """Return the encoding of `batch`, reused if another follower has already needed it."""
        last, last_form, encoded = self._last
        if last is batch and last_form == form:
            return encoded
        key = _key(batch, form)
        encoding = self._encodings.get(key)
        encoded = encoding[1] if encoding else self._keep(key, batch, encode(batch))
        self._last = batch, form, encoded
        return encoded

    async def get_heavy(
        self,
        batch: ReadBatch,
        form: Hashable,
        encode: Callable[[], Awaitable[bytes]],
    ) -> bytes:
        """Like `get`, for a heavy batch: encodes it in a thread, once for all followers."""
        key = _key(batch, form)
        while True:
            if (encoding := self._encodings.get(key)) is not None:
                return encoding[1]
            if (under_way := self._under_way.get(key)) is None:
                break
            await asyncio.wait((under_way,))  # if it fails, the next caller tries
        done = self._under_way[key] = asyncio.get_running_loop().create_future()
        try:
            return self._keep(key, batch, await encode())
        finally:
            del self._under_way[key]
            done.set_result(None)

    def _keep(self, key: Hashable, batch: ReadBatch, encoded: bytes) -> bytes:
        self._encodings[key] = batch, encoded
        self._size += batch.metered + len(encoded)
        while len(self._encodings) > KEPT or self._size > KEPT_BYTES:
            _, (dropped, bytes_dropped) = self._encodings.popitem(last=False)
            self._size -= dropped.metered + len(bytes_dropped)
        return encoded


def _key(batch: ReadBatch, form: Hashable) -> tuple[Any, ...]:
    return (form, _position(batch.tail), *map(id, batch.parts))


def _position(tail: StreamPosition | None) -> tuple[int, int] | None:
    return None if tail is None else (tail.seq_num, tail.timestamp)
