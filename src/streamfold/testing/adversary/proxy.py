"""A TCP proxy in front of an S3 server that fails as networks and storage do."""

from __future__ import annotations

import asyncio
import enum
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

_PIECE = 1 << 16
_LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)
#: Seconds by which an answer is delayed.
_DELAY = 0.3


def _problem(status: bytes, code: bytes) -> bytes:
    body = b"<Error><Code>%b</Code><Message>as planned</Message></Error>" % code
    head = b"HTTP/1.1 %b\r\ncontent-type: application/xml\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


_FAILURE = _problem(b"500 Internal Server Error", b"InternalError")
_DENIAL = _problem(b"403 Forbidden", b"AccessDenied")


class StorageWeather(enum.StrEnum):
    """The effect on requests to storage."""

    CLEAR = "works"
    REFUSED = "refuses connections"
    FAILING = "answers 500, and does nothing"
    READ_ONLY = "denies writes"
    SILENT = "hangs: nothing gets through"
    LATE = "answers late"
    ANSWERS_LOST = "acts on requests, and its answers are lost"


@dataclass(slots=True)
class _Request:
    """The first line of the latest request on a connection."""

    line: bytes = b""

    def note(self, piece: bytes) -> None:
        line = piece.partition(b"\r\n")[0]
        if line.endswith(b" HTTP/1.1"):
            self.line = line


class StorageProxy:
    """Proxies one S3 server. The weather may change at any time, also for open connections."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._upstream = parts.hostname, parts.port
        self._weather = StorageWeather.CLEAR
        self._changed = asyncio.Condition()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.endpoint = ""
        #: First lines of the requests whose answers were lost.
        self.answers_lost: list[bytes] = []

    async def turn(self, weather: StorageWeather) -> None:
        async with self._changed:
            self._weather = weather
            self._changed.notify_all()
        if weather is StorageWeather.REFUSED:
            for writer in tuple(self._open):
                writer.transport.abort()

    async def lost_answer(self, method: bytes, path: bytes) -> None:
        """Wait until the answer to another such request is lost."""
        before = len(self.answers_lost)

        def lost() -> bool:
            return any(
                line.startswith(method) and path in line for line in self.answers_lost[before:]
            )

        async with self._changed:
            await self._changed.wait_for(lost)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StorageProxy]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.endpoint = f"http://{host}:{port}"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            # A task cancelled before its first step has not closed its connection.
            for writer in tuple(self._open):
                writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._pass()
            up_reader, up_writer = await asyncio.open_connection(*self._upstream)
            self._open.add(up_writer)
            try:
                request = _Request()
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._requests(reader, writer, up_writer, request))
                    group.create_task(self._answers(up_reader, writer, request))
            finally:
                self._open.discard(up_writer)
                up_writer.transport.abort()
        except* (OSError, EOFError):
            pass  # one end is gone, so the other is closed too
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _pass(self) -> None:
        """Wait until data may pass. Raises ConnectionResetError if the connection must end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._weather is not StorageWeather.SILENT)
        if self._weather is StorageWeather.REFUSED:
            raise ConnectionResetError

    async def _requests(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_writer: asyncio.StreamWriter,
        request: _Request,
    ) -> None:
        while piece := await reader.read(_PIECE):
            await self._pass()
            begins = piece.partition(b"\r\n")[0].endswith(b" HTTP/1.1")
            denied = self._weather is StorageWeather.READ_ONLY and piece.startswith(b"PUT ")
            if denied or (begins and self._weather is StorageWeather.FAILING):
                await self._answer(_DENIAL if denied else _FAILURE, piece, reader, writer)
                continue
            request.note(piece)
            up_writer.write(piece)
            await up_writer.drain()
        raise EOFError

    async def _answer(
        self,
        answer: bytes,
        piece: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Read the rest of a request, and answer it instead of storage."""
        while b"\r\n\r\n" not in piece:
            piece += await reader.read(_PIECE)
        head, _, body = piece.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        await reader.readexactly((int(length[1]) if length else 0) - len(body))
        writer.write(answer)
        await writer.drain()

    async def _answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: _Request
    ) -> None:
        while piece := await reader.read(_PIECE):
            await self._pass()
            if self._weather is StorageWeather.ANSWERS_LOST:
                async with self._changed:
                    self.answers_lost.append(request.line)
                    self._changed.notify_all()
                raise EOFError
            if self._weather is StorageWeather.LATE:
                await asyncio.sleep(_DELAY)
            writer.write(piece)
            with suppress(ConnectionResetError):
                await writer.drain()
        raise EOFError
