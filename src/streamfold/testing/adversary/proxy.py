"""A TCP proxy before an S3 server that fails as networks and storage do."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_PIECE = 1 << 16


def _problem(status: bytes, code: bytes) -> bytes:
    body = b"<Error><Code>%b</Code><Message>as planned</Message></Error>" % code
    head = b"HTTP/1.1 %b\r\ncontent-type: application/xml\r\ncontent-length: %d\r\n"
    return head % (status, len(body)) + b"connection: close\r\n\r\n" + body


_FAILURE = _problem(b"500 Internal Server Error", b"InternalError")
_DENIAL = _problem(b"403 Forbidden", b"AccessDenied")


class StorageWeather(enum.StrEnum):
    """What becomes of requests to storage."""

    CLEAR = "works"
    REFUSED = "refuses connections"
    FAILING = "answers 500, and does nothing"
    READ_ONLY = "denies writes"
    SILENT = "hangs: nothing gets through"
    LATE = "answers late"
    ANSWERS_LOST = "acts on requests, and its answers are lost"


class StorageProxy:
    """Stands before one S3 server; `weather` may change at any time, for open connections too."""

    def __init__(self, host: str, port: int) -> None:
        self._upstream = host, port
        self._weather = StorageWeather.CLEAR
        self._changed = asyncio.Condition()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.endpoint = ""

    async def turn(self, weather: StorageWeather) -> None:
        async with self._changed:
            self._weather = weather
            self._changed.notify_all()
        if weather is StorageWeather.REFUSED:
            for writer in tuple(self._open):
                writer.transport.abort()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.endpoint = f"http://{host}:{port}"
        try:
            yield
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            await self._pass()
            up_reader, up_writer = await asyncio.open_connection(*self._upstream)
            self._open.add(up_writer)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._requests(reader, writer, up_writer))
                    group.create_task(self._answers(up_reader, writer))
            finally:
                self._open.discard(up_writer)
                up_writer.transport.abort()
        except* (OSError, EOFError):
            pass  # one end is gone, so is the other
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _pass(self) -> None:
        """Return when something may pass; raise when the connection has to end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._weather is not StorageWeather.SILENT)
        if self._weather is StorageWeather.REFUSED:
            raise ConnectionResetError

    async def _requests(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_writer: asyncio.StreamWriter,
    ) -> None:
        while piece := await reader.read(_PIECE):
            await self._pass()
            denied = self._weather is StorageWeather.READ_ONLY and piece.startswith(b"PUT ")
            if denied or self._weather is StorageWeather.FAILING:
                writer.write(_DENIAL if denied else _FAILURE)
                with suppress(OSError):
                    await writer.drain()
                raise EOFError
            up_writer.write(piece)
            await up_writer.drain()
        raise EOFError

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(_PIECE):
            await self._pass()
            if self._weather is StorageWeather.ANSWERS_LOST:
                raise EOFError
            if self._weather is StorageWeather.LATE:
                await asyncio.sleep(0.3)
            writer.write(piece)
            with suppress(ConnectionResetError):
                await writer.drain()
        raise EOFError
