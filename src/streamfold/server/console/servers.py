"""Shows the servers of a store: this one, which is active, and the others, as configured."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from os import getpid
from typing import Any

from streamfold import __version__
from streamfold.cluster import LeaseKeeper
from streamfold.errors import NotActiveError
from streamfold.model.access_tokens import Right
from streamfold.server.auth import Access
from streamfold.server.http.bodies import answer_json
from streamfold.server.http.request import LIST_ROOM, Request
from streamfold.server.http.router import Router


@dataclass(frozen=True, slots=True)
class ThisServer:
    """How this server describes itself."""

    #: The server's name for others; empty = the machine's name.
    name: str
    location: str
    lease: LeaseKeeper | None

    def as_json(self, started_at: float) -> dict[str, Any]:
        shown = {
            "name": self.name or socket.gethostname(),
            "process": getpid(),
            "version": __version__,
            "location": self.location,
            "active_since": round(started_at * 1000),
            "lease_expiry": None if self.lease is None else self.lease.expiry,
        }
        try:
            if self.lease is not None:
                self.lease.check()
        except NotActiveError as error:
            return shown | {"state": "unsure", "reason": error.message}
        return shown | {"state": "active"}


class Servers:
    """Handles /console/servers."""

    def __init__(self, this: ThisServer, addresses: Sequence[str], access: Access) -> None:
        """Prepare requests to the other servers at `addresses`."""
        self._this = this
        self._started_at = time.time()
        self._others = None
        self._access = access
        if addresses:
            # An HTTP client takes a tenth of a second to import, and a start does not otherwise
            # need one.
            from streamfold.server.console.other_servers import OtherServers

            self._others = OtherServers(addresses)

    def add_to(self, router: Router, path: str) -> None:
        router.add("GET", path, Right.ACCOUNT_METRICS, self.show)

    async def show(self, request: Request) -> None:
        """Respond with this server's state, and whether each other server is active or standing by."""
        await self._access.allow(request, Right.ACCOUNT_METRICS)
        await request.reserve_answer(LIST_ROOM)
        others = [] if self._others is None else await self._others.states()
        this = self._this.as_json(self._started_at)
        await answer_json(request, {"this": this, "others": others})
