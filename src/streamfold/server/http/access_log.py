"""One JSON line per request, without anything that must stay secret.

Only what `_line` lists is ever written: of headers, only the basin; of a query, only parameters that
the server knows, because clients that cannot set headers put tokens there. Lines are gathered and
written by a thread a few times a second, since a log call per request costs as much as the request.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import time
from typing import BinaryIO, Final

import msgspec

from streamfold.model.access_tokens import SECRET_PREFIX
from streamfold.server.http.request import Request
from streamfold.server.http.router import memoize_short
from streamfold.wire.s2.headers import BASIN
from streamfold.wording import reason_of

logger = logging.getLogger(__name__)

#: Seconds between writes.
FLUSH_INTERVAL: Final = 0.25
#: Bytes that may wait for a stuck output; further lines are dropped and counted.
BYTES_MAX: Final = 16 << 20

#: Characters of a path or a query that are written: enough for every valid one.
_TEXT_MAX: Final = 2048
#: The same of a method or a basin.
_FIELD_MAX: Final = 64
#: Query parameters whose values are written if they have the expected form.
_PARAMETERS: Final = frozenset(
    (
        *("seq_num", "timestamp", "tail_offset", "clamp", "count", "bytes", "until", "wait"),
        *("prefix", "start_after", "limit", "set", "start", "end", "interval"),
        *("offset", "live", "cursor", "after"),
    )
)
_VALUE: Final = re.compile(r"[\w.%~/+-]{0,128}", re.ASCII)
#: A token in a path, put there by mistake.
_SECRET: Final = re.compile(re.escape(SECRET_PREFIX) + r"[\w-]*", re.ASCII)
#: Replaces a parameter, or a part of a path, that is not written.
_HIDDEN: Final = "***"

_BASIN: Final = BASIN.encode()
_encode: Final = msgspec.json.Encoder().encode


class AccessLog:
    """Gathers lines, and writes them while `running`."""

    def __init__(self, output: BinaryIO) -> None:
        self._output = output
        self._lines: list[bytes] = []
        self._size = 0
        self._dropped = 0
        #: Whether the last write failed.
        self._failing = False

    def record(self, request: Request, seconds: float) -> None:
        """Record a finished request."""
        if self._size >= BYTES_MAX:
            self._dropped += 1
            return
        line = _line(request, seconds)
        self._lines.append(line)
        self._size += len(line)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write what is gathered until the context is left, and the rest then."""
        writer = asyncio.create_task(self._write_regularly())
        try:
            yield
        finally:
            writer.cancel()
            await self._write_lines()

    async def _write_regularly(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_INTERVAL)
            if self._lines:
                await self._write_lines()

    async def _write_lines(self) -> None:
        """Write the lines so far; count them as dropped if the output refuses them: a full disk."""
        # In the event loop, as `record`, so that no line is lost.
        lines, self._lines, self._size = self._lines, [], 0
        dropped, self._dropped = self._dropped, 0
        note = [b'{"dropped":%d}\n' % dropped] if dropped else []
        try:
            await asyncio.to_thread(self._write, [*lines, *note])
        except OSError as error:
            self._dropped += dropped + len(lines)
            if not self._failing:
                logger.warning("cannot write the access log, trying on: %s", reason_of(error))
            self._failing = True
        else:
            self._failing = False

    def _write(self, lines: list[bytes]) -> None:
        self._output.write(b"".join(lines))
        self._output.flush()


def _line(request: Request, seconds: float) -> bytes:
    """Unix seconds at the end of the request, client, request, and the milliseconds it took."""
    path = shown_path(request)
    caller, basin = _describe(
        (
            request.method[:_FIELD_MAX],
            request.client,
            request.http_version,
            request.headers.get(_BASIN, b"")[:_FIELD_MAX],
        )
    )
    asked = b""
    if request.raw_query:
        asked = b',"query":' + _encode(_shown(request.query[:_TEXT_MAX]))
    return b'{"time":%.3f%b%b%b,"status":%d,"took":%.3f,"received":%d,"sent":%d%b}\n' % (
        time(),
        caller,
        _encode(path),
        basin,
        request.status,
        seconds * 1000,
        request.received,
        request.sent,
        asked,
    )


def shown_path(request: Request) -> str:
    """The path without what may be secret, and no longer than a valid one."""
    path = request.raw_path[:_TEXT_MAX]
    return _SECRET.sub(_HIDDEN, path) if SECRET_PREFIX in path else path


def _shown(query: str) -> str:
    """The query without parameters that may be secret."""
    return "&".join(map(_shown_parameter, query.split("&")))


def _shown_parameter(text: str) -> str:
    name, _, value = text.partition("=")
    is_public = name in _PARAMETERS and _VALUE.fullmatch(value) and SECRET_PREFIX not in value
    return text if is_public else _HIDDEN


@memoize_short
def _describe(request: tuple[str, str, str, bytes]) -> tuple[bytes, bytes]:
    """What is before the path in a line, and right after it: the same for many requests."""
    method, client, http, basin = request
    caller = _encode({"client": client, "http": http, "method": method})
    named = b',"basin":' + _encode(basin.decode(errors="replace")) if basin else b""
    return b',%b,"path":' % caller[1:-1], named
