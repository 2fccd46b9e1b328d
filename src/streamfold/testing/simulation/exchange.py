"""One request and its answer without sockets, in place of the door's exchange.

Also holds the client's end: bodies arrive in pieces, clients vanish at any time, and answers may be cut
off.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping, Sequence

from streamfold.server.http.connections import Connection
from streamfold.server.http.exchange import Buffer
from streamfold.server.http.headers import Headers
from streamfold.server.http.problems import ClientHangupError
from streamfold.testing.adversary.client import Answer
from streamfold.testing.simulation.loop import chance


class LostAnswerError(Exception):
    """No complete answer arrived, so the outcome is unknown."""


class SimulatedExchange:
    """A request in flight: an `Exchange` for the server, combined with the client's end."""

    def __init__(
        self,
        connection: Connection,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        declared: int | None,
        body: bytes | None = None,
    ) -> None:
        random = chance()
        self.connection = connection
        self.method = method
        self.scheme = "http"
        target, _, query = path.partition("?")
        self.raw_path = target.encode()
        self.raw_query = query.encode()
        self.http_version = random.choice(("1.1", "1.1", "2"))
        fields = {name.encode(): value.encode() for name, value in headers.items()}
        if declared is not None:
            fields[b"content-length"] = b"%d" % declared
        self.headers: Mapping[bytes, bytes] = fields
        self.repeated: Collection[bytes] = ()
        self.body = body
        #: Pieces the client sent. An empty piece marks the end, and None means it vanished before
        #: the end.
        self._inbox: deque[bytes | None] = deque()
        self._sent_all = body is not None
        self._arrived = asyncio.Event()
        self.vanished = asyncio.Event()
        self.status = 0
        self.answer_headers: dict[str, str] = {}
        #: Answer pieces in flight. The client takes them when it is ready.
        self._pieces: deque[bytes] = deque()
        self._sent = self._delivered = 0
        self._complete = False
        self._broken = False
        self._news = asyncio.Event()

    # The server's end

    async def piece(self) -> bytes:
        while not self._inbox:
            self._arrived.clear()
            await self._arrived.wait()
        piece = self._inbox[0]
        if piece is None:
            raise ClientHangupError("the client hung up before the end of its request")
        if piece:
            self._inbox.popleft()
        return piece

    def discard_body(self) -> None:
        self._inbox.clear()

    async def gone(self) -> None:
        await self.vanished.wait()

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        self.start(status, headers)
        self.send(body)
        self.end()

    def start(self, status: int, headers: Headers) -> None:
        self.status = status
        self.answer_headers = {name.decode(): value.decode() for name, value in headers}
        self._news.set()

    def send(self, data: Buffer) -> None:
        self._sent += len(data)
        if not self.gone_away:
            self._pieces.append(bytes(data))
            self._news.set()

    def end(self) -> None:
        self._complete = True
        self._news.set()

    @property
    def delivered(self) -> int:
        return self._delivered

    async def unread(self, at_most: int) -> None:
        """Wait until the client has taken everything, unless at most `at_most` bytes are unread."""
        if self._sent - self._delivered <= at_most:
            return
        await asyncio.sleep(chance().random() ** 3 * 0.05)
        self._delivered = self._sent

    def close(self) -> None:
        self._broken = not self._complete
        self._news.set()

    # The client's end

    @property
    def gone_away(self) -> bool:
        return self.vanished.is_set()

    def upload(self, data: bytes, *, last: bool) -> None:
        """Send a piece of the request body."""
        if self.gone_away or self._sent_all:
            return
        if data:
            self._inbox.append(data)
        if last:
            self._sent_all = True
            self._inbox.append(b"")
        self._arrived.set()

    async def upload_all(self, body: bytes) -> None:
        """Send a body in pieces, with pauses. The last piece may carry the end marker."""
        random, at = chance(), 0
        while at < len(body):
            if random.random() < 0.5:
                await asyncio.sleep(random.random() ** 3 * 0.1)
            size = random.randint(1, len(body) - at) if random.random() < 0.4 else len(body) - at
            at += size
            self.upload(body[at - size : at], last=at == len(body) and random.random() < 0.5)
        self.upload(b"", last=True)

    def vanish(self) -> None:
        """Hang up. The server notices when it next looks."""
        if self.gone_away:
            return
        self.vanished.set()
        self._news.set()
        if not self._sent_all:
            self._inbox.append(None)
            self._arrived.set()

    async def head(self) -> int:
        """Wait for status and headers. Return the status."""
        while not self.status:
            await self._wait()
        return self.status

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the answer body as it arrives. Raises LostAnswerError if it is cut off."""
        while True:
            while self._pieces:
                yield self._pieces.popleft()
            if self._complete:
                return
            await self._wait()

    async def answer(self) -> Answer:
        """Return the complete answer. Raises LostAnswerError if there is none."""
        parts: Sequence[bytes] = [piece async for piece in self.pieces()]
        return Answer(self.status, self.answer_headers, b"".join(parts))

    async def _wait(self) -> None:
        if self._broken or self.gone_away:
            raise LostAnswerError
        self._news.clear()
        await self._news.wait()
