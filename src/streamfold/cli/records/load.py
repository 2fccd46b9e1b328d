"""The load of `streamfold bench`: an append session, a follower and a catch-up read, with checks.

The header `hash` of every record covers its body and the hash before it, so a reader that arrives at
the last one has read every record, in order and unchanged. Timestamps are microseconds since the start.
"""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from streamfold.cli.exit_status import VerbFailedError
from streamfold.follow.clients.feed import cancel_until_done

if TYPE_CHECKING:
    from s2_sdk import AppendInput, BatchSubmitTicket, ReadSession, S2Stream, SequencedRecord

MIB = 1 << 20
#: Bytes of a hash: enough to notice any mistake.
_HASH_BYTES = 8
_HEADER = b"hash"
#: Metered bytes of a record beside its body: 8, and 2 for each header with its name and value.
_OVERHEAD = 8 + 2 + len(_HEADER) + _HASH_BYTES
RECORD_MIN, RECORD_MAX = 128, MIB
#: Records and metered bytes of the largest batch: the first is S2's limit, the second a quarter of it,
#: so that a session at full speed has many acks on their way.
_BATCH_RECORDS, _BATCH_BYTES = 1000, MIB // 4
#: Seconds between two batches at a steady rate: shorter ones would measure timers.
_TICK = 0.005
#: Metered bytes that are on their way at once.
_UNACKED_BYTES = 5 * MIB
#: Seconds that a reader may take for the rest, once everything is acknowledged.
_REST = 60.0


@dataclass(slots=True)
class LoadMeasurement:
    """What one part of the load did so far; latencies in milliseconds."""

    records: int = 0
    size: int = 0
    began: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    latencies: array[float] = field(default_factory=lambda: array("f"))

    @property
    def seconds(self) -> float:
        return (self.ended or time.perf_counter()) - self.began

    def add(self, records: int, size: int) -> None:
        self.records += records
        self.size += size


@dataclass(frozen=True, slots=True)
class Load:
    """How much is appended, and how quickly."""

    #: Metered bytes of a record.
    record_bytes: int
    #: Bytes per second; 0 is as many as the server takes.
    rate: float
    seconds: float
    #: Metered bytes after which the appending ends, too.
    bytes_max: int


class Chain:
    """Makes the hashes of consecutive records, or checks them."""

    def __init__(self) -> None:
        self._last = b""
        #: Records so far.
        self.count = 0

    def extend(self, body: bytes) -> bytes:
        self._last = blake3(self._last + body).digest(_HASH_BYTES)
        self.count += 1
        return self._last

    def check(self, record: SequencedRecord) -> None:
        """Raise if this is not the next record that was appended."""
        expected = self.count
        hashes = [value for name, value in record.headers if name == _HEADER]
        if record.seq_num != expected or hashes != [self.extend(record.body)]:
            raise VerbFailedError(
                "content_differs",
                f"the server returned something else than was appended, at seq_num {record.seq_num} "
                f"({expected} was expected): report this to those who make the server",
            )


class LoadWriter:
    """Appends records at a rate, until the time or the bytes are used up."""

    def __init__(self, stream: S2Stream, load: Load) -> None:
        from s2_sdk import AppendInput, Record

        self._stream, self._load = stream, load
        self._input, self._record = AppendInput, Record
        self._chain = Chain()
        self._filling = os.urandom(load.record_bytes - _OVERHEAD - 8)
        self.measured = LoadMeasurement()
        #: Records that were acknowledged; known at the end.
        self.total: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        tickets: asyncio.Queue[tuple[float, int, BatchSubmitTicket] | None] = asyncio.Queue()
        self.measured.began = time.perf_counter()
        async with self._stream.append_session(max_unacked_bytes=_UNACKED_BYTES) as session:
            acknowledging = asyncio.create_task(self._acknowledge(tickets))
            try:
                while (count := await self._due()) > 0:
                    batch = self._batch(count)
                    sent = time.perf_counter()
                    tickets.put_nowait((sent, count, await session.submit(batch)))
                    if acknowledging.done():
                        break
                tickets.put_nowait(None)
                await acknowledging
            finally:
                acknowledging.cancel()
                await asyncio.gather(acknowledging, return_exceptions=True)
        self.measured.ended = time.perf_counter()
        self.total.set_result(self.measured.records)

    async def _due(self) -> int:
        """Wait until records are due, and return how many; 0 at the end."""
        load, sent = self._load, self._sent
        largest = max(1, min(_BATCH_RECORDS, _BATCH_BYTES // load.record_bytes))
        left = (load.bytes_max - sent) // load.record_bytes
        while left > 0 and (elapsed := time.perf_counter() - self.measured.began) < load.seconds:
            if not load.rate:
                await asyncio.sleep(0)
                return min(largest, left)
            due = int((elapsed * load.rate - sent) // load.record_bytes)
            if due > 0:
                return min(largest, left, due)
            missing = (sent + load.record_bytes) / load.rate - elapsed
            await asyncio.sleep(max(_TICK, min(missing, load.seconds - elapsed)))
        return 0

    @property
    def _sent(self) -> int:
        return self._chain.count * self._load.record_bytes

    def _batch(self, count: int) -> AppendInput:
        since = int((time.perf_counter() - self.measured.began) * 1e6)
        records = []
        for _ in range(count):
            body = self._chain.count.to_bytes(8, "big") + self._filling
            headers = [(_HEADER, self._chain.extend(body))]
            records.append(self._record(body, headers, since))
        return self._input(records)

    async def _acknowledge(
        self, tickets: asyncio.Queue[tuple[float, int, BatchSubmitTicket] | None]
    ) -> None:
        while (item := await tickets.get()) is not None:
            sent, count, ticket = item
            await ticket
            self.measured.latencies.append((time.perf_counter() - sent) * 1000)
            self.measured.add(count, count * self._load.record_bytes)


class LoadReader:
    """Reads and checks what is appended, as it arrives."""

    def __init__(self, stream: S2Stream, writer: LoadWriter) -> None:
        self._stream, self._writer = stream, writer
        self._chain = Chain()
        self.measured = LoadMeasurement()

    async def run(self) -> None:
        from s2_sdk import SeqNum

        session = self._stream.read_session(start=SeqNum(0))
        reading = asyncio.create_task(self._read(session))
        total = self._writer.total
        try:
            waiting: set[asyncio.Future[Any]] = {reading, total}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() or self.measured.records < total.result():
                async with asyncio.timeout(_REST):
                    await reading
        except TimeoutError:
            raise VerbFailedError(
                "records_missing",
                f"a follower received {self.measured.records} of {self._writer.total.result()} "
                f"acknowledged records, and none of the rest within {_REST:.0f} s: look at the "
                "server's log",
            ) from None
        finally:
            reading.cancel()
            await _close(session, reading)

    async def _read(self, session: ReadSession) -> None:
        measured = self.measured
        async for batch in session:
            now = (time.perf_counter() - self._writer.measured.began) * 1e6
            for record in batch.records:
                self._chain.check(record)
                measured.latencies.append((now - record.timestamp) / 1000)
            measured.add(*_extent(batch.records))
            measured.ended = time.perf_counter()
            total = self._writer.total
            if total.done() and measured.records >= total.result():
                return


async def catch_up(stream: S2Stream, records: int) -> LoadMeasurement:
    """Read and check all records from the first, as quickly as the server sends them."""
    from s2_sdk import ReadLimit, SeqNum

    session = stream.read_session(start=SeqNum(0), limit=ReadLimit(count=records))
    chain, measured = Chain(), LoadMeasurement()
    try:
        async for batch in session:
            for record in batch.records:
                chain.check(record)
            measured.add(*_extent(batch.records))
            if measured.records >= records:
                break
    finally:
        await _close(session)
    measured.ended = time.perf_counter()
    if measured.records != records:
        raise VerbFailedError(
            "records_missing",
            f"a catch-up read returned {measured.records} of {records} acknowledged records: look at "
            "the server's log",
        )
    return measured


async def _close(session: ReadSession, *readers: asyncio.Task[None]) -> None:
    """End a session and its readers: one cancellation may be lost in the SDK, so it is repeated."""
    for task in (*readers, asyncio.create_task(session.close())):
        await cancel_until_done(task)


def _extent(records: Sequence[SequencedRecord]) -> tuple[int, int]:
    return len(records), sum(_OVERHEAD + len(record.body) for record in records)
