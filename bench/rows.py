"""The measurements of the S2 face: each over HTTP, and right after it the same in this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.server.frames import append_frame, frames_in

from bench import h2load
from bench.figures import Figure, Row, Spent, figure_of, measured, settle
from bench.h2load import Shape
from bench.serving import Served
from bench.sessions import append_all, chunk_of, read_batches, read_session
from bench.store import BASIN, MIB, catch_up, measure_acks
from streamfold.model.records import BATCH_RECORDS_MAX
from streamfold.records import parse_append_input
from streamfold.store import ReadRequest, StreamStore, from_seq_num

#: That small appends are spread over; `measure_acks` calls them the same.
SMALL_STREAMS = [f"acks-{number}" for number in range(500)]
#: By the number of sessions that write to them, each to its own.
BULK_STREAMS = {sessions: [f"bulk-{sessions}-{n}" for n in range(sessions)] for sessions in (1, 4)}
#: Bytes of a small record; of a large one, which with its 8 bytes of overhead is metered as 1 KiB.
SMALL, LARGE = 256, 1016
#: As many records as a batch may have: 0.98 MiB metered.
BATCH = [LARGE * b"x"] * BATCH_RECORDS_MAX
BATCH_MIB = BATCH_RECORDS_MAX * 1024 / MIB
#: Seconds before small appends are measured in this process, so that all streams are open.
WARM_UP = 0.25


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    #: For small appends.
    seconds: float
    #: MiB that are appended by all sessions of a row together.
    bulk: int
    followers: int
    #: Seconds for which followers get records.
    follow: float


FULL = Scale(seconds=4.0, bulk=256, followers=1000, follow=10.0)
QUICK = Scale(seconds=1.0, bulk=48, followers=100, follow=2.0)


@dataclass(frozen=True, slots=True)
class Setup:
    """Where to measure: a server, and a store on the same kind of storage in this process."""

    server: Served
    store: StreamStore
    scale: Scale
    folder: Path

    @asynccontextmanager
    async def measured_server(self) -> AsyncIterator[Spent]:
        """Measure the server, once all is quiet."""
        await settle(self.server.pid, os.getpid())
        with measured(self.server.pid) as spent:
            yield spent

    @asynccontextmanager
    async def measured_store(self) -> AsyncIterator[Spent]:
        """Measure the store in this process, once all is quiet."""
        await settle(self.server.pid, os.getpid())
        with measured(os.getpid()) as spent:
            yield spent


async def small_appends(setup: Setup, name: str, shape: Shape, streams: int) -> Row:
    """Appends of one small record each, as many at once as `shape` says."""
    http, note = None, "h2load is missing: install nghttp2-client"
    if h2load.available():
        http, note = await _small_over_http(setup, shape, streams)
    at_once, seconds = shape.connections * shape.requests, setup.scale.seconds
    await measure_acks(setup.store, at_once, streams, WARM_UP)
    async with setup.measured_store() as spent:
        acks = await measure_acks(setup.store, at_once, streams, seconds)
    figure = figure_of(spent, acks["acks_per_s"] * spent.seconds)
    beside = replace(figure, p50_ms=acks["p50_ms"], p99_ms=acks["p99_ms"])
    return Row(name, "acks", http, beside, note)


async def _small_over_http(setup: Setup, shape: Shape, streams: int) -> tuple[Figure, str]:
    url, body = setup.server.url, b"x" * SMALL
    appender = h2load.Appender.to_s2(url, SMALL_STREAMS[:streams], body, setup.folder)
    await appender.warm_up()
    async with setup.measured_server() as spent:
        load = await appender.run(shape, setup.scale.seconds)
    figure = figure_of(spent, len(load.latencies), load.latencies)
    note = f"{load.failures} without 2xx" if load.failures else ""
    return replace(figure, per_second=load.acks_per_s), note


async def bulk_appends(setup: Setup, sessions: int) -> Row:
    """Full batches by so many append sessions, each to a stream of its own."""
    streams, batches = BULK_STREAMS[sessions], _batches(setup, sessions)
    chunk, (frame,) = chunk_of(*BATCH), frames_in(append_frame(*BATCH))
    async with setup.measured_server() as spent:
        await asyncio.gather(
            *(
                asyncio.to_thread(append_all, setup.server.port, stream, chunk, batches)
                for stream in streams
            )
        )
    http = figure_of(spent, sessions * batches * BATCH_MIB)
    await asyncio.gather(*(setup.store.ensure_stream(BASIN, stream) for stream in streams))
    async with setup.measured_store() as spent:
        await asyncio.gather(
            *(_submit_all(setup.store, stream, frame.body, batches) for stream in streams)
        )
    beside = figure_of(spent, sessions * batches * BATCH_MIB)
    return Row(f"bulk append, {sessions} s2s session{'s' * (sessions > 1)}", "MiB", http, beside)


async def _submit_all(store: StreamStore, stream: str, message: bytes, batches: int) -> None:
    """What a session does: the next batch as soon as there is room, without waiting for acks."""
    batch = parse_append_input(message).batch
    acks = []
    for _ in range(batches):
        submission = store.stream(BASIN, stream).append(batch)
        acks.append(submission.ack)
        await submission.decided()
        await asyncio.sleep(0)  # else all would go into one commit; frames come one by one
    await asyncio.gather(*acks)


async def catch_up_by_requests(setup: Setup) -> Row:
    """Read what `bulk_appends` with one session wrote, one full batch after the other."""
    (stream,), records = BULK_STREAMS[1], _batches(setup, 1) * BATCH_RECORDS_MAX
    async with setup.measured_server() as spent:
        size = await asyncio.to_thread(read_batches, setup.server.port, stream, records)
    http = figure_of(spent, _mebibytes(size, records))
    async with setup.measured_store() as spent:
        size = await _read_batches(setup.store, stream, records)
    beside = figure_of(spent, _mebibytes(size, records))
    return Row("catch-up read, protobuf requests", "MiB", http, beside)


async def _read_batches(store: StreamStore, stream: str, records: int) -> int:
    size = 0
    for start in range(0, records, BATCH_RECORDS_MAX):
        request = ReadRequest(from_seq_num(start), count=BATCH_RECORDS_MAX)
        size += len((await store.read(BASIN, stream, request)).payload())
    return size


async def catch_up_by_session(setup: Setup) -> Row:
    """Read the same in one session."""
    (stream,), records = BULK_STREAMS[1], _batches(setup, 1) * BATCH_RECORDS_MAX
    async with setup.measured_server() as spent:
        size = await asyncio.to_thread(read_session, setup.server.port, stream, records)
    http = figure_of(spent, _mebibytes(size, records))
    async with setup.measured_store() as spent:
        size = await catch_up(setup.store, stream)
    beside = figure_of(spent, _mebibytes(size, records))
    return Row("catch-up read, s2s session", "MiB", http, beside)


def _batches(setup: Setup, sessions: int) -> int:
    """Batches for each of so many sessions."""
    return round(setup.scale.bulk / sessions / BATCH_MIB)


def _mebibytes(size: int, records: int) -> float:
    """The size of a read, which must have had all records."""
    if size < records * LARGE:
        raise RuntimeError(f"a read of {records} records of {LARGE} bytes returned {size} bytes")
    return size / MIB
