"""Clients of both faces that write and follow through one address, and account for every record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import httpx
from s2_sdk import (
    S2,
    AppendInput,
    Record,
    Retry,
    S2Stream,
    SeqNum,
    SeqNumMismatchError,
    Timeout,
)

from tests.deploy.balancers import Urls
from tests.sdk import sdk_client

BASIN = "test-basin"
_PRODUCED = f"/{BASIN}/produced"
#: Attempts of S2's client, for longer than a take-over lasts: with 3, its default, it gives up within
#: two seconds.
_RETRY = Retry(max_attempts=100)
#: Seconds without an answer after which a client tries again.
_PATIENCE = 2.0
#: Seconds after which S2's client has lost an append: it repeats those that fail.
_LOST = 30.0
#: Seconds until a client that was refused comes again.
_PAUSE = 0.05


@dataclass
class Acknowledged:
    """How many records of a stream, numbered from 0, have been acknowledged, and when they were."""

    count: int = 0
    longest_pause: float = 0.0
    _last: float = field(default_factory=time.monotonic)

    def add(self) -> None:
        now = time.monotonic()
        self.longest_pause = max(self.longest_pause, now - self._last)
        self.count, self._last = self.count + 1, now

    def start(self) -> None:
        """Measure pauses from now on."""
        self.longest_pause, self._last = 0.0, time.monotonic()

    @property
    def bodies(self) -> list[bytes]:
        return [b"%d," % number for number in range(self.count)]


class Load:
    """Writers and followers of both faces."""

    def __init__(self, s2: S2, web: httpx.AsyncClient) -> None:
        self._streams = {name: s2.basin(BASIN).stream(name) for name in ("requests", "sessions")}
        self._s2, self._web = s2, web
        self._stopping = False
        #: Appends that S2's client took and never sent (upstream defect 27).
        self.lost_by_client = 0
        self.writers = {name: Acknowledged() for name in (*self._streams, "producer")}
        self.followers: dict[str, list[bytes]] = {name: [] for name in self.writers}

    async def create(self) -> None:
        await self._s2.create_basin(BASIN)
        for name in self._streams:
            await self._s2.basin(BASIN).create_stream(name)
        await self._durably("PUT", {"content-type": "application/octet-stream"}, b"")

    # Writers

    async def request(self) -> None:
        """Append one by one; S2's client repeats what fails."""
        stream, writer = self._streams["requests"], self.writers["requests"]
        while not self._stopping:
            with suppress(SeqNumMismatchError):  # an earlier attempt worked; its answer was lost
                await stream.append(_numbered(writer.count))
            writer.add()

    async def append_in_sessions(self) -> None:
        """Append in a session, and in a new one if an append was repeated that had worked before."""
        stream, writer = self._streams["sessions"], self.writers["sessions"]
        while not self._stopping:
            try:
                async with stream.append_session() as session:
                    while not self._stopping:
                        ticket = await session.submit(_numbered(writer.count))
                        async with asyncio.timeout(_LOST):
                            await ticket
                        writer.add()
            except (SeqNumMismatchError, TimeoutError) as error:
                self.lost_by_client += isinstance(error, TimeoutError)
                tail = await stream.check_tail()
                assert writer.count <= tail.seq_num <= writer.count + 1
                if tail.seq_num > writer.count:
                    writer.add()

    async def produce(self) -> None:
        """Append to a Durable Stream as a producer, whose repeated appends are recognized."""
        writer = self.writers["producer"]
        while not self._stopping:
            headers = {"producer-id": "p", "producer-epoch": "0", "producer-seq": str(writer.count)}
            await self._durably("POST", headers, b"%d," % writer.count)
            writer.add()

    async def _durably(self, method: str, headers: dict[str, str], body: bytes) -> None:
        """Send a request until it succeeds."""
        headers = {"content-type": "application/octet-stream", **headers}
        while True:
            try:
                answer = await self._web.request(method, _PRODUCED, content=body, headers=headers)
            except httpx.TransportError:
                continue  # whether it worked is not known, and another attempt changes nothing
            if answer.status_code < 300:
                return
            assert answer.status_code in (500, 502, 503, 504), answer.text
            await asyncio.sleep(_PAUSE)

    # Followers

    async def follow(self, name: str) -> None:
        """Read a stream live in one session, which S2's client continues."""
        async with self._streams[name].read_session(start=SeqNum(0)) as batches:
            async for batch in batches:
                for record in batch.records:
                    assert record.seq_num == len(self.followers[name])
                    self.followers[name].append(record.body)

    async def follow_durably(self) -> None:
        """Read a Durable Stream by long-polls, each from the offset where the last one ended."""
        offset = "-1"
        while True:
            query = {"offset": offset, "live": "long-poll"}
            try:
                answer = await self._web.get(_PRODUCED, params=query)
            except httpx.TransportError:
                continue
            if answer.status_code in (200, 204):
                offset = answer.headers["stream-next-offset"]
                pieces = answer.content.split(b",")[:-1]
                self.followers["producer"] += [piece + b"," for piece in pieces]
            else:
                assert answer.status_code in (500, 502, 503, 504), answer.text
                await asyncio.sleep(_PAUSE)

    # All of them

    async def advance(self) -> None:
        """Return when each writer has had ten more records acknowledged, and followers have them."""
        goals = {name: writer.count + 10 for name, writer in self.writers.items()}
        await _until(
            lambda: all(
                self.writers[name].count >= goal and len(self.followers[name]) >= goal
                for name, goal in goals.items()
            )
        )

    async def check(self) -> None:
        """Every acknowledged record is stored once, in order, and followers got just that."""
        for name, stream in self._streams.items():
            assert await _stored(stream) == self.writers[name].bodies
        page = await self._web.get(_PRODUCED, params={"offset": "-1"})
        assert page.content == b"".join(self.writers["producer"].bodies)
        await _until(
            lambda: all(
                len(self.followers[name]) >= self.writers[name].count for name in self.writers
            )
        )
        assert self.followers == {name: writer.bodies for name, writer in self.writers.items()}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load while the block runs; then everything is accounted for."""
        await self.create()
        async with asyncio.TaskGroup() as readers:
            following = [
                *(readers.create_task(self.follow(name)) for name in self._streams),
                readers.create_task(self.follow_durably()),
            ]
            async with asyncio.TaskGroup() as writers:
                for write in (self.request, self.append_in_sessions, self.produce):
                    writers.create_task(write())
                await self.advance()
                for writer in self.writers.values():
                    writer.start()
                yield
                await self.advance()
                self._stopping = True
            await self.check()
            for task in following:
                task.cancel()


def _numbered(number: int) -> AppendInput:
    return AppendInput([Record(b"%d," % number)], match_seq_num=number)


async def _stored(stream: S2Stream) -> list[bytes]:
    bodies: list[bytes] = []
    async with stream.read_session(start=SeqNum(0), wait=0) as batches:
        async for batch in batches:
            bodies.extend(record.body for record in batch.records)
    return bodies


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(180):
        while not condition():  # noqa: ASYNC110 - as long as it takes
            await asyncio.sleep(0.01)


@asynccontextmanager
async def loading(urls: Urls) -> AsyncIterator[Load]:
    """Load of the servers behind these URLs while the block runs; then all is accounted for."""
    timeout = Timeout(request=timedelta(seconds=_PATIENCE), connection=timedelta(seconds=_PATIENCE))
    async with (
        sdk_client(urls.h2, retry=_RETRY, timeout=timeout) as s2,
        httpx.AsyncClient(base_url=urls.h1, timeout=_PATIENCE, verify=False) as web,
    ):
        load = Load(s2, web)
        async with load.running():
            yield load
