"""Appends on their way from a request to the store, measured."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from time import perf_counter

from streamfold.records import AppendInput
from streamfold.records.batch import RecordBatch
from streamfold.server.auth.access import require_append
from streamfold.server.metrics import AppendMetrics
from streamfold.server.s2.stream_refs import StreamRequest
from streamfold.store.log.shares import AppendAck
from streamfold.store.store import StreamStore
from streamfold.wire.durable_streams.content import check_message, is_json


class Ticket:
    """A batch that has its slot in the stream, and may not be durable yet."""

    __slots__ = ("_ack", "_instruments", "_since")

    def __init__(self, ack: Awaitable[AppendAck], instruments: AppendMetrics, since: float) -> None:
        self._ack = ack
        self._instruments = instruments
        self._since = since

    @property
    def done(self) -> bool:
        """Whether `acknowledged` would return, or raise, at once."""
        return isinstance(self._ack, asyncio.Future) and self._ack.done()

    async def acknowledged(self) -> AppendAck:
        ack = await self._ack
        self._instruments.ack_latency.observe(perf_counter() - self._since)
        return ack


class Appends:
    """Submits batches in the order of the calls."""

    def __init__(self, store: StreamStore, instruments: AppendMetrics) -> None:
        self._store = store
        self._instruments = instruments

    async def submit(self, stream_request: StreamRequest, wanted: AppendInput) -> Ticket:
        """Take a slot for a batch; a refusal raises and has no effect."""
        batch = wanted.batch
        require_append(stream_request.grant, stream_request.basin, stream_request.stream, batch)
        started = perf_counter()
        ack = self._store.submit_at_once(
            stream_request.basin,
            stream_request.stream,
            batch,
            match_seq_num=wanted.match_seq_num,
            fencing_token=wanted.fencing_token,
            key=stream_request.sealing_key,
        )
        if ack is None:
            ack = await self._store.submit(
                stream_request.basin,
                stream_request.stream,
                batch,
                match_seq_num=wanted.match_seq_num,
                fencing_token=wanted.fencing_token,
                create_with=stream_request.create_with,
                key=stream_request.sealing_key,
                check=check_content,
            )
        placed = perf_counter()
        self._instruments.sequenced(placed - started, batch.count, batch.metered)
        return Ticket(ack, self._instruments, placed)


def check_content(content_type: str, batch: RecordBatch) -> None:
    """Raise if a stream of that type cannot hold the batch: JSON stays JSON on every face."""
    if is_json(content_type):
        for body in batch.bodies():
            check_message(body)
