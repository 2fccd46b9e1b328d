"""The clients of `bench.soak`: one connection per request under way, arrivals at a rate, both faces.

A latency counts from the moment at which a request was due, so that a server that is late is not asked
less often for it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from bench.bodies import document
from bench.soak_ledger import Ledger, StreamLedger
from bench.store import BASIN
from streamfold.wire.durable_streams.offsets import parse_offset

#: Seconds after which a client gives up and does not know what became of its request.
PATIENCE = 30.0
#: Seconds that arrivals may be late before the generator leaves some out and counts them.
_LATE_MAX = 1.0
#: Status of a request without an answer.
LOST = 0

_START = re.compile(rb'"start":\{"seq_num":(\d+)')
_CODE = re.compile(rb'"code":"(\w+)"')
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_OFFSET = re.compile(rb"\r\nstream-next-offset: (\S+)\r\n", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"\r\nretry-after: \d+\r\n", re.IGNORECASE)


class Reply(NamedTuple):
    """What came back; without an answer the status is `LOST`."""

    status: int
    head: bytes = b""
    body: bytes = b""

    @property
    def has_retry_after(self) -> bool:
        return _RETRY_AFTER.search(self.head) is not None


class Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request under way."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._buffer = bytearray()
        self._reply: Callable[[Reply], None] | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._bodiless = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        self._pool.connections += 1

    def send(self, request: bytes, reply: Callable[[Reply], None]) -> None:
        """Send a request; `reply` is called once, whatever happens."""
        assert self._transport is not None
        self._reply, self._bodiless = reply, request.startswith(b"HEAD ")
        self._timer = asyncio.get_running_loop().call_later(PATIENCE, self._transport.abort)
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or self._reply is None:
            return
        head = bytes(self._buffer[: end + 2])
        status, start = int(head[9:12]), end + 4
        if not self._bodiless and status not in (204, 304):
            length = _LENGTH.search(head)
            if length is not None:
                stop = start + int(length[1])
                if len(self._buffer) < stop:
                    return
            elif not self._buffer.endswith(b"0\r\n\r\n"):
                return
            else:
                stop = len(self._buffer)
        else:
            stop = start
        reply = Reply(status, head, bytes(self._buffer[start:stop]))
        self._buffer.clear()
        self._finish(reply)
        if b"connection: close" in head.lower():
            self.close()
        else:
            self._pool.give_back(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        self._pool.drop(self)
        self._finish(Reply(LOST))

    def _finish(self, reply: Reply) -> None:
        if self._timer is not None:
            self._timer.cancel()
        answer, self._reply = self._reply, None
        if answer is not None:
            answer(reply)

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Pool:
    """Connections that are idle, and new ones where none is."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0

    def send(self, request: bytes, reply: Callable[[Reply], None]) -> None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                connection.send(request, reply)
                return
        task = asyncio.create_task(self._connect(request, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, request: bytes, reply: Callable[[Reply], None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PATIENCE):
                _, connection = await loop.create_connection(
                    lambda: Connection(self), "127.0.0.1", self._port
                )
        except (OSError, TimeoutError):
            reply(Reply(LOST))  # nothing was sent, but the books may take it as unknown
            return
        connection.send(request, reply)

    async def exchange(self, request: bytes) -> Reply:
        """A request outside the load: set-up and audit."""
        answered: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.send(request, lambda reply: None if answered.done() else answered.set_result(reply))
        return await answered

    def give_back(self, connection: Connection) -> None:
        self._idle.append(connection)

    def drop(self, connection: Connection) -> None:
        self.connections -= 1
        if connection in self._idle:
            self._idle.remove(connection)

    def close_idle(self) -> None:
        """Let go of all connections that wait, as clients do after a rush."""
        for connection in self._idle.copy():
            connection.close()


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """A whole request; `_` in the name of a header stands for a hyphen."""
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", f"s2-basin: {BASIN}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body or method not in ("GET", "HEAD"):
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class Window:
    """What the clients saw since the window before."""

    #: Seconds from when a request was due to its answer: successful appends, and reads.
    appends: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    #: Answers 429 and 503 without Retry-After.
    mute: int = 0
    offered: int = 0
    #: Arrivals that the generator left out because it was late itself.
    left_out: int = 0
    records: int = 0


class Load:
    """A mix of appends and reads of both faces, from a seed."""

    def __init__(self, pool: Pool, ledger: Ledger, seed: int) -> None:
        self._pool, self._ledger = pool, ledger
        self._dice = random.Random(seed)
        self._fillers = [document(size, number)[:-1] for number, size in enumerate((80, 160, 320))]
        self.window = Window()
        self.under_way = 0
        self.refusals: Counter[str] = Counter()

    def take_window(self) -> Window:
        window, self.window = self.window, Window()
        return window

    async def closed_loop(self, clients: int, seconds: float) -> float:
        """Let so many clients ask again as soon as they are answered; returns requests per second."""
        loop = asyncio.get_running_loop()
        end, done, working = loop.time() + seconds, 0, clients
        over = asyncio.Event()

        def next_one() -> None:
            nonlocal done, working
            if loop.time() >= end:
                working -= 1
                if not working:
                    over.set()
                return
            done += 1
            self._arrive(loop.time(), next_one)

        began = loop.time()
        for _ in range(clients):
            next_one()
        await over.wait()
        return done / (loop.time() - began)

    async def open_loop(self, rate: float, seconds: float, clients: int) -> None:
        """Arrivals at `rate` per second at random moments, whether the server keeps up or not.

        An arrival that finds all `clients` waiting is left out, and counted.
        """
        loop = asyncio.get_running_loop()
        due = loop.time()
        end = due + seconds
        while due < end:
            now = loop.time()
            if due > now:
                await asyncio.sleep(min(due - now, 0.005) if due - now > 0.0005 else 0)
                continue
            if now - due > _LATE_MAX or self.under_way >= clients:
                self.window.left_out += 1
            else:
                self._arrive(due, None)
                if self.window.offered % 64 == 0:
                    await asyncio.sleep(0)  # answers are read meanwhile
            due += self._dice.expovariate(rate)

    def _arrive(self, due: float, then: Callable[[], None] | None) -> None:
        self.window.offered += 1
        self.under_way += 1
        draw = self._dice.random()
        if draw < 0.8:
            self._append(due, then)
        else:
            self._read(due, then)

    def _append(self, due: float, then: Callable[[], None] | None) -> None:
        stream = self._dice.choice(self._ledger.streams)
        single = (stream.durable and not stream.json) or self._dice.random() < 0.5
        count = 1 if single else self._dice.randint(2, 8)
        bodies = [self._body(stream) for _ in range(count)]
        data = append(stream, bodies, protobuf=self._dice.random() < 0.3)
        clock = asyncio.get_running_loop().time

        def settle(reply: Reply) -> None:
            self._note(reply)
            if reply.status in (200, 201, 204):
                self.window.appends.append(clock() - due)
                self.window.records += count
                stream.acknowledge(first_seq_num(reply, count), bodies)
            elif reply.status == LOST or (reply.status >= 500 and reply.status != 503):
                stream.doubt(bodies)
            if then is not None:
                then()

        self._pool.send(data, settle)

    def _read(self, due: float, then: Callable[[], None] | None) -> None:
        stream = self._dice.choice(self._ledger.streams)
        near = max(stream.audited - self._dice.randrange(50), stream.trimmed, 0)
        durable = f"/{BASIN}/{stream.name}"
        data = self._dice.choice((
            request("GET", f"{stream.path}/records/tail"),
            request("GET", f"{stream.path}/records?seq_num={near}&count=50&clamp=true"),
            request("GET", f"{durable}?offset={near:016d}_{0:016d}"),
            request("HEAD", durable),
            request("GET", "/v1/streams?limit=20"),
        ))  # fmt: skip
        clock = asyncio.get_running_loop().time

        def settle(reply: Reply) -> None:
            self._note(reply)
            if 200 <= reply.status < 300:
                self.window.reads.append(clock() - due)
            if then is not None:
                then()

        self._pool.send(data, settle)

    def _note(self, reply: Reply) -> None:
        self.under_way -= 1
        self.window.statuses[reply.status] += 1
        if reply.status in (429, 503) and not reply.has_retry_after:
            self.window.mute += 1
        if reply.status >= 400:
            code = _CODE.search(reply.body)
            self.refusals[f"{reply.status} {code[1].decode() if code else ''}".rstrip()] += 1

    def _body(self, stream: StreamLedger) -> bytes:
        """A body that no other record has."""
        number = self._ledger.next_number()
        return b'{"n":%d,"row":"%b"}' % (number, base64.b64encode(self._dice.choice(self._fillers)))


def append(stream: StreamLedger, bodies: list[bytes], *, protobuf: bool = False) -> bytes:
    """An append through the face of the stream."""
    if stream.durable:
        data = b"[" + b",".join(bodies) + b"]" if stream.json else b"".join(bodies)
        kind = "application/json" if stream.json else "application/octet-stream"
        return request("POST", f"/{BASIN}/{stream.name}", data, content_type=kind)
    if protobuf:
        data = b"".join(_record(body) for body in bodies)
        kind = "application/protobuf"
    else:
        data = json.dumps({"records": [{"body": body.decode()} for body in bodies]}).encode()
        kind = "application/json"
    accept = "application/json"
    return request("POST", f"{stream.path}/records", data, content_type=kind, accept=accept)


def trim(stream: StreamLedger, seq_num: int) -> tuple[bytes, bytes]:
    """A command that trims everything before `seq_num`, and its body."""
    body = seq_num.to_bytes(8, "big")
    record = {"body": base64.b64encode(body).decode(), "headers": [["", "dHJpbQ=="]]}
    data = json.dumps({"records": [record]}).encode()
    kind = "application/json"
    path = f"{stream.path}/records"
    return request("POST", path, data, content_type=kind, s2_format="base64"), body


def first_seq_num(reply: Reply, count: int) -> int:
    """Where the records of an acknowledged append are."""
    start = _START.search(reply.body)
    if start is not None:
        return int(start[1])
    offset = _OFFSET.search(reply.head)
    if offset is None:
        raise RuntimeError(f"an append was acknowledged without a position: {reply.head!r}")
    return int(parse_offset(offset[1].decode())) - count


def _record(body: bytes) -> bytes:
    field_ = b"\x1a" + _varint(len(body)) + body
    return b"\x0a" + _varint(len(field_)) + field_


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class Follower(asyncio.Protocol):
    """A live reader that takes everything and looks at nothing; it follows again when it is cut off."""

    def __init__(self, followers: Followers, path: str) -> None:
        self._followers, self._path = followers, path
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(request("GET", self._path, accept="text/event-stream"))

    def data_received(self, data: bytes) -> None:
        self._followers.received += len(data)

    def connection_lost(self, _: Exception | None) -> None:
        self._followers.lost(self._path)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Followers:
    """Live readers of both faces."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._followers: list[Follower] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self.received = 0
        self.reconnects = 0

    def follow(self, path: str) -> None:
        task = asyncio.create_task(self._follow(path))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, path: str) -> None:
        loop = asyncio.get_running_loop()
        while not self._closing:
            try:
                _, follower = await loop.create_connection(
                    lambda: Follower(self, path), "127.0.0.1", self._port
                )
            except OSError:
                await asyncio.sleep(1)
                continue
            self._followers.append(follower)
            return

    def lost(self, path: str) -> None:
        if not self._closing:
            self.reconnects += 1
            loop = asyncio.get_running_loop()
            loop.call_later(1.0, self.follow, path)

    def close(self) -> None:
        self._closing = True
        for follower in self._followers:
            follower.close()
