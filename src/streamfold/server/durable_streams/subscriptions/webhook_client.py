"""One POST to a webhook: to a checked address, within a deadline, with a bounded answer.

It is written on asyncio's streams, not on `http.client` in threads: so one deadline holds for all of
it, however slowly a receiver answers, and a stop of the server ends it at once.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamfold.server.durable_streams.subscriptions.webhook_addresses import WebhookAddress

#: Bytes of an answer's body that are read, and of its head.
BODY_MAX: Final = 64 << 10
HEAD_MAX: Final = 64 << 10
#: Seconds for everything, from the first packet to the last.
TIMEOUT: Final = 10.0
#: Interim answers before the final one.
_INTERIM_MAX: Final = 8

_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([1-9][0-9]{2})(?: |\r|\n)")
_SIZE: Final = re.compile(rb"[ \t]*([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?\r?\n")


class WebhookError(Exception):
    """The answer is not valid HTTP; the receiver may still have got the request."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    #: At most BODY_MAX bytes of it; empty if there was more.
    body: bytes


class WebhookClient:
    """Sends requests; redirects are answers like others, and are not followed."""

    def __init__(self, timeout: float = TIMEOUT, tls: ssl.SSLContext | None = None) -> None:
        self._timeout = timeout
        self._tls = tls

    async def post(
        self,
        target: WebhookAddress,
        addresses: Sequence[str],
        headers: Mapping[str, str],
        body: bytes,
    ) -> Reply:
        """The answer; OSError (TimeoutError among them) or WebhookError without one."""
        async with asyncio.timeout(self._timeout):
            reader, writer = await self._connect(target, addresses)
            try:
                writer.write(_request(target, headers, body))
                await writer.drain()
                return await _read_reply(reader)
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
                raise WebhookError(f"the answer cannot be read: {error}") from error
            finally:
                # The answer is complete or unused: no TLS shutdown is needed.
                writer.transport.abort()

    async def _connect(
        self, target: WebhookAddress, addresses: Sequence[str]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        tls = await self._context() if target.secure else None
        name = target.host if target.secure else None
        failure: OSError = OSError(f"{target.host} has no address")
        for address in addresses:
            try:
                return await asyncio.open_connection(
                    address, target.port, ssl=tls, server_hostname=name, limit=HEAD_MAX
                )
            except OSError as error:
                failure = error
        raise failure

    async def _context(self) -> ssl.SSLContext:
        if self._tls is None:  # loading the authorities takes long enough to be felt
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        return self._tls


def _request(target: WebhookAddress, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = [
        f"POST {target.path} HTTP/1.1",
        f"host: {target.authority}",
        f"content-length: {len(body)}",
        "connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join((*lines, "", "")).encode() + body


async def _read_reply(reader: asyncio.StreamReader) -> Reply:
    for _ in range(_INTERIM_MAX):
        head = await reader.readuntil(b"\r\n\r\n")
        match = _STATUS.match(head)
        if match is None:
            raise WebhookError("the answer does not begin as HTTP/1.1 does")
        status = int(match[1])
        if status >= 200:
            return Reply(status, await _read_body(reader, status, _parse_headers(head)))
    raise WebhookError("the final answer does not come")


def _parse_headers(head: bytes) -> http.client.HTTPMessage:
    try:
        return http.client.parse_headers(io.BytesIO(head.partition(b"\n")[2]))
    except http.client.HTTPException as error:
        raise WebhookError(f"the answer has headers that cannot be read: {error!r}") from error


async def _read_body(
    reader: asyncio.StreamReader, status: int, headers: http.client.HTTPMessage
) -> bytes:
    """The body; empty if it is longer than is read."""
    if status in (204, 304):
        return b""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return await _read_chunks(reader)
    declared = headers.get("content-length")
    if declared is None:
        body = await _read_to_end(reader)
        return body if len(body) <= BODY_MAX else b""
    size = int(declared)
    return await reader.readexactly(size) if 0 <= size <= BODY_MAX else b""


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while True:
        match = _SIZE.fullmatch(await reader.readuntil(b"\n"))
        if match is None:
            raise WebhookError("the answer has a chunk without a size")
        size = int(match[1], 16)
        if not size:
            return bytes(body)
        if len(body) + size > BODY_MAX:
            return b""
        body += await reader.readexactly(size)
        await reader.readexactly(2)


async def _read_to_end(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while len(body) <= BODY_MAX and (piece := await reader.read(BODY_MAX)):
        body += piece
    return bytes(body)
