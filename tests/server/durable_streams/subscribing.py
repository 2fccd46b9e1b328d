"""A server of subscriptions on a real port, a receiver of webhooks on another, and a clock to set."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import Any

import httpx

from streamfold.errors import StreamfoldError, UnauthenticatedError
from streamfold.model.grants import ROOT, Grant
from streamfold.model.records import Record
from streamfold.model.resources import Claim
from streamfold.records.batch import RecordBatch
from streamfold.server.durable_streams.subscriptions import CONTROL_ROOT, Subscriptions
from streamfold.server.durable_streams.subscriptions.fairness import TimeSlice
from streamfold.server.durable_streams.subscriptions.leases import Subscription
from streamfold.server.durable_streams.subscriptions.storage import StoredSubscription
from streamfold.server.http.door import OpenDoor, bind
from streamfold.server.http.request import Request
from streamfold.server.s2.responses import write_problem
from streamfold.store.catalog.creation import NewStream, prepared
from streamfold.store.log.admission import AppendRequest
from streamfold.store.store import StreamStore
from streamfold.wire.durable_streams.offsets import format_offset

BASIN = "test-basin"
JSON = "application/json"
#: 2026-01-01T00:00:00Z in milliseconds.
EPOCH = 1_767_225_600_000
#: Of the jitter of retries.
SEED = 7


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = EPOCH

    def __call__(self) -> int:
        return self.now


@dataclass
class Hook:
    """A request that a receiver got."""

    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.raw)
        return body

    def ack(self, *acks: tuple[str, str], done: bool = False) -> dict[str, Any]:
        """The body of a callback."""
        return {
            "wake_id": self.body["wake_id"],
            "generation": self.body["generation"],
            "acks": [{"stream": stream, "offset": offset} for stream, offset in acks],
            "done": done,
        }


def answer(status: int = 200, body: str = "", *headers: str) -> bytes:
    """A whole answer of HTTP."""
    lines = [f"HTTP/1.1 {status} Because", f"content-length: {len(body)}", *headers, "", body]
    return "\r\n".join(lines).encode()


DONE = answer(200, '{"done":true}')


@dataclass
class Receiver:
    """Takes webhooks; what it answers can be changed. None: it never answers."""

    port: int = 0
    hooks: asyncio.Queue[Hook] = field(default_factory=asyncio.Queue)
    answer: bytes | None = field(default_factory=answer)
    #: Receivers answer only while this is set.
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_answer.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    async def hook(self) -> Hook:
        async with asyncio.timeout(60):
            return await self.hooks.get()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            raw = await reader.readexactly(int(headers["content-length"]))
            self.hooks.put_nowait(Hook(head[0].split(" ")[1], headers, raw))
            await self.may_answer.wait()
            if self.answer is not None:
                writer.write(self.answer)
            else:
                await reader.read()
        finally:
            writer.close()


@asynccontextmanager
async def receiving(port: int = 0) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    server = await asyncio.start_server(receiver.take, "127.0.0.1", port)
    receiver.port = server.sockets[0].getsockname()[1]
    async with server:
        yield receiver


async def read_subscription(
    store: StreamStore, id_: str, basin: str = BASIN
) -> Subscription | None:
    """What storage has of a subscription."""
    return await StoredSubscription(store.documents, basin, id_, TimeSlice).read()


@dataclass
class Bench:
    """A store, a server of its subscriptions, and a client."""

    store: StreamStore
    subscriptions: Subscriptions
    client: httpx.AsyncClient
    clock: Clock

    async def put(self, id_: str, **body: Any) -> httpx.Response:
        return await self.client.put(f"/subscriptions/{id_}", json=body)

    async def get(self, id_: str) -> dict[str, Any]:
        response = await self.client.get(f"/subscriptions/{id_}")
        assert response.status_code == 200, response.text
        shown: dict[str, Any] = response.json()
        return shown

    async def post(
        self, id_: str, action: str, body: Any, token: str | None = None
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token is not None else {}
        return await self.client.post(f"/subscriptions/{id_}/{action}", json=body, headers=headers)

    async def claim(self, id_: str, worker: str = "worker-1") -> dict[str, Any]:
        response = await self.post(id_, "claim", {"worker": worker})
        assert response.status_code == 200, response.text
        claimed: dict[str, Any] = response.json()
        return claimed

    async def acked(self, id_: str, stream: str) -> str | None:
        """How far a stream is acknowledged; None if it is not linked."""
        links = {link["path"]: link["acked_offset"] for link in (await self.get(id_))["streams"]}
        return links.get(stream)

    async def stored(self, id_: str, holds: Callable[[Subscription], bool]) -> Subscription:
        """What storage has of a subscription, as soon as this holds."""
        async with asyncio.timeout(60):
            while True:
                state = await read_subscription(self.store, id_)
                if state is not None and holds(state):
                    return state
                await asyncio.sleep(0.005)  # nothing announces what the background writes

    def pass_seconds(self, seconds: float) -> None:
        self.clock.now += round(seconds * 1000)
        self.subscriptions.look_again()


@asynccontextmanager
async def serving(
    store: StreamStore,
    clock: Clock,
    authorise: Callable[[Request], Awaitable[Grant]] | None = None,
    **options: Any,
) -> AsyncIterator[Bench]:
    """A server of the store's subscriptions; several may follow each other on one store."""
    subscriptions = Subscriptions(
        store,
        BASIN,
        public_url=lambda request: f"http://{request.header('host')}",
        authorise=authorise or _allow,
        now=clock,
        chance=random.Random(SEED),
        **{"local_webhooks": True, "grant_of": _root, **options},
    )
    with closing(bind("127.0.0.1", 0)) as door:
        listener = OpenDoor(door, lambda request: _handle(subscriptions, request))
        url = f"http://127.0.0.1:{listener.port}{CONTROL_ROOT}"
        async with subscriptions.running():
            listener.start()
            async with httpx.AsyncClient(base_url=url, verify=False, timeout=60) as client:
                yield Bench(store, subscriptions, client, clock)
            await listener.stop(2.0)


async def _allow(request: Request) -> Grant:
    return ROOT


async def _root(owner: str | None) -> Grant:
    return ROOT


async def refuse_all(request: Request) -> Grant:
    raise UnauthenticatedError("show a token")


async def _handle(subscriptions: Subscriptions, request: Request) -> None:
    try:
        await subscriptions.handle(request, request.raw_path.removeprefix(CONTROL_ROOT))
    except StreamfoldError as error:
        await write_problem(request, error)


async def create(store: StreamStore, stream: str, *messages: object) -> None:
    """Create a stream of JSON; its first messages are appended afterwards."""
    spec = NewStream(
        content_type=JSON,
        ttl=None,
        expires_at=None,
        trim_on_snapshot=False,
        closed=False,
        fork=None,
        content=prepared([]),
        key=None,
    )
    await store.stream(BASIN, stream).create(spec)
    if messages:
        await append(store, stream, *messages)


async def append(store: StreamStore, stream: str, *messages: object) -> str:
    """Append messages; the offset after them."""
    records = [Record(json.dumps(message).encode()) for message in messages]
    request = AppendRequest((RecordBatch.of(records),), claim=Claim(content_type=JSON))
    ack = await store.stream(BASIN, stream).submit(request).ack
    return format_offset(ack.end.seq_num)


async def messages(store: StreamStore, stream: str) -> list[dict[str, Any]]:
    """Everything that is in a stream."""
    async with store.stream(BASIN, stream).reading(0) as reading:
        found: list[dict[str, Any]] = []
        while (batch := await reading.read()) is not None:
            found += [json.loads(record.body) for record in batch.records()]
    return found


async def next_message(store: StreamStore, stream: str, position: int) -> dict[str, Any]:
    """The message at a position in a stream, as soon as it is appended."""
    async with asyncio.timeout(60), store.stream(BASIN, stream).reading(position) as reading:
        while (batch := await reading.read()) is None:
            await reading.wait(60)
    first: dict[str, Any] = json.loads(next(iter(batch.records())).body)
    return first


def is_held(state: Subscription) -> bool:
    """Whether a worker has a wake, under a lease."""
    return state.wake is not None and state.wake.lease_until is not None


def offsets(streams: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The tails that a worker got, by stream."""
    return {stream["path"]: stream["tail_offset"] for stream in streams}
