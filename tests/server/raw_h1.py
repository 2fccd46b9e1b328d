"""A minimal HTTP/1.1 client that sends exactly the bytes of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass


@dataclass
class H1Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send_chunk(self, data: bytes) -> None:
        """One chunk of a chunked body; an empty one ends it."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next response."""
        async with asyncio.timeout(60):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode().strip().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines)
        return int(first.split()[1]), {name.lower(): value for name, value in pairs}

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        async with asyncio.timeout(60):
            size = int(await self.reader.readline(), 16)
            data = await self.reader.readexactly(size + 2)
        return data[:-2]

    async def body(self, size: int) -> bytes:
        async with asyncio.timeout(60):
            return await self.reader.readexactly(size)

    async def rest(self) -> bytes:
        """Everything until the server closes the connection.

        That is a reset if some of what was sent has not been read by then.
        """
        received = b""
        async with asyncio.timeout(60):
            with suppress(ConnectionError):
                while data := await self.reader.read(1 << 16):
                    received += data
        return received


@asynccontextmanager
async def h1_client(port: int) -> AsyncIterator[H1Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield H1Client(reader, writer)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
