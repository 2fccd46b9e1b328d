"""Finds out whether the servers that an operator has configured are active or standing by."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import httpx

from streamfold.http_client import AsyncHttp
from streamfold.server.console.remote import NoAnswerError, fetch, url_below

#: The start of a standby server's response to /ready.
_STANDBY: Final = "standby: "
#: Maximum characters shown of a reason.
_REASON_MAX: Final = 500


class OtherServers:
    """Asks each server for its state."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._urls = {
            address: url_below(address, "ready", "server", "http://standby:8080")
            for address in addresses
        }
        self._http = AsyncHttp()

    async def states(self) -> list[dict[str, Any]]:
        """Return the states of the servers, in their configured order."""
        return await asyncio.gather(*(self._ask(*one) for one in self._urls.items()))

    async def _ask(self, address: str, ready: httpx.URL) -> dict[str, Any]:
        shown = {"url": address}
        try:
            status, body = await fetch(self._http, ready)
        except NoAnswerError as error:
            return shown | {"state": "away", "reason": error.message}
        if status == 200:
            return shown | {"state": "active"}
        reason = body.decode(errors="replace").strip()[:_REASON_MAX]
        if status == 503 and reason.startswith(_STANDBY):
            return shown | {"state": "standby", "reason": reason.removeprefix(_STANDBY)}
        return shown | {
            "state": "not ready", "reason": reason or f"it answered with status {status}",
        }  # fmt: skip
