"""A small HTTP/1.1 client that tells whether an unanswered request may have arrived."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from streamfold.testing.adversary.ledger import Breach, BrokenPromiseError

#: Seconds after which a request without an answer counts as lost.
ANSWER_TIMEOUT = 20.0
#: Bytes of an answer read at once.
_PIECE = 1 << 16


class LostError(Exception):
    """Raised without a complete answer. `sent`: whether the server may have acted on the request."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The stable code of a problem, or empty."""
        if not self.body.startswith(b"{"):
            return ""
        return str(self.json().get("code", ""))

    def __str__(self) -> str:
        text = self.body[:120].decode(errors="replace")
        return f"{self.status} {text}".rstrip()


@dataclass
class CurrentServer:
    """The server for new requests, which changes with every restart."""

    port: int = 0
    #: Number of servers so far. Requests to earlier servers are over.
    generation: int = 0


@dataclass
class Client:
    """Reusable connections to the current server, each with one request at a time."""

    target: CurrentServer
    _idle: list[tuple[int, asyncio.StreamReader, asyncio.StreamWriter]] = field(
        default_factory=list
    )

    async def exchange(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        generation: int | None = None,
    ) -> Answer:
        """Send one request and return its answer. Raises LostError without one.

        With `generation`, the request goes to that server or fails.
        """
        if generation not in (None, self.target.generation):
            raise LostError("that server has been replaced", sent=False)
        generation, reader, writer = await self._connect()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                writer.write(request_head(method, path, headers or {}, len(body)) + body)
                answer = await read_answer(reader, method)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            writer.transport.abort()
            raise LostError(f"{type(error).__name__} {error}", sent=True) from None
        except BaseException:
            writer.transport.abort()
            raise
        if answer.status == 500 and answer.code == "other":
            text = f"{method} {path} is answered with {answer}"
            raise BrokenPromiseError(None, text, Breach.UNEXPLAINED)
        if answer.headers.get("connection") == "close":
            writer.transport.abort()
        else:
            self._idle.append((generation, reader, writer))
        return answer

    async def _connect(self) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            generation, reader, writer = self._idle.pop()
            if generation == self.target.generation and not reader.at_eof():
                return generation, reader, writer
            writer.transport.abort()
        generation = self.target.generation
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.target.port)
        except (OSError, TimeoutError) as error:
            raise LostError(str(error), sent=False) from None
        return generation, reader, writer

    @asynccontextmanager
    async def streaming(
        self, method: str, path: str, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a request with streaming body and answer. The caller reads the answer's head."""
        _, reader, writer = await self._connect()
        try:
            length = None if method == "POST" else 0
            writer.write(request_head(method, path, headers, length))
            yield reader, writer
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            raise LostError(f"{type(error).__name__} {error}", sent=True) from None
        finally:
            writer.transport.abort()

    def close(self) -> None:
        for _, _, writer in self._idle:
            writer.transport.abort()
        self._idle.clear()


def request_head(method: str, path: str, headers: Mapping[str, str], length: int | None) -> bytes:
    """Return the head of a request. Without a length, its body is chunked."""
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines.append("transfer-encoding: chunked" if length is None else f"content-length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body. An empty chunk ends it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Read the status and headers of the next answer."""
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *lines = raw.decode("latin-1").rstrip().split("\r\n")
    pairs = (line.split(":", 1) for line in lines)
    return int(first.split()[1]), {name.lower(): value.strip() for name, value in pairs}


async def read_answer(reader: asyncio.StreamReader, method: str) -> Answer:
    """Read the next answer completely."""
    status, headers = await read_head(reader)
    if method == "HEAD" or status in (204, 304):
        return Answer(status, headers, b"")
    if headers.get("transfer-encoding") == "chunked":
        return Answer(status, headers, b"".join([piece async for piece in read_chunks(reader)]))
    return Answer(status, headers, await reader.readexactly(int(headers["content-length"])))


async def read_chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield a body's chunks. Raises IncompleteReadError if it breaks off."""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line, 16)
        data = await reader.readexactly(size + 2)
        if not size:
            return
        yield data[:-2]
