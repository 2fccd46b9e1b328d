"""Servers that misbehave on purpose, on real ports: a proxy that loses answers, and one that
answers from a script.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(slots=True)
class LossyProxy:
    """Passes bytes to an S3 server and back, except for the answers that a test makes it lose.

    An answer is lost after the server has given it: the request took effect.
    """

    upstream: str
    endpoint: str = ""
    bytes_in: int = 0
    lost: int = 0
    #: Nothing is read from clients while it is clear.
    open: asyncio.Event = field(default_factory=asyncio.Event)
    _skip: dict[bytes, int] = field(default_factory=dict)
    _lose: dict[bytes, int] = field(default_factory=dict)

    def lose(self, method: str, times: int, *, after: int = 0) -> None:
        """Lose the answers to the next `times` requests of `method`, letting `after` pass first."""
        self._skip[method.encode()] = after
        self._lose[method.encode()] = times

    def _loses(self, method: bytes) -> bool:
        for counts, answer in ((self._skip, False), (self._lose, True)):
            if counts.get(method, 0):
                counts[method] -= 1
                return answer
        return False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = urlsplit(self.upstream).hostname, urlsplit(self.upstream).port
        upstream_reader, upstream_writer = await asyncio.open_connection(host, port)
        method = b""

        async def forward() -> None:
            nonlocal method
            while await self.open.wait() and (data := await reader.read(65536)):
                start = data.split(b" ", 1)[0]
                method = start if start in (b"PUT", b"GET", b"HEAD", b"POST", b"DELETE") else method
                self.bytes_in += len(data)
                upstream_writer.write(data)
                await upstream_writer.drain()

        forwarding = asyncio.ensure_future(forward())
        forwarding.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            while data := await upstream_reader.read(65536):
                if data.startswith(b"HTTP/1.1") and self._loses(method):
                    self.lost += 1
                    break
                writer.write(data)
                await writer.drain()
        finally:
            forwarding.cancel()
            upstream_writer.transport.abort()  # it has answered, or nobody waits for its answer
            writer.close()


@asynccontextmanager
async def run_lossy_proxy(upstream: str) -> AsyncIterator[LossyProxy]:
    proxy = LossyProxy(upstream)
    proxy.open.set()
    async with _listening(proxy.serve) as proxy.endpoint:
        yield proxy


Answer = Callable[[str, dict[str, str]], bytes]


def answer(status: str, body: bytes = b"", *, claimed: int | None = None, etag: str = "x") -> bytes:
    """Return a response; `claimed` is a content length that may be wrong."""
    length = len(body) if claimed is None else claimed
    head = f'HTTP/1.1 {status}\r\nContent-Length: {length}\r\nETag: "{etag}"\r\n'
    head += "Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\nConnection: close\r\n\r\n"
    return head.encode() + body


@asynccontextmanager
async def run_scripted_server(respond: Answer) -> AsyncIterator[str]:
    """Run a server that answers each request with `respond(method, headers)`; yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {
                name.lower(): text.strip()
                for name, _, text in (line.partition(":") for line in lines if line)
            }
            await reader.readexactly(int(headers.get("content-length", 0)))
            writer.write(respond(first.split(" ")[0], headers))
            await writer.drain()
        finally:
            writer.close()

    async with _listening(serve) as endpoint:
        yield endpoint


@asynccontextmanager
async def _listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    connections: set[asyncio.Task[None]] = set()
    writers: set[asyncio.StreamWriter] = set()

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        task = asyncio.ensure_future(guarded(reader, writer))
        connections.add(task)
        task.add_done_callback(connections.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        for writer in writers:  # also those with an answer that nobody has read
            writer.transport.abort()
        await asyncio.sleep(0)  # aborted connections are closed in the next turn
