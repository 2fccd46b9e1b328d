"""Appends on their way from a request to the store, measured; and append sessions.

Batches are submitted in the order in which they arrive and acknowledged in that order. The first
that fails ends the session: the acknowledgements of all before it go out, then one terminal frame,
and everything after it is ignored.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Final, TypeAlias

import msgspec

from streamfold.errors import StoreClosingError
from streamfold.records import AppendInput
from streamfold.records.batch import RecordBatch
from streamfold.server.auth import ActiveGrant, AppendRights
from streamfold.server.http.drain import DrainGate
from streamfold.server.http.offload import LIGHT_BYTES
from streamfold.server.http.problems import ClientHangupError
from streamfold.server.http.request import Request
from streamfold.server.http.response_stream import ResponseStream
from streamfold.server.metrics import AppendMetrics
from streamfold.server.s2.responses import end_frames
from streamfold.server.s2.stream_refs import StreamRequest
from streamfold.store.log.admission import AppendRequest
from streamfold.store.log.shares import AppendAck
from streamfold.store.store import StreamStore
from streamfold.wire.durable_streams.content import check_message, is_json
from streamfold.wire.s2.frames import FRAME_MAX, FrameDecoder, PackedFrame, encode_frame
from streamfold.wire.s2.records_proto import (
    decode_append_frame,
    decode_light_frame,
    encode_append_ack,
)

#: Batches of one session that may wait for their acknowledgement before reading from the client pauses.
#: The store's admission bounds their bytes; this bounds the number of small ones.
OUTSTANDING_MAX: Final = 1024
#: How a session ends: at the client's request, or with an error.
_End: TypeAlias = Exception | None


# Tracked by the garbage collector: the error of a failed commit refers to it, and it to the error.
class Ticket(msgspec.Struct, frozen=True, eq=False):
    """A batch that has its slot in the stream, and may not be durable yet."""

    #: Wait for this, then call `observe`.
    ack: asyncio.Future[AppendAck]
    instruments: AppendMetrics
    #: When the batch got its slot.
    since: float

    def observe(self) -> None:
        """Measure how long the acknowledgement took."""
        self.instruments.ack_latency.observe(perf_counter() - self.since)


class Appends:
    """Submits batches in the order of the calls."""

    def __init__(self, store: StreamStore, instruments: AppendMetrics) -> None:
        self._store = store
        self._instruments = instruments

    async def submit(
        self, stream_request: StreamRequest, rights: AppendRights, wanted: AppendInput
    ) -> Ticket:
        """Take a slot for a batch; a refusal raises and has no effect."""
        started = perf_counter()
        if ticket := self.try_submit(stream_request, rights, wanted):
            return ticket
        ack = await self._store.appends.submit(_append_request(stream_request, wanted))
        return self._ticket(ack, wanted.batch, started)

    def try_submit(
        self, stream_request: StreamRequest, rights: AppendRights, wanted: AppendInput
    ) -> Ticket | None:
        """`submit` for the usual case, without waiting; None, and no effect, if it is another."""
        rights.check(wanted.batch)
        started = perf_counter()
        ack = self._store.appends.try_submit(_append_request(stream_request, wanted))
        return None if ack is None else self._ticket(ack, wanted.batch, started)

    def _ticket(self, ack: asyncio.Future[AppendAck], batch: RecordBatch, started: float) -> Ticket:
        placed = perf_counter()
        self._instruments.sequenced(placed - started, batch.count, batch.metered)
        return Ticket(ack, self._instruments, placed)


def _append_request(stream_request: StreamRequest, wanted: AppendInput) -> AppendRequest:
    return AppendRequest(
        stream_request.ref,
        (wanted.batch,),
        wanted.match_seq_num,
        wanted.fencing_token,
        key=None if stream_request.key is None else stream_request.sealing_key,
        create_with=stream_request.create_with,
        check=check_content,
    )


def check_content(content_type: str, batch: RecordBatch) -> None:
    """Raise if a stream of that type cannot hold the batch: JSON stays JSON on every face."""
    if is_json(content_type):
        for body in batch.bodies():
            check_message(body)


class AppendSession:
    """One session, from the first frame to the end of the response."""

    def __init__(
        self,
        request: Request,
        stream_request: StreamRequest,
        rights: AppendRights,
        active_grant: ActiveGrant,
        appends: Appends,
        drain_gate: DrainGate,
    ) -> None:
        self._request = request
        self._stream_request = stream_request
        self._rights = rights
        self._active_grant = active_grant
        self._appends = appends
        self._gate = drain_gate
        #: Acknowledgements to send, in order; the end of the session is the last.
        self._steps: asyncio.Queue[Ticket | _End] = asyncio.Queue()
        self._room = asyncio.Semaphore(OUTSTANDING_MAX)
        self._outstanding = 0
        #: Whether the store has a batch that it has not accepted or refused yet. It may be storing it.
        self._undecided = False
        #: Why the session ends when that batch is decided.
        self._ending: Exception | None = None

    async def run(self, stream: ResponseStream) -> None:
        """Serve the session to its end; a client that hangs up gets no terminal frame."""
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(self._read())
            closer = group.create_task(self._close_when_draining(reader))
            guard = group.create_task(self._close_when_unauthenticated(reader))
            try:
                end = await self._acknowledge(stream)
            except ClientHangupError as error:
                end = error
            for task in (reader, closer, guard):
                task.cancel()
        if isinstance(end, ClientHangupError):
            raise end
        if end is None:
            await stream.close()
        else:
            await end_frames(stream, end, changes=True)

    async def _read(self) -> None:
        try:
            await self._submit_frames()
        except Exception as error:
            self._steps.put_nowait(error)
        else:
            self._steps.put_nowait(None)

    async def _submit_frames(self) -> None:
        decoder = FrameDecoder()
        # Between frames a client may pause for as long as it likes; a frame that it began must come.
        async for chunk in self._request.chunks(FRAME_MAX, lambda: decoder.empty):
            decoder.feed(chunk)
            while (frame := decoder.next_packed()) is not None:
                wanted = _decode_light(frame)
                if wanted is None:
                    wanted = await self._request.offload(_decode, frame)
                await self._room.acquire()
                await self._active_grant.require()
                self._undecided = True
                ticket = await self._appends.submit(self._stream_request, self._rights, wanted)
                # In the same step as its acceptance: whatever is accepted is acknowledged.
                self._undecided = False
                self._steps.put_nowait(ticket)
                self._outstanding += 1
                if self._ending is not None:
                    raise self._ending
        decoder.finish()

    async def _close_when_draining(self, reader: asyncio.Task[None]) -> None:
        """End an idle session when the server drains, a busy one at the drain deadline.

        Only an acknowledgement can carry the advice to reconnect. A client that got one stops sending,
        and ends the session itself once it has the rest of its acknowledgements.
        """
        await self._gate.draining.wait()
        if self._outstanding or self._undecided:
            await self._gate.expired.wait()
        self._end(reader, StoreClosingError())

    async def _close_when_unauthenticated(self, reader: asyncio.Task[None]) -> None:
        """End the session when its token becomes invalid; accepted batches are still acknowledged."""
        self._end(reader, await self._active_grant.lost())

    def _end(self, reader: asyncio.Task[None], error: Exception) -> None:
        """End the session with an error that says that nothing else was done.

        The first batch of a new stream is undecided until it is stored: the session ends after it.
        """
        if self._undecided:
            self._ending = error
        elif reader.cancel():
            self._steps.put_nowait(error)

    async def _acknowledge(self, stream: ResponseStream) -> _End:
        """Acknowledge batches in order until the session ends, several in one write where possible."""
        frames: list[bytes] = []
        while True:
            if frames and self._steps.empty():
                await _flush(frames, stream)
            step = await self._steps.get()
            if not (isinstance(step, Ticket) and step.ack.done()):
                await _flush(frames, stream)
            outcome = await _outcome(step)
            if not isinstance(outcome, AppendAck):
                await _flush(frames, stream)
                return outcome
            frames.append(self._ack_frame(outcome))
            self._outstanding -= 1
            self._room.release()

    def _ack_frame(self, ack: AppendAck) -> bytes:
        message = encode_append_ack(ack.start, ack.end, ack.tail)
        return encode_frame(message, reconnect_advised=self._gate.draining.is_set())


def _decode_light(frame: PackedFrame) -> AppendInput | None:
    """The append in a frame, if that takes milliseconds at most; None if it is work for a thread.

    Compiled code scans a frame of 2 MiB in 0.1 ms, at worst in 1.2 ms: a trip to a thread costs more.
    """
    if frame.compressed and len(frame.body) > LIGHT_BYTES:
        return None
    return decode_light_frame(frame.unpack())


def _decode(frame: PackedFrame) -> AppendInput:
    return decode_append_frame(frame.unpack())


async def _outcome(step: Ticket | _End) -> AppendAck | _End:
    if not isinstance(step, Ticket):
        return step
    try:
        ack = await step.ack
    except Exception as error:
        return error
    step.observe()
    return ack


async def _flush(frames: list[bytes], stream: ResponseStream) -> None:
    if frames:
        await stream.send(b"".join(frames))
        frames.clear()
