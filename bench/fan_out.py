"""One stream with a steady trickle of records, and many followers of it, each of whom must get all."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.figures import Figure, Latencies, Row, figure_of
from bench.followers import FORMS
from bench.rows import SMALL, Setup
from bench.sessions import AppendSession, chunk_of
from bench.stamps import Arrivals, Receipts, stamped
from bench.store import BASIN
from streamfold.model.records import Record
from streamfold.store import ReadRequest, StreamStore, from_seq_num

#: Streams by the form in which they are followed.
FOLLOWED = {form: f"follow-{form}" for form in FORMS}
#: Records per second.
RATE = 100
#: Followers that one process has without being what is measured: 1000 keep a fifth of a core busy.
FOLLOWERS_PER_PROCESS = 1000
#: Seconds that followers may take longer than the writer before the measurement has failed.
_LAG_MAX = 120.0


async def followers(setup: Setup, form: str) -> Row:
    """Latency from the sending of a record to its receipt, by all followers of one stream."""
    count = setup.scale.followers
    http = await _over_http(setup, form, count)
    beside = await _in_process(setup, FOLLOWED[form], count)
    return Row(f"{count} followers by {form}, {RATE} records/s", "deliveries", http, beside)


@dataclass(frozen=True, slots=True)
class _Crowd:
    """A process of followers."""

    process: asyncio.subprocess.Process
    latencies: Path

    async def report(self) -> dict[str, float]:
        output, _ = await self.process.communicate()
        report: dict[str, float] = json.loads(output)
        if report["incomplete"]:
            raise RuntimeError(f"{report['incomplete']} followers did not get every record")
        return report


async def _over_http(setup: Setup, form: str, count: int) -> Figure:
    records = round(RATE * setup.scale.follow)
    async with AsyncExitStack() as stack:
        crowds = [
            await stack.enter_async_context(_crowd(setup, form, number, part, records))
            for number, part in enumerate(_parts(count))
        ]
        rss_before = (
            setup.server.rss_mib
        )  # with all connected: what is delivered must not add to it
        async with setup.measured_server() as spent:
            await _write_over_http(setup.server.port, FOLLOWED[form], records)
            reports = await asyncio.gather(*(crowd.report() for crowd in crowds))
        latencies = _join(crowds)
        rss_after = setup.server.rss_mib
    # What the processes used to start and to connect is none of this.
    spent.client_cpu = sum(report["cpu"] for report in reports)
    figure = figure_of(spent, records * count, latencies)
    return replace(figure, rss_before_mib=rss_before, rss_after_mib=rss_after)


def _parts(count: int) -> list[int]:
    """How many followers each process gets."""
    full, rest = divmod(count, FOLLOWERS_PER_PROCESS)
    return [FOLLOWERS_PER_PROCESS] * full + [rest] * bool(rest)


@asynccontextmanager
async def _crowd(
    setup: Setup, form: str, number: int, count: int, records: int
) -> AsyncIterator[_Crowd]:
    """A process of followers that are connected."""
    latencies = setup.folder / f"latencies-{form}-{number}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.followers",
        f"--port={setup.server.port}", f"--stream={FOLLOWED[form]}", f"--form={form}",
        f"--followers={count}", f"--records={records}",
        f"--timeout={setup.scale.follow + _LAG_MAX}", f"--latencies={latencies}",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        if await process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the followers ended with {await process.wait()} before a record")
        yield _Crowd(process, latencies)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _write_over_http(port: int, stream: str, records: int) -> None:
    """By one session that never waits for an ack, so that a slow server does not slow its load."""
    with AppendSession(port, stream) as session:
        async for number in _paced(records):
            session.send(chunk_of(stamped(number, SMALL)))
        acked = await asyncio.to_thread(session.finish)
    if acked != records:
        raise RuntimeError(f"{acked} of {records} records were acknowledged")


async def _in_process(setup: Setup, stream: str, count: int) -> Figure:
    records = round(RATE * setup.scale.follow)
    await setup.store.ensure_stream(BASIN, stream)
    arrivals = Arrivals()
    async with (
        setup.measured_store() as spent,
        asyncio.timeout(setup.scale.follow + _LAG_MAX),
        asyncio.TaskGroup() as group,
    ):
        for _ in range(count):
            group.create_task(_follow(setup.store, stream, records, arrivals))
        target = setup.store.stream(BASIN, stream)
        acks = [
            target.append([Record(stamped(number, SMALL))]).ack async for number in _paced(records)
        ]
        await asyncio.gather(*acks)
    return figure_of(spent, records * count, arrivals.latencies())


async def _follow(store: StreamStore, stream: str, records: int, arrivals: Arrivals) -> None:
    receipts = Receipts(arrivals)
    async with store.follow(BASIN, stream, ReadRequest(from_seq_num(0))) as session:
        async for batch in session:
            receipts.take(batch.payload())
            if receipts.count >= records:
                break
    if receipts.count != records or not receipts.in_order:
        raise RuntimeError(f"a follower got {receipts.count} of {records} records")


async def _paced(count: int) -> AsyncIterator[int]:
    """Numbers at the rate of the benchmark; one that is late does not delay those after it."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    for number in range(count):
        await asyncio.sleep(began + number / RATE - loop.time())
        yield number


def _join(crowds: list[_Crowd]) -> Latencies:
    return np.concatenate([np.fromfile(crowd.latencies, np.int64) for crowd in crowds])
