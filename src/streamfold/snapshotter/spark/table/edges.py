"""Where streams start and end; one request fetches the tails of all streams of a basin.

Requests are short and run in threads beside the loop, so a silent server is reported within seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from streamfold.errors import NotFoundError, RetryLaterError, StreamfoldError
from streamfold.snapshotter.source_positions import SourcePositions, joined
from streamfold.snapshotter.spark.errors_from_spark import StreamMissingError
from streamfold.snapshotter.spark.table.progress import UnreadRecords
from streamfold.snapshotter.spark.table_job import TableJob
from streamfold.snapshotter.spark.tasks.arrivals import LastRecord, ask_stream, read_records
from streamfold.snapshotter.spark.tasks.intake import StreamStart
from streamfold.spark.stream.client import Endpoint, ServerConnection, StreamCalls, answer_timeout
from streamfold.spark.stream.options import EARLIEST, LATEST
from streamfold.spark.stream.range_reads import Range

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds for which a short request is retried; a server that is silent for longer gets one attempt.
RETRY_SECONDS = 1.0
#: Seconds to wait for other tables that need a tail: those of one interval are due together.
_GATHER = 0.005
#: Seconds before the second request for a tail whose error may pass.
_PASSING_PAUSE = 0.5
#: Records before the tail to search for the newest commit: nearly always the last one has it.
_LOOK_BACK = 10

Tails = dict[str, int | Exception]


class StreamTails:
    """The tails of all streams. Calls that come together share a request per basin.

    Connections stay open between requests. A server without `POST /v1/tails` is asked for all streams
    in parallel.
    """

    def __init__(self) -> None:
        self._waiting: dict[Endpoint, dict[str, list[asyncio.Future[int]]]] = {}
        self._requests: set[asyncio.Task[None]] = set()
        #: Connections that no request uses.
        self._idle: dict[Endpoint, list[ServerConnection]] = {}
        #: Servers of other makers.
        self._lacking: set[Endpoint] = set()
        self._closed = False

    async def tail(self, job: TableJob) -> int:
        """Return the position after the last record of a table's stream."""
        endpoint = short_requests(job.endpoint)
        outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if endpoint not in self._waiting:
            self._waiting[endpoint] = {}
            request = asyncio.create_task(self._request(endpoint), name=f"tails {endpoint.origin}")
            self._requests.add(request)
            request.add_done_callback(self._requests.discard)
        self._waiting[endpoint].setdefault(job.stream, []).append(outcome)
        try:
            return await outcome
        except NotFoundError:
            raise StreamMissingError(job.stream, endpoint.basin, endpoint.origin) from None

    async def _request(self, endpoint: Endpoint) -> None:
        await asyncio.sleep(_GATHER)
        waiting = self._waiting.pop(endpoint)
        tails = await self._fetch(endpoint, list(waiting))
        passing = [stream for stream, tail in tails.items() if isinstance(tail, RetryLaterError)]
        if passing:
            await asyncio.sleep(_PASSING_PAUSE)
            tails |= await self._fetch(endpoint, passing)
        for stream, outcomes in waiting.items():
            tail = tails.get(stream, NotFoundError(f"no tail of {stream!r}"))
            for outcome in outcomes:
                if outcome.done():
                    continue  # its table has stopped waiting
                if isinstance(tail, Exception):
                    outcome.set_exception(tail)
                else:
                    outcome.set_result(tail)

    async def _fetch(self, endpoint: Endpoint, streams: list[str]) -> Tails:
        """Return the tail of each stream, or why there is none."""
        shares = [[stream] for stream in streams] if endpoint in self._lacking else [streams]
        asked = (asyncio.to_thread(self._ask, endpoint, share) for share in shares)
        tails: Tails = {}
        for answer in await asyncio.gather(*asked):
            tails |= answer
        return tails

    def _ask(self, endpoint: Endpoint, streams: list[str]) -> Tails:
        """Ask over one connection, in a thread."""
        connection = None
        try:
            connection = self._connection(endpoint)
            connection.lacks_tails = endpoint in self._lacking
            tails: Tails = {**StreamCalls(connection).tails(streams)}
        except Exception as error:
            if connection is not None:
                connection.close()
            return dict.fromkeys(streams, error)
        if connection.lacks_tails:
            self._lacking.add(endpoint)
        self._idle.setdefault(endpoint, []).append(connection)
        if self._closed:
            self.close()
        return tails

    def _connection(self, endpoint: Endpoint) -> ServerConnection:
        try:
            return self._idle.setdefault(endpoint, []).pop()
        except IndexError:
            return ServerConnection(endpoint, answer_timeout(endpoint))

    def close(self) -> None:
        """Close all connections, those of requests under way once they end."""
        self._closed = True
        for connections in list(self._idle.values()):
            with suppress(IndexError):  # a request may take the last one
                while True:
                    connections.pop().close()


def short_requests(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint with few retries: the caller reports failures and tries again."""
    return replace(endpoint, retry_timeout=min(endpoint.retry_timeout, RETRY_SECONDS))


class StreamEdges:
    """Positions in the stream of one table."""

    def __init__(self, job: TableJob, tails: StreamTails) -> None:
        self._job = job
        self._tails = tails
        self._start: StreamStart | None = None

    async def tail(self) -> int:
        """Return the position after the last record."""
        return await self._tails.tail(self._job)

    async def start(self) -> StreamStart:
        """Return where a table without an archive starts; fetched once, so it stays the same."""
        if self._start is None:
            self._start = await self._ask(self._find_start)
        return self._start

    async def timestamp(self, seq_num: int) -> int | None:
        """Return the timestamp of a record in milliseconds; None if it no longer exists."""
        return await self._ask(lambda streams: streams.timestamp(self._job.stream, seq_num))

    async def check_last_record(self, last: LastRecord) -> None:
        """Raise StreamReplacedError if a record's timestamp is not the one in the archive."""
        last.check(self._job.stream, await self.timestamp(last.seq_num))

    async def unread(self, start: int, tail: int) -> UnreadRecords:
        """Describe the records that are not taken in."""
        timestamp = newest_commit = None
        try:
            timestamp = await self.timestamp(start)
            newest_commit = await self._newest_commit(start, tail)
        except StreamfoldError as error:
            # They may be trimmed, which the next update reports; their times are unknown.
            logger.debug("table %s: %s", self._job.table, error.message)
        return UnreadRecords(start, timestamp, newest_commit)

    async def _newest_commit(self, start: int, tail: int) -> int | None:
        """Return the LSN of the newest commit among the last records; None without source positions."""
        last = Range(self._job.stream, max(start, tail - _LOOK_BACK), tail)
        endpoint = short_requests(self._job.endpoint)
        batches = await asyncio.to_thread(read_records, endpoint, last)
        positions = [(SourcePositions.of(batch["headers"]), len(batch)) for batch in batches]
        newest = joined([p.span(0, count, 0) for p, count in positions if p])
        return None if newest is None else newest.last

    async def _ask(self, question: Callable[[StreamCalls], T]) -> T:
        endpoint = short_requests(self._job.endpoint)
        return await asyncio.to_thread(ask_stream, endpoint, self._job.stream, question)

    def _find_start(self, streams: StreamCalls) -> StreamStart:
        job = self._job
        tail = int(streams.tail(job.stream).seq_num)
        if job.start == LATEST:
            return StreamStart(tail, tail, tail > 0, True)
        if job.start == EARLIEST:
            first = streams.first(job.stream)
            return StreamStart(first, tail, first > 0, job.publish_trimmed)
        # From there on the stream has the whole table, as the configuration says.
        return StreamStart(int(job.start), tail, False, True)
