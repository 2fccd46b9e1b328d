"""The load of `streamfold bench`: an append session, a follower and a catch-up read, with checks.

Every record's `hash` header covers its body and the previous hash. So a reader that reaches the
last hash has read every record, in order and unchanged. Timestamps are microseconds since the
start.
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
#: Bytes of a hash: enough to detect any mistake.
_HASH_BYTES = 8
_HEADER = b"hash"
#: Metered bytes of a record besides its body: 8, and 2 for each header plus its name and value.
_OVERHEAD = 8 + 2 + len(_HEADER) + _HASH_BYTES
RECORD_MIN, RECORD_MAX = 128, MIB
#: Maximum records and metered bytes of a batch: S2's limit, and a quarter of S2's limit, so that a
#: session at full speed has many acks in flight.
_BATCH_RECORDS, _BATCH_BYTES = 1000, MIB // 4
#: Seconds between batches at a steady rate. Shorter intervals would measure timers.
_TICK = 0.005
#: Maximum metered bytes in flight.
_UNACKED_BYTES = 5 * MIB
#: Seconds that a reader may take for the rest after everything is acknowledged.
_REST = 60.0


@dataclass(slots=True)
class LoadMeasurement:
    """The results so far of one part of the load. Latencies are in milliseconds."""

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
    """How much to append, and how fast."""

    #: Metered bytes of a record.
    record_bytes: int
    #: Bytes per second; 0 = as many as the server accepts.
    rate: float
    seconds: float
    #: Metered bytes after which appending ends too.
    bytes_max: int


class Chain:
    """Computes or checks the hashes of consecutive records."""

    def __init__(self) -> None:
        self._last = b""
        #: Records so far.
        self.count = 0

    def extend(self, body: bytes) -> bytes:
        self._last = blake3(self._last + body).digest(_HASH_BYTES)
        self.count += 1
        return self._last

    def check(self, record: SequencedRecord) -> None:
        """Raise unless this is the record that was appended next."""
        expected = self.count
        hashes = [value for name, value in record.headers if name == _HEADER]
        if record.seq_num != expected or hashes != [self.extend(record.body)]:
            raise VerbFailedError(
                "content_differs",
                f"the server returned something else than was appended, at seq_num {record.seq_num} "
                f"({expected} was expected): report this to those who make the server",
            )


class LoadWriter:
    """Appends records at a rate until the time or the bytes are used up."""

    def __init__(self, stream: S2Stream, load: Load) -> None:
        from s2_sdk import AppendInput, Record

        self._stream, self._load = stream, load
        self._input, self._record = AppendInput, Record
        self._chain = Chain()
        self._filling = os.urandom(load.record_bytes - _OVERHEAD - 8)
        self.measured = LoadMeasurement()
        #: Number of acknowledged records, known at the end.
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
        """Wait until records are due. Returns their number; 0 at the end."""
        load, sent = self._load, self._sent
        largest = max(1, min(_BATCH_RECORDS, _BATCH_BYTES // load.record_bytes))
        left = (load.bytes_max - sent) // load.record_bytes
        if not sent:
            return 1  # at once: the reads need a record, however short the time or low the rate
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
    """Reads and checks records as they arrive."""

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
    """Read and check all records from the first, as fast as the server sends them."""
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
    """End a session and its readers. Repeats cancellations, because the SDK may lose one."""
    for task in (*readers, asyncio.create_task(session.close())):
        await cancel_until_done(task)


def _extent(records: Sequence[SequencedRecord]) -> tuple[int, int]:
    return len(records), sum(_OVERHEAD + len(record.body) for record in records)
