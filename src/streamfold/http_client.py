"""HTTP requests to other servers, by one library and one set of rules.

A request goes where its URL says: neither redirects nor proxies of the environment change that. Answers
are not decompressed, so a small one never becomes large. httpx's transports are used without its
client, which logs whole URLs (upstream defect 16): some hold secrets.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

#: For servers without TLS; it trusts no certificate.
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
    """Return a request for `target`, path and query exactly as given, to a server.

    `timeout`: seconds for the connection, and between any two pieces of the answer.
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


def open_transport(origin: httpx.URL, tls: ssl.SSLContext | None = None) -> httpx.HTTPTransport:
    """Return a transport that keeps connections to a server alive."""
    if tls is None:
        tls = ssl.create_default_context() if origin.scheme == "https" else _NO_TLS
    return httpx.HTTPTransport(verify=tls, trust_env=False)


class AsyncHttp:
    """Sends requests from any event loop, each over a connection of its own."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls

    @asynccontextmanager
    async def send(self, request: httpx.Request) -> AsyncIterator[httpx.Response]:
        """The answer before its body is read; raises httpx.TransportError without one."""
        if self._tls is None and request.url.scheme == "https":
            # In a thread: loading the authorities would hold the event loop for long.
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
    """Return the first OSError that led to an error of httpx; the error itself if none did."""
    found, link = error, error.__cause__ or error.__context__
    while link is not None:
        found = link if isinstance(link, OSError) else found
        link = link.__cause__ or link.__context__
    return found
