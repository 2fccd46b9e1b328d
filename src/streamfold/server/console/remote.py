"""Sends requests to configured servers and snapshotters on behalf of a page.

A page may only connect to the server that it came from. The addresses are configured, so callers
cannot choose where a request goes.
"""

from __future__ import annotations

import asyncio
from typing import Final

import httpx

from streamfold.errors import InvalidError, StreamfoldError
from streamfold.http_client import AsyncHttp, build_request, cause_of
from streamfold.wording import reason_of

#: Seconds within which a server must respond.
_TIMEOUT: Final = 3.0
#: Maximum bytes of a response: about 1 KiB per table of a snapshotter.
_BODY_MAX: Final = 1 << 20


class NoAnswerError(StreamfoldError):
    """Raised if a configured server did not respond, or its response is unusable."""

    code = "no_answer"


def url_below(text: str, name: str, what: str, example: str) -> httpx.URL:
    """Return the URL of `name` below a configured address. Raises InvalidError for other addresses."""
    url = httpx.URL(text)
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query:
        raise InvalidError(f"{what} {text!r} must be an address, as in {example}")
    return url.copy_with(path=f"{url.path.rstrip('/')}/{name}", fragment=None)


async def fetch(http: AsyncHttp, url: httpx.URL) -> tuple[int, bytes]:
    """Return the status and body of the response to a GET. Raises NoAnswerError without one."""
    request = build_request("GET", url, url.raw_path.decode(), {}, timeout=_TIMEOUT)
    try:
        async with asyncio.timeout(_TIMEOUT), http.send(request) as response:
            return response.status_code, await _body(response)
    except TimeoutError:
        raise NoAnswerError(f"it did not answer within {_TIMEOUT:g} s") from None
    except (httpx.TransportError, OSError) as error:
        raise NoAnswerError(f"it cannot be reached: {reason_of(cause_of(error))}") from None


async def _body(response: httpx.Response) -> bytes:
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > _BODY_MAX:
            raise NoAnswerError(f"its answer has more than {_BODY_MAX} bytes")
    return bytes(body)
