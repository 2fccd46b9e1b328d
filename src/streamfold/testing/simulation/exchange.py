"""One request and its answer without sockets, as granian hands them to the server.

The client's end is here, too: bodies arrive in pieces, clients vanish at any time, and answers may
break off. As below granian, `send` does not report that the client has gone, and over HTTP/2 a body of
undeclared size that is reset looks like one that ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from streamfold.testing.simulation.loop import chance

_DISCONNECT = {"type": "http.disconnect"}


class LostAnswerError(Exception):
    """No whole answer came: nobody knows what the server did."""


class SimulatedAnswer(msgspec.Struct, frozen=True):
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The stable code of a problem; empty if the body has none."""
        if not self.body.startswith(b"{"):
            return ""
        return str(msgspec.json.decode(self.body).get("code", ""))

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    def __str__(self) -> str:
        return f"{self.status} {self.code}".rstrip()


class Exchange:
    """A request on its way; the server has `receive` and `send`, the client everything else."""

    def __init__(
        self, method: str, path: str, headers: Mapping[str, str], *, declared: int | None
    ) -> None:
        random = chance()
        self._version = random.choice(("1.1", "1.1", "2"))
        self._declared = declared is not None
        fields = [(name.encode(), value.encode()) for name, value in headers.items()]
        if declared is not None:
            fields.append((b"content-length", b"%d" % declared))
        path, _, query = path.partition("?")
        self.scope = {
            "method": method,
            "client": ("192.0.2.1", str(random.randrange(1024, 65536))),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "http_version": self._version,
            "headers": fields,
            "scheme": "http",
        }
        self._inbox: deque[dict[str, Any]] = deque()
        self._receivers: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._sent_all = False
        self.gone = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self._pieces: deque[bytes] = deque()
        self._complete = False
        self._broken = False
        self._news = asyncio.Event()

    # The server's end

    def receive(self) -> asyncio.Future[dict[str, Any]]:
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if self._inbox:
            future.set_result(self._inbox.popleft())
        elif self.gone:
            future.set_result(dict(_DISCONNECT))
        else:
            self._receivers.append(future)
        return future

    async def send(self, message: Any) -> None:
        """Take a part of the answer, when the client is ready for it."""
        if chance().random() < 0.3:
            await asyncio.sleep(chance().random() ** 3 * 0.05)
        if self.gone:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        self._pieces.append(message["body"])
        self._complete = not message["more_body"]
        self._news.set()

    def end(self) -> None:
        """The server is done with the request."""
        self._broken = not self._complete
        self._news.set()

    # The client's end

    def _deliver(self, message: dict[str, Any]) -> None:
        while self._receivers:
            receiver = self._receivers.popleft()
            if not receiver.done():
                receiver.set_result(message)
                return
        self._inbox.append(message)

    def upload(self, data: bytes, *, last: bool) -> None:
        """Send a piece of the body."""
        if not self.gone and not self._sent_all:
            self._sent_all = last
            self._deliver({"type": "http.request", "body": data, "more_body": not last})

    async def upload_all(self, body: bytes) -> None:
        """Send a body in pieces, with pauses; one that is declared may end with its last byte."""
        random, at = chance(), 0
        while at < len(body):
            if random.random() < 0.5:
                await asyncio.sleep(random.random() ** 3 * 0.1)
            size = random.randint(1, len(body) - at) if random.random() < 0.4 else len(body) - at
            at += size
            self.upload(body[at - size : at], last=at == len(body) and random.random() < 0.5)
        self.upload(b"", last=True)

    def vanish(self) -> None:
        """Hang up: the server learns of it when it next looks."""
        if self.gone:
            return
        if not self._sent_all and self.ends_unseen:
            self.upload(b"", last=True)
        self.gone = True
        self._news.set()
        while self._receivers:
            if not (receiver := self._receivers.popleft()).done():
                receiver.set_result(dict(_DISCONNECT))
        if not self._sent_all:
            self._inbox.append(dict(_DISCONNECT))

    @property
    def ends_unseen(self) -> bool:
        """Whether the server cannot tell a body that breaks off from one that ends."""
        return not self._declared and self._version == "2"

    async def head(self) -> int:
        """Wait for status and headers."""
        while not self._pieces and not self._complete:
            await self._wait()
        return self.status

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes; LostAnswerError if it breaks off."""
        while True:
            while self._pieces:
                yield self._pieces.popleft()
            if self._complete:
                return
            await self._wait()

    async def answer(self) -> SimulatedAnswer:
        """The whole answer; LostAnswerError if there is none."""
        parts: Sequence[bytes] = [piece async for piece in self.pieces()]
        return SimulatedAnswer(self.status, self.headers, b"".join(parts))

    async def _wait(self) -> None:
        if self._broken or self.gone:
            raise LostAnswerError
        self._news.clear()
        await self._news.wait()
