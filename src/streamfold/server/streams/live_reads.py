"""A read session: what a stream holds and what it gets, for as long as the client wants it."""

from __future__ import annotations

import random
from collections.abc import Hashable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final, Protocol

from streamfold.errors import StoreClosingError
from streamfold.server.auth.access import ActiveGrant
from streamfold.server.http.deadlines import WaitGuard
from streamfold.server.http.drain import DrainGate
from streamfold.server.http.errors import ClientHangupError
from streamfold.server.http.request import Headers, Request
from streamfold.server.http.response_stream import SHARED_PIECE, ResponseStream
from streamfold.server.streams.fairness import ReaderFairness
from streamfold.store.read.reader import ReadSession
from streamfold.store.read.requests import ReadBatch

#: Seconds of silence before a heartbeat, drawn anew after each so that followers do not beat together;
#: clients give up after 20.
HEARTBEAT: Final = (5.0, 15.0)
#: Bytes that a session holds while it is behind the tail: about 1 MiB that it has read ahead, a batch
#: of as much, and its encoding.
OWN_BATCH: Final = 4 << 20


class LiveEncoding(Protocol):
    """How a session looks on the wire: frames, or server-sent events."""

    headers: Headers

    @property
    def form(self) -> Hashable:
        """Equal for presentations whose encodings of a batch are the same bytes."""

    def is_heavy(self, batch: ReadBatch) -> bool:
        """Whether to encode the batch is work for a thread."""

    def encode(self, batch: ReadBatch) -> tuple[bytes, ...]:
        """The message for one batch, or for a heartbeat; what others send, too, is one part."""

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
        opening: AbstractAsyncContextManager[ReadSession],
        active_grant: ActiveGrant,
        presentation: LiveEncoding,
    ) -> None:
        """Answer with a session; what is wrong before it opens is raised, what is later is sent."""
        async with opening as reading:
            reading.before_own_batch = partial(request.reserve_answer, OWN_BATCH)
            stream = await request.open(200, presentation.headers)
            try:
                async with WaitGuard(request, self._gate) as watch:
                    await self._deliver(request, reading, stream, watch, active_grant, presentation)
            except ClientHangupError:
                raise
            except Exception as error:
                await presentation.fail(stream, error)
            else:
                await presentation.finish(stream)

    async def _deliver(
        self,
        request: Request,
        reading: ReadSession,
        stream: ResponseStream,
        watch: WaitGuard,
        active_grant: ActiveGrant,
        presentation: LiveEncoding,
    ) -> None:
        patience, certain, pace = self._heartbeat_timeout(), active_grant.certain, ReaderFairness()
        while not self._gate.draining.is_set():
            watch.interruptible = True
            following = reading.next(patience)
            batch = await (following if certain else active_grant.during(following))
            watch.interruptible = False
            if batch is None:
                return
            if not certain:
                await active_grant.require()
            await _send(request, stream, batch, presentation)
            if reading.resting:
                await stream.settle()
            if not batch.count:
                patience = self._heartbeat_timeout()
            await pace.after(batch)
        raise StoreClosingError

    def _heartbeat_timeout(self) -> float:
        """Seconds of silence before the next heartbeat."""
        return random.uniform(*self._heartbeat)  # noqa: S311


async def _send(
    request: Request, stream: ResponseStream, batch: ReadBatch, presentation: LiveEncoding
) -> None:
    if batch.metered <= SHARED_PIECE:
        await stream.send(*presentation.encode(batch))
    elif stream.held:
        await stream.send(*await _encode(request, batch, presentation))
    else:
        async with stream.sharing((presentation.form, *batch.identity), 3 * batch.metered):
            await stream.send(*await _encode(request, batch, presentation))


async def _encode(
    request: Request, batch: ReadBatch, presentation: LiveEncoding
) -> tuple[bytes, ...]:
    if presentation.is_heavy(batch):
        return await presentation.encode_heavy(request, batch)
    return presentation.encode(batch)
