"""Converts append requests for the store, and serves append sessions.

Batches are submitted in arrival order and acknowledged in that order. The first failing batch ends
the session: all acks before it are sent, then one terminal frame. Everything after it is ignored.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias

from streamfold.errors import StoreClosingError, StreamfoldError
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
from streamfold.store.append_queues import Submission
from streamfold.store.log.admission import AppendRequest
from streamfold.store.log.shares import AppendAck
from streamfold.store.stream_handle import StreamHandle
from streamfold.wire.durable_streams.content import check_message, is_json
from streamfold.wire.s2.frames import FRAME_MAX, FrameDecoder, PackedFrame, encode_frame
from streamfold.wire.s2.records_proto import decode_append_frame, encode_append_ack, is_light

#: Unacknowledged batches of one session before reading from the client pauses. The store's
#: admission bounds their bytes, and this bounds the number of small ones.
OUTSTANDING_MAX: Final = 1024
#: Seconds for which a session still accepts appends once the server drains, because their acks advise
#: the client to reconnect. A server that is handing over rejects everyone else meanwhile.
_ADVICE: Final = 1.0
#: Seconds between the last ack and the frame that sends the client to another server. S2's Python
#: client loses an append submitted just as both arrive (upstream defect 27).
_LAST_ACK: Final = 0.2
#: How a session ends: None at the client's request, or an error.
_End: TypeAlias = Exception | None


def append_request(
    stream_request: StreamRequest, rights: AppendRights, append: AppendInput
) -> AppendRequest:
    """Build the store's append request. Raises if the caller may not append this."""
    rights.check(append.batch)
    return AppendRequest(
        (append.batch,),
        match_seq_num=append.match_seq_num,
        fencing_token=append.fencing_token,
        key=None if stream_request.key is None else stream_request.sealing_key,
        create_with=stream_request.create_with,
        check=check_content,
    )


def check_content(content_type: str, batch: RecordBatch) -> None:
    """Raise if a stream of that type cannot contain the batch: JSON stays JSON on every face."""
    if is_json(content_type):
        for body in batch.bodies():
            check_message(body)


class AppendSession:
    """One session, from its first frame to the end of the response."""

    def __init__(
        self,
        request: Request,
        stream: StreamHandle,
        make_request: Callable[[AppendInput], AppendRequest],
        active_grant: ActiveGrant,
        instruments: AppendMetrics,
        drain_gate: DrainGate,
    ) -> None:
        self._request = request
        self._stream = stream
        self._make_request = make_request
        self._active_grant = active_grant
        self._instruments = instruments
        self._gate = drain_gate
        self._loop = asyncio.get_running_loop()
        #: Batches to acknowledge, in order. The last step is the end of the session.
        self._steps: deque[Submission | _End] = deque()
        #: Wakes `_acknowledge` when there is a step; None before it first waits for one.
        self._ready: asyncio.Future[None] | None = None
        self._outstanding = 0
        #: Set when a batch is acknowledged.
        self._acknowledged = asyncio.Event()
        #: The most recent batch, which may not be accepted yet.
        self._newest: Submission | None = None

    async def run(self, stream: ResponseStream) -> None:
        """Serve the session to its end. A client that hangs up gets no terminal frame."""
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(self._read())
            closers = (
                group.create_task(self._close_when_draining(reader)),
                group.create_task(self._close_when_unauthenticated(reader)),
            )
            try:
                # A separate task, because each ack would otherwise resume all callers too.
                end = await asyncio.create_task(self._acknowledge(stream))
            except ClientHangupError as error:
                end = error
            for task in (reader, *closers):
                task.cancel()
        if isinstance(end, ClientHangupError):
            raise end
        if end is None:
            await stream.close()
        else:
            if isinstance(end, StoreClosingError):
                await asyncio.sleep(_LAST_ACK)
            await end_frames(stream, end, changes=True)

    async def _read(self) -> None:
        try:
            await self._submit_frames()
        except Exception as error:
            self._add_step(error)
        else:
            self._add_step(None)

    def _add_step(self, step: Submission | _End) -> None:
        self._steps.append(step)
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    async def _submit_frames(self) -> None:
        decoder, certain = FrameDecoder(), self._active_grant.certain
        # A client may pause between frames for any length of time, but must finish a frame it
        # began.
        async for chunk in self._request.chunks(FRAME_MAX, lambda: decoder.empty):
            decoder.feed(chunk)
            while (frame := decoder.next_packed()) is not None:
                # Compiled code scans a 2 MiB frame in 0.1 ms, or 1.2 ms at worst. A thread hop
                # costs more.
                if not frame.compressed and is_light(frame.body):
                    append = decode_append_frame(frame.unpack())
                else:
                    append = await self._decode_in_thread(frame)
                while self._outstanding >= OUTSTANDING_MAX:
                    self._acknowledged.clear()
                    await self._acknowledged.wait()
                if not certain:
                    await self._active_grant.require()
                # A rejection by a condition depends on the tail in memory alone.
                self._request.check_active()
                submission = self._newest = self._stream.submit(self._make_request(append))
                self._outstanding += 1
                self._add_step(submission)
                # Waiting batches stay in memory, so each session may have only one.
                if submission.accepted_at is None and not await submission.decided():
                    return  # nothing is appended after a rejected batch
        decoder.finish()

    async def _decode_in_thread(self, frame: PackedFrame) -> AppendInput:
        """Decode the append in a frame, off the event loop where that takes long."""
        if frame.compressed and len(frame.body) > LIGHT_BYTES:
            unpacked = await self._request.offload(frame.unpack)
        else:
            unpacked = frame.unpack()
        if unpacked.terminal or is_light(unpacked.body):
            return decode_append_frame(unpacked)
        return await self._request.offload(decode_append_frame, unpacked)

    async def _close_when_draining(self, reader: asyncio.Task[None]) -> None:
        """Stop reading from the client a second after the server began to drain.

        Only an ack can carry the advice to reconnect. A client that follows it stops sending, and
        ends the session itself once it has its remaining acks. S2's clients do not follow it if they
        have reconnected within the last minute: they send until the session ends.
        """
        await self._gate.draining.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(_ADVICE):
                await self._gate.expired.wait()
        self._end(reader, StoreClosingError())

    async def _close_when_unauthenticated(self, reader: asyncio.Task[None]) -> None:
        """End the session when its token becomes invalid.

        Accepted batches are still acknowledged.
        """
        self._end(reader, await self._active_grant.lost())

    def _end(self, reader: asyncio.Task[None], error: StreamfoldError) -> None:
        """End the session with an error that guarantees that nothing else was done."""
        if reader.cancel():
            if self._newest is not None:
                self._newest.withdraw(error)
            self._add_step(error)

    async def _acknowledge(self, stream: ResponseStream) -> _End:
        """Acknowledge batches in order until the session ends.

        Several acks share one write where possible.
        """
        frames: list[bytes] = []
        while True:
            if frames and not (self._steps and _is_settled(self._steps[0])):
                await stream.send(b"".join(frames))
                frames.clear()
            outcome = await self._next_outcome()
            if not isinstance(outcome, AppendAck):
                if frames:
                    await stream.send(b"".join(frames))
                return outcome
            frames.append(self._ack_frame(outcome))
            self._outstanding -= 1
            self._acknowledged.set()

    async def _next_outcome(self) -> AppendAck | _End:
        """Take the first step, once it is settled.

        Cancelling the caller withdraws its batch, unless the store has accepted that.
        """
        while not self._steps:
            self._ready = self._loop.create_future()
            await self._ready
        step = self._steps[0]
        try:
            if not isinstance(step, Submission):
                return step
            ack = await step.ack
        except Exception as error:
            return error
        finally:
            self._steps.popleft()
        self._instruments.observe(step, ack)
        return ack

    def _ack_frame(self, ack: AppendAck) -> bytes:
        message = encode_append_ack(ack.start, ack.end, ack.tail)
        return encode_frame(message, reconnect_advised=self._gate.draining.is_set())


def _is_settled(step: Submission | _End) -> bool:
    return not isinstance(step, Submission) or step.ack.done()
