"""Reads stream logs from storage, several at a time, with as few reads as possible."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from streamfold.errors import DataCorruptError, StreamNotFoundError
from streamfold.model.configs import shared
from streamfold.model.names import StreamRef
from streamfold.model.positions import SeqNum, StreamPosition, Timestamp
from streamfold.store import keys, rows
from streamfold.store.damage import stream_damaged
from streamfold.store.engine.engine import Engine, first_row
from streamfold.store.log import chunks
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.rows import ProducerRow, StateRow, StreamRow


class LogReader:
    """Builds logs from the rows of one engine. `trim_grace` is in milliseconds."""

    def __init__(self, engine: Engine, now: Callable[[], int], trim_grace: int) -> None:
        self._engine = engine
        self._now = now
        self._trim_grace = trim_grace

    async def read(self, refs: Sequence[StreamRef]) -> list[StreamLog | Exception]:
        """Return the log of each ref, or why it cannot be read.

        Reads each kind of row in one call.
        """
        logs: dict[StreamRef, StreamLog | Exception] = {}
        streams: dict[StreamRef, StreamRow] = {}
        try:
            values = await self._engine.get_many([keys.stream(*ref) for ref in refs])
            for ref, value in zip(refs, values, strict=True):
                row = _stream_row(ref, value)
                if isinstance(row, StreamRow):
                    streams[ref] = row
                else:
                    logs[ref] = row
            states = [keys.state(row.id) for row in streams.values()]
            values = await self._engine.get_many(states) if states else []
        except DataCorruptError as error:
            if len(refs) > 1:  # only streams with damaged rows fail
                return [log for ref in refs for log in await self.read([ref])]
            return [stream_damaged(refs[0], None, error)]
        except Exception as error:
            return [error] * len(refs)
        reads = [
            self._read_log(ref, row, state)
            for (ref, row), state in zip(streams.items(), values, strict=True)
        ]
        logs |= {
            ref: stream_damaged(ref, None, log) if isinstance(log, DataCorruptError) else log
            for ref, log in zip(streams, await _gather(reads), strict=True)
        }
        return [logs[ref] for ref in refs]

    async def _read_log(self, ref: StreamRef, row: StreamRow, value: bytes | None) -> StreamLog:
        state = rows.decode(value, StateRow) if value else StateRow()
        if (mark := state.tail) is not None:
            tail = StreamPosition(SeqNum(mark.seq_num), Timestamp(mark.timestamp))
            arrived_at = mark.arrived_at
        else:
            tail, arrived_at = await self._search_tail(row, state)
        producers = await self._producers(row.id) if state.producers else None
        return self.log_of(ref, row, state, tail, arrived_at, producers)

    async def _search_tail(self, row: StreamRow, state: StateRow) -> tuple[StreamPosition, int]:
        """Return the last chunk's end and arrival. Formats before 4 did not store the tail."""
        span = keys.chunks_start(row.id), keys.chunks_end(row.id)
        if stored := await first_row(self._engine, *span, descending=True):
            last = chunks.decode(stored[1])
            return last.end, last.arrived_at
        return state.bare_tail, max(row.created_at, state.bare_arrived_at)

    def log_of(
        self,
        ref: StreamRef,
        row: StreamRow,
        state: StateRow,
        tail: StreamPosition,
        arrived_at: int,
        producers: dict[str, ProducerRow] | None = None,
    ) -> StreamLog:
        """Build a log from this state."""
        grace = self._trim_grace
        return StreamLog(ref, row, state, tail, arrived_at, self._now, producers, grace)

    async def _producers(self, stream_id: int) -> dict[str, ProducerRow]:
        producers = {}
        async with aclosing(self._engine.scan(*keys.producers_span(stream_id), first=100)) as pages:
            async for page in pages:
                for key, value in page:
                    producers[keys.producer_id(key)] = rows.decode(value, ProducerRow)
        return producers


def _stream_row(ref: StreamRef, value: bytes | None) -> StreamRow | Exception:
    if value is None:
        return StreamNotFoundError(*ref)
    try:
        row = rows.decode(value, StreamRow)
    except DataCorruptError as error:
        return stream_damaged(ref, None, error)
    # Nearly all streams share a few configurations. No other caller has this row yet.
    msgspec.structs.force_setattr(row, "config", shared(row.config))
    return row


async def _gather(reads: Sequence[Coroutine[Any, Any, StreamLog]]) -> list[StreamLog | Exception]:
    """Run `reads` concurrently, and return the result or error of each."""
    results: list[StreamLog | Exception] = []
    for result in await asyncio.gather(*reads, return_exceptions=True):
        if not isinstance(result, StreamLog | Exception):
            raise result
        results.append(result)
    return results
