"""Shows the status of configured snapshotters, table by table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from streamfold.errors import InvalidError
from streamfold.http_client import AsyncHttp
from streamfold.model.access_tokens import Right
from streamfold.server.auth import Access
from streamfold.server.console.remote import NoAnswerError, fetch, url_below
from streamfold.server.http.bodies import answer_json
from streamfold.server.http.request import LIST_ROOM, Request
from streamfold.server.http.router import Router

#: Seconds for which all callers share a response.
_SHARED_FOR: Final = 2.0


class Snapshotters:
    """Handles /console/snapshotters."""

    def __init__(self, addresses: Sequence[str], access: Access) -> None:
        """Prepare requests to `addresses`: each is an address, or @ and a file that contains one.

        A file is for a snapshotter that chooses its port.
        """
        self._addresses = [
            Path(address[1:]) if address.startswith("@") else _status_url(address)
            for address in addresses
        ]
        self._access = access
        self._http = AsyncHttp()
        self._asking = asyncio.Lock()
        self._asked_at = -_SHARED_FOR
        self._answers: list[dict[str, Any]] = []

    def add_to(self, router: Router, path: str) -> None:
        router.add("GET", path, Right.READ, self.show)

    async def show(self, request: Request) -> None:
        """Respond with the status of each snapshotter, or why it is unavailable."""
        # Positions and errors may reveal the content of any stream.
        (await self._access.grant(request)).require(Right.READ, "", "")
        await request.reserve_answer(LIST_ROOM)
        async with self._asking:
            if time.monotonic() - self._asked_at >= _SHARED_FOR:
                self._answers = await asyncio.gather(*map(self._ask, self._addresses))
                self._asked_at = time.monotonic()
        await answer_json(request, {"snapshotters": self._answers})

    async def _ask(self, address: httpx.URL | Path) -> dict[str, Any]:
        shown = {"url": str(address)}
        try:
            if isinstance(address, Path):
                address = await asyncio.to_thread(_url_in, address)
                shown = {"url": str(address)}
            status, body = await fetch(self._http, address)
        except FileNotFoundError:
            return shown | {"error": "it has not started yet"}
        except InvalidError as error:
            return shown | {"error": error.message}
        except NoAnswerError as error:
            return shown | {"error": error.message}
        if status != 200:
            return shown | {"error": f"it answered with status {status}"}
        try:
            return shown | {"status": msgspec.json.decode(body)}
        except msgspec.DecodeError:
            return shown | {"error": "its answer is not the status of a snapshotter"}


def _url_in(file: Path) -> httpx.URL:
    return _status_url(file.read_text().strip())


def _status_url(address: str) -> httpx.URL:
    return url_below(address, "status", "snapshotter", "http://localhost:8081")
