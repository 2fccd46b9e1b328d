"""A line to a server that breaks at the worst moment: after the request, before the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class CutLine:
    """Forwards bytes both ways until a marker has gone to the server, and then answers nothing.

    The server does not notice: its end of the line stays open until `released`.
    """

    def __init__(self, host: str, port: int, marker: bytes) -> None:
        self._server = host, port
        self._marker = marker
        self.released = asyncio.Event()
        #: How often the marker was sent.
        self.cuts = 0
        self._connections: set[asyncio.Task[None]] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._forward_both_ways(reader, writer))
        self._connections.add(connection)
        await connection

    async def close(self) -> None:
        """Let the server notice, and return when all connections are closed."""
        self.released.set()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _forward_both_ways(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        there_reader, there_writer = await asyncio.open_connection(*self._server)
        answers = asyncio.create_task(_forward(there_reader, writer))
        try:
            while data := await reader.read(1 << 16):
                cut = self._marker in data
                if cut:
                    answers.cancel()
                there_writer.write(data)
                await there_writer.drain()
                if cut:
                    self.cuts += 1
                    writer.close()
                    await self.released.wait()
                    return
        finally:
            answers.cancel()
            for end in (writer, there_writer):
                end.close()
            await asyncio.gather(
                answers, writer.wait_closed(), there_writer.wait_closed(), return_exceptions=True
            )


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


@asynccontextmanager
async def cut_line(url: str, marker: bytes) -> AsyncIterator[tuple[str, CutLine]]:
    """A line to the server at `url`; yields where it begins."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    line = CutLine(parts.hostname, parts.port, marker)
    server = await asyncio.start_server(line, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        try:
            yield f"http://{host}:{port}", line
        finally:
            await line.close()
