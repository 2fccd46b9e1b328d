"""What configured snapshotters say of their tables; asked by the server, for pages cannot.

A page may only connect to the server that it came from. Which snapshotters are asked is configured, so
no caller chooses where a request goes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

import httpx
import msgspec

from streamfold.errors import InvalidError
from streamfold.http_client import AsyncHttp, build_request, cause_of
from streamfold.model.access_tokens import Operation
from streamfold.server.auth import Access
from streamfold.server.http.bodies import answer_json
from streamfold.server.http.request import LIST_ROOM, Request
from streamfold.server.http.router import Router
from streamfold.wording import reason_of

#: Seconds for which an answer serves all callers, and that a snapshotter has to give one.
_KEPT_FOR: Final = 2.0
_TIMEOUT: Final = 3.0
#: Bytes of a status: about 1 KiB per table.
_STATUS_MAX: Final = 1 << 20


class Snapshotters:
    """The handler of /console/snapshotters."""

    def __init__(self, urls: Sequence[str], access: Access) -> None:
        self._urls = [_checked(url) for url in urls]
        self._access = access
        self._http = AsyncHttp()
        self._asking = asyncio.Lock()
        self._asked_at = -_KEPT_FOR
        self._answers: list[dict[str, Any]] = []

    def add_to(self, router: Router, path: str) -> None:
        router.add("GET", path, Operation.READ, self.show)

    async def show(self, request: Request) -> None:
        """Answer with the status of each snapshotter, or why it has none."""
        # Positions and errors may show what any stream holds.
        (await self._access.grant(request)).require(Operation.READ, "", "")
        await request.reserve_answer(LIST_ROOM)
        async with self._asking:
            if time.monotonic() - self._asked_at >= _KEPT_FOR:
                self._answers = await asyncio.gather(*map(self._ask, self._urls))
                self._asked_at = time.monotonic()
        await answer_json(request, {"snapshotters": self._answers})

    async def _ask(self, url: httpx.URL) -> dict[str, Any]:
        shown = {"url": str(url)}
        status = build_request("GET", url, url.raw_path.decode(), {}, timeout=_TIMEOUT)
        try:
            async with asyncio.timeout(_TIMEOUT), self._http.send(status) as response:
                if response.status_code != 200:
                    return shown | {"error": f"it answered with status {response.status_code}"}
                return shown | {"status": await _read(response)}
        except TimeoutError:
            return shown | {"error": f"it did not answer within {_TIMEOUT:g} s"}
        except (httpx.TransportError, OSError) as error:
            return shown | {"error": f"it cannot be reached: {reason_of(cause_of(error))}"}
        except (InvalidError, msgspec.DecodeError):
            return shown | {"error": "its answer is not the status of a snapshotter"}


def _checked(text: str) -> httpx.URL:
    """The URL of a snapshotter's status."""
    url = httpx.URL(text)
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query:
        raise InvalidError(
            f"snapshotter {text!r} must be the address of its status, as in http://localhost:8081"
        )
    return url.copy_with(path=f"{url.path.rstrip('/')}/status", fragment=None)


async def _read(response: httpx.Response) -> Any:
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > _STATUS_MAX:
            raise InvalidError(f"a status has at most {_STATUS_MAX} bytes")
    return msgspec.json.decode(bytes(body))
