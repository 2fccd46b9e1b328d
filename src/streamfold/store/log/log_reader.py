"""Reads the logs of streams from storage, several at a time and with as few reads as they need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from streamfold.errors import DataCorruptError, StreamNotFoundError
from streamfold.model.configs import shared
from streamfold.model.names import StreamRef
from streamfold.model.positions import StreamPosition
from streamfold.store import keys, rows
from streamfold.store.engine.engine import Engine, first_row
from streamfold.store.log import chunks
from streamfold.store.log.idle_streams import resumable
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.rows import ProducerRow, ResumeRow, StateRow, StoredResume, StreamRow


class LogReader:
    """Makes logs from the rows of one engine.

    ResumeRows of the openings from `resumes_from` on count; `trim_grace` is in milliseconds.
    """

    def __init__(
        self, engine: Engine, now: Callable[[], int], trim_grace: int, resumes_from: int
    ) -> None:
        self._engine = engine
        self._now = now
        self._trim_grace = trim_grace
        self._resumable = range(resumes_from, engine.epoch + 1)
        #: Whether most of the streams that were last read had a ResumeRow: then it is read first.
        self._resumes_likely = resumes_from < engine.epoch

    async def read(self, refs: Sequence[StreamRef]) -> list[StreamLog | Exception]:
        """The logs of `refs`, or why they cannot be read; each kind of row is read for all at once.

        A ResumeRow is all that a stream needs. A stream that is missing has none either, so it is read
        first only while most streams that are read have one.
        """
        found: dict[StreamRef, StreamLog | Exception] = {}
        unused: set[StreamRef] = set()
        try:
            if self._resumes_likely:
                found |= await self._read_resumes(refs, unused)
            others = [ref for ref in refs if ref not in found]
            wanted = [keys.stream(*ref) for ref in others]
            values = await self._engine.get_many(wanted) if others else []
            rows_of = {
                ref: _stream_row(ref, value) for ref, value in zip(others, values, strict=True)
            }
            cold = {ref: row for ref, row in rows_of.items() if isinstance(row, StreamRow)}
            found |= {ref: error for ref, error in rows_of.items() if isinstance(error, Exception)}
            if cold and not self._resumes_likely:
                found |= await self._read_resumes(list(cold), unused)
                cold = {ref: row for ref, row in cold.items() if ref not in found}
            states = [keys.state(row.id) for row in cold.values()]
            values = await self._engine.get_many(states) if cold else []
        except Exception as error:
            return [error] * len(refs)
        resumed = sum(isinstance(log, StreamLog) for log in found.values())
        self._resumes_likely = resumed > len(refs) // 2
        reads = [
            self._read_log(ref, row, state)
            for (ref, row), state in zip(cold.items(), values, strict=True)
        ]
        found |= zip(cold, await _gather(reads), strict=True)
        for ref in unused:
            if isinstance(log := found[ref], StreamLog):
                log.resume_stored = StoredResume.UNUSED
        return [found[ref] for ref in refs]

    async def _read_resumes(
        self, refs: Sequence[StreamRef], unused: set[StreamRef]
    ) -> dict[StreamRef, StreamLog]:
        """The logs of those of `refs` that have a ResumeRow that counts; adds others to `unused`."""
        values = await self._engine.get_many([keys.resume(*ref) for ref in refs])
        found = {}
        for ref, value in zip(refs, values, strict=True):
            if value is not None and (row := resumable(value, self._resumable)):
                found[ref] = self.resumed(ref, row, StoredResume.CURRENT)
            elif value is not None:
                unused.add(ref)
        return found

    async def _read_log(self, ref: StreamRef, row: StreamRow, value: bytes | None) -> StreamLog:
        state = rows.decode(value, StateRow) if value else StateRow()
        tail = state.bare_tail
        arrived_at = max(row.created_at, state.bare_arrived_at)
        span = keys.chunks_start(row.id), keys.chunks_end(row.id)
        if found := await first_row(self._engine, *span, descending=True):
            last = chunks.decode(found[1])
            tail, arrived_at = last.end, last.arrived_at
        producers = await self._producers(row.id) if state.producers else None
        return self.log_of(ref, row, state, tail, arrived_at, producers)

    def resumed(self, ref: StreamRef, resumed: ResumeRow, stored: StoredResume) -> StreamLog:
        """The log that a ResumeRow describes."""
        row, state, arrived_at = resumed.row, resumed.state, resumed.arrived_at
        msgspec.structs.force_setattr(row, "config", shared(row.config))  # nobody else has this row
        log = self.log_of(ref, row, state, resumed.tail, arrived_at, resumed.producers)
        log.resume_stored = stored
        return log

    def log_of(
        self,
        ref: StreamRef,
        row: StreamRow,
        state: StateRow,
        tail: StreamPosition,
        arrived_at: int,
        producers: dict[str, ProducerRow] | None = None,
    ) -> StreamLog:
        """A log of this state."""
        grace = self._trim_grace
        return StreamLog(ref, row, state, tail, arrived_at, self._now, producers, grace)

    async def _producers(self, stream_id: int) -> dict[str, ProducerRow]:
        found = {}
        async with aclosing(self._engine.scan(*keys.producers_span(stream_id), first=100)) as pages:
            async for page in pages:
                for key, value in page:
                    found[keys.producer_id(key)] = rows.decode(value, ProducerRow)
        return found


def _stream_row(ref: StreamRef, value: bytes | None) -> StreamRow | Exception:
    if value is None:
        return StreamNotFoundError(*ref)
    try:
        return rows.decode(value, StreamRow)
    except DataCorruptError as error:
        return error


async def _gather(reads: Sequence[Coroutine[Any, Any, StreamLog]]) -> list[StreamLog | Exception]:
    """The results of `reads`, which run at the same time, or why they failed."""
    found: list[StreamLog | Exception] = []
    for result in await asyncio.gather(*reads, return_exceptions=True):
        if not isinstance(result, StreamLog | Exception):
            raise result
        found.append(result)
    return found
