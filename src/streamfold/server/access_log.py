"""One JSON line per request, without anything that must stay secret.

Only what is listed in `_Line` is ever written: of headers, only the basin. Lines are gathered and
written by a thread a few times a second, since a log call per request costs as much as the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import time
from typing import BinaryIO, Final

import msgspec

from streamfold.server.http import Request
from streamfold.wire.s2.headers import BASIN

#: Seconds between writes.
FLUSH_INTERVAL: Final = 0.25
#: Lines that wait to be written; more are dropped and counted, should the output be stuck.
LINES_MAX: Final = 100_000


class _Line(msgspec.Struct, omit_defaults=True):
    #: Unix seconds at the end of the request.
    time: float
    client: str
    http: str
    method: str
    path: str
    status: int
    #: Milliseconds.
    took: float
    received: int
    sent: int
    query: str = ""
    basin: str | None = None


class AccessLog:
    """Gathers lines, and writes them while `running`."""

    def __init__(self, output: BinaryIO) -> None:
        self._output = output
        self._encoder = msgspec.json.Encoder()
        self._lines: list[_Line] = []
        self._dropped = 0

    def record(self, request: Request, seconds: float) -> None:
        """Note a request that is over."""
        if len(self._lines) >= LINES_MAX:
            self._dropped += 1
            return
        self._lines.append(
            _Line(
                round(time(), 3),
                request.client,
                request.http_version,
                request.method,
                request.raw_path,
                request.status,
                round(seconds * 1000, 3),
                request.received,
                request.sent,
                request.query,
                request.header(BASIN),
            )
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write what is gathered until the context is left, and the rest then."""
        writer = asyncio.create_task(self._write_regularly())
        try:
            yield
        finally:
            writer.cancel()
            await asyncio.to_thread(self._write)

    async def _write_regularly(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_INTERVAL)
            if self._lines:
                await asyncio.to_thread(self._write)

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        dropped, self._dropped = self._dropped, 0
        text = self._encoder.encode_lines(lines)
        if dropped:
            text += self._encoder.encode({"dropped": dropped}) + b"\n"
        self._output.write(text)
        self._output.flush()
