"""A TCP proxy that fails as networks do."""

from __future__ import annotations

import asyncio
import enum
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

_PIECE = 1 << 16
_DENIAL = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
_LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)


class Weather(enum.Enum):
    """What becomes of a connection."""

    CLEAR = "everything passes"
    REFUSED = "it is closed at once: nothing is asked, nothing answered"
    SILENT = "it stays open, but nothing passes"
    ANSWERS_LOST = "requests get through, then it is closed before the answer comes"
    DENIED = "writes are answered with 403, and go no further"


class FlakyProxy:
    """Stands before `endpoint`; change `weather` at any time, for connections that exist, too."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._upstream = parts.hostname, parts.port
        self._weather = Weather.CLEAR
        self._changed = asyncio.Condition()
        self._open: set[asyncio.StreamWriter] = set()
        self.endpoint = ""
        #: First lines of the requests whose answers did not get through.
        self.answers_lost: list[bytes] = []

    async def turn(self, weather: Weather) -> None:
        async with self._changed:
            self._weather = weather
            self._changed.notify_all()
        if weather is Weather.REFUSED:
            for writer in self._open:
                writer.close()

    async def lost_answer(self, method: bytes, path: bytes) -> None:
        """Return once one more answer was lost to such a request."""
        before = len(self.answers_lost)

        def lost() -> bool:
            return any(
                line.startswith(method) and path in line for line in self.answers_lost[before:]
            )

        async with self._changed:
            await self._changed.wait_for(lost)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FlakyProxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.endpoint = f"http://{host}:{port}"
        try:
            yield self
        finally:
            server.close()
            await self.turn(Weather.REFUSED)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
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
                up_writer.close()
        except* (OSError, EOFError, asyncio.IncompleteReadError):
            pass  # one end is gone, so is the other
        finally:
            self._open.discard(writer)
            writer.close()

    async def _pass(self) -> None:
        """Return when something may pass; raise when the connection has to end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._weather is not Weather.SILENT)
        if self._weather is Weather.REFUSED:
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
            if self._weather is Weather.DENIED and piece.startswith(b"PUT "):
                await _deny(piece, reader, writer)
                continue
            request.note(piece)
            up_writer.write(piece)
            await up_writer.drain()
        raise EOFError

    async def _answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: _Request
    ) -> None:
        while piece := await reader.read(_PIECE):
            await self._pass()
            if self._weather is Weather.ANSWERS_LOST:
                async with self._changed:
                    self.answers_lost.append(request.line)
                    self._changed.notify_all()
                raise EOFError
            writer.write(piece)
            with suppress(ConnectionResetError):
                await writer.drain()
        raise EOFError


async def _deny(piece: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read the rest of a request, and answer that it is not allowed."""
    while b"\r\n\r\n" not in piece:
        piece += await reader.read(_PIECE)
    head, _, body = piece.partition(b"\r\n\r\n")
    length = _LENGTH.search(head)
    await reader.readexactly((int(length[1]) if length else 0) - len(body))
    writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: %d\r\n\r\n" % len(_DENIAL) + _DENIAL)
    await writer.drain()


@dataclass(slots=True)
class _Request:
    """The first line of the latest request on a connection."""

    line: bytes = b""

    def note(self, piece: bytes) -> None:
        line = piece.partition(b"\r\n")[0]
        if line.endswith(b" HTTP/1.1"):
            self.line = line
