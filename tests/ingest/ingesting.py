"""An ingester in the process of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from s2_sdk import S2

from streamfold.backoff import Backoff
from streamfold.errors import StreamfoldError
from streamfold.follow.clients.client import EncodedBatch, StreamClient, StreamRecord
from streamfold.follow.clients.memory import MemoryStream
from streamfold.follow.clients.s2 import S2Client
from streamfold.ingest.postgres.connection import Database
from streamfold.ingest.postgres.ingester import IngestOptions, PostgresIngest
from streamfold.ingest.progress import IngestProgress
from streamfold.ingest.table_stream import BasinStreams, StreamOpener
from streamfold.model.records import Record
from streamfold.records.protobuf import fields
from tests.ingest.conftest import BASIN
from tests.ingest.postgres import PATIENCE
from tests.records.reference import parse_record


def stream(s2: S2, name: str) -> S2Client:
    return S2Client(s2.basin(BASIN).stream(name))


def decode_batch(batch: EncodedBatch) -> list[Record]:
    encoded = batch.records
    return [parse_record(encoded, start, end) for _, start, end in fields(encoded, 0, len(encoded))]


class EncodedMemoryStream(MemoryStream):
    """A stream in memory that accepts encoded records."""

    async def append_encoded(
        self, batches: Sequence[EncodedBatch], *, match_seq_num: int, fencing_token: str
    ) -> int:
        for batch in batches:
            appended = await self.append(
                decode_batch(batch), match_seq_num=match_seq_num, fencing_token=fencing_token
            )
            match_seq_num = appended.end
        return match_seq_num


async def wait_for_first(client: StreamClient, condition: Callable[[StreamRecord], bool]) -> None:
    """Wait until the first record of a stream meets the condition."""
    async with asyncio.timeout(PATIENCE):
        while True:
            (first,) = await client.peek(0, 1)
            if condition(first):
                return
            await asyncio.sleep(0.05)


class Ingesting:
    """An ingester that runs; an error of it is raised where its progress is awaited."""

    def __init__(
        self,
        database: str,
        streams: StreamOpener,
        chosen: IngestOptions,
        trim_points: Mapping[str, int] | None = None,
    ) -> None:
        self._changed = asyncio.Event()
        self.ingest = PostgresIngest(
            Database(database),
            streams,
            chosen,
            backoff=Backoff(first=0.05, longest=0.2),
            on_progress=self._changed.set,
            trim_points=lambda: trim_points or {},
        )
        self.task = asyncio.create_task(self.ingest.run())
        self.task.add_done_callback(lambda _: self._changed.set())

    async def until(self, condition: Callable[[IngestProgress], object]) -> IngestProgress:
        """Wait for progress."""
        async with asyncio.timeout(PATIENCE):
            while not condition(self.ingest.progress):
                if self.task.done():
                    self.task.result()
                self._changed.clear()
                await self._changed.wait()
        return self.ingest.progress

    async def followed(self) -> IngestProgress:
        """Wait until all tables are copied."""
        return await self.until(lambda progress: progress.state == "following")

    async def failure(self) -> BaseException | None:
        """Wait until the ingester fails; it may take several snapshots, for which PostgreSQL waits."""
        async with asyncio.timeout(500):
            await asyncio.wait({self.task})
        return self.task.exception()


@asynccontextmanager
async def ingesting(
    database: str,
    s2: S2,
    chosen: IngestOptions,
    *,
    streams: StreamOpener | None = None,
    trim_points: Mapping[str, int] | None = None,
) -> AsyncIterator[Ingesting]:
    """Ingest while the block runs; `streams` replaces those of the basin."""
    running = Ingesting(database, streams or BasinStreams(s2.basin(BASIN)), chosen, trim_points)
    try:
        yield running
    finally:
        running.task.cancel()
        with suppress(asyncio.CancelledError, StreamfoldError):
            await running.task
