"""HTTP requests to other servers, with one library and one set of rules.

Requests go exactly to their URL, regardless of redirects and proxy variables. Responses are not
decompressed, so a small one never becomes large. Uses httpx's transports without its client, which
logs whole URLs (upstream defect 16), some of which contain secrets.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpcore
import httpx

#: Bytes per read.
_READ_BYTES = 1 << 20
#: httpx's defaults: connections per transport, and seconds that one may be idle.
_CONNECTIONS_MAX, _IDLE_SECONDS = 100, 5.0
#: For servers without TLS. Trusts no certificates.
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def build_request(
    method: str,
    origin: httpx.URL,
    target: str,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    timeout: float,
    **extensions: Any,
) -> httpx.Request:
    """Return a request to a server for `target`, the exact path and query.

    `timeout`: seconds to connect, and between two pieces of the response.
    """
    return httpx.Request(
        method,
        origin,
        headers={"accept-encoding": "identity", **headers},
        content=body or None,
        extensions={
            "target": target.encode("ascii"),
            "timeout": httpx.Timeout(timeout).as_dict(),
            **extensions,
        },
    )


class _LargeReads(httpcore.NetworkStream):
    """A connection with large reads, because each read costs 100 us of Python.

    The library reads 64 KiB. TLS reads return at most 16 KiB, so `start_tls` returns a plain stream.
    """

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max(max_bytes, _READ_BYTES), timeout)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, timeout)

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        return self._stream.start_tls(ssl_context, server_hostname, timeout)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _LargeReadBackend(httpcore.SyncBackend):
    def connect_tcp(self, *where: Any, **options: Any) -> httpcore.NetworkStream:
        return _LargeReads(super().connect_tcp(*where, **options))


class _Transport(httpx.HTTPTransport):
    def __init__(self, tls: ssl.SSLContext) -> None:
        super().__init__(verify=tls, trust_env=False)
        # httpx has no option for the backend of its pool.
        self._pool = httpcore.ConnectionPool(
            ssl_context=tls,
            max_connections=_CONNECTIONS_MAX,
            keepalive_expiry=_IDLE_SECONDS,
            network_backend=_LargeReadBackend(),
        )


def open_transport(origin: httpx.URL, tls: ssl.SSLContext | None = None) -> httpx.HTTPTransport:
    """Return a transport that reuses connections to a server."""
    if tls is None:
        tls = ssl.create_default_context() if origin.scheme == "https" else _NO_TLS
    return _Transport(tls)


class AsyncHttp:
    """Sends requests from any event loop, each over its own connection."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls

    @asynccontextmanager
    async def send(self, request: httpx.Request) -> AsyncIterator[httpx.Response]:
        """Yield the response before its body is read. Raises httpx.TransportError."""
        if self._tls is None and request.url.scheme == "https":
            # In a thread, because loading the authorities would block the event loop.
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        request.headers["connection"] = "close"
        tls = self._tls or _NO_TLS
        async with httpx.AsyncHTTPTransport(verify=tls, trust_env=False) as transport:
            response = await transport.handle_async_request(request)
            try:
                yield response
            finally:
                await response.aclose()


def cause_of(error: BaseException) -> BaseException:
    """Return the OSError that caused an httpx error, or the error itself."""
    cause, link = error, error.__cause__ or error.__context__
    while link is not None:
        cause = link if isinstance(link, OSError) else cause
        link = link.__cause__ or link.__context__
    return cause
