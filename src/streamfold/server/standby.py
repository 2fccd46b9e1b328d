"""Standby: waits for the store's lease while reporting who has it, then keeps the lease."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, Gauge
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import CollectorRegistry

from streamfold.cluster import LeaseKeeper, LeaseOwner, process_evidence, steady_clock
from streamfold.errors import NotActiveError, StreamfoldError
from streamfold.server.http.bodies import NO_STORE
from streamfold.server.http.problems import ClientHangupError, answer_problem
from streamfold.server.http.request import Request
from streamfold.server.metrics import STANDBY
from streamfold.server.s2.responses import write_problem
from streamfold.store.engine.location import Location

logger = logging.getLogger(__name__)

_TEXT: Final = (b"content-type", b"text/plain; charset=utf-8")
_PROMETHEUS: Final = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_UNKNOWN: Final = "another server"


class StandbyStoppedError(StreamfoldError):
    """Raised if the process was asked to stop while standing by."""

    code = "standby_stopped"


class StandbyAnswers:
    """Responds to requests while another server is active: healthy but not ready."""

    def __init__(self, *, metrics: bool) -> None:
        """`metrics`: whether everybody may read /metrics."""
        self._registry = _registry() if metrics else None
        #: The active server, or None once this one opens the store.
        self.active: str | None = _UNKNOWN

    async def __call__(self, request: Request) -> None:
        path = request.raw_path
        try:
            if request.method in ("GET", "HEAD") and path in ("/health", "/ping"):
                await request.respond(200, (_TEXT, NO_STORE), b"OK")
            elif request.method in ("GET", "HEAD") and path == "/ready":
                body = f"standby: {self.situation}\n".encode(errors="replace")
                await request.respond(503, (_TEXT, NO_STORE), body)
            elif path == "/metrics" and self._registry is not None:
                await request.respond(200, (_PROMETHEUS,), generate_latest(self._registry))
            else:
                await answer_problem(request, self._refusal(), write_problem)
        except ClientHangupError:
            return  # nobody is waiting for the response

    @property
    def situation(self) -> str:
        """The situation as shown to clients and operators."""
        if self.active is None:
            return "this server became active and is opening the store"
        return f"{self.active} is active"

    def _refusal(self) -> NotActiveError:
        return NotActiveError(
            f"this server stands by, {self.situation}: use that server, or try again later"
        )


def _registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
        registry.register(collector)
    Gauge("streamfold_standby", STANDBY, registry=registry).set(1)
    return registry


def new_lease(location: Location, name: str, expiry: float) -> LeaseKeeper | None:
    """Return the store's lease for this process, or None if storage has no leases."""
    if location.leases is None:
        return None
    pid = os.getpid()
    owner = LeaseOwner(
        secrets.token_hex(16), name or socket.gethostname(), pid, process_evidence(pid)
    )
    return LeaseKeeper(location.leases, owner, expiry, steady_clock)


@asynccontextmanager
async def active_server(
    lease: LeaseKeeper,
    answers: StandbyAnswers,
    *,
    url: str,
    take_over: bool,
    stopping: asyncio.Event,
    on_standby: Callable[[], None],
) -> AsyncIterator[None]:
    """Wait until this server has the lease, and renew it while the context lasts.

    Calls `on_standby` once if it must wait. Raises StandbyStoppedError if `stopping` is set first.
    """
    standing_by = False

    def stand_by(owner: LeaseOwner | None) -> None:
        nonlocal standing_by
        name = _UNKNOWN if owner is None else str(owner)
        if not standing_by or name != answers.active:
            logger.info("standby: %s is active on %s; waiting for its lease", name, url)
        answers.active = name
        if not standing_by:
            standing_by = True
            on_standby()

    acquiring = asyncio.create_task(lease.acquire(take_over=take_over, on_standby=stand_by))
    asked_to_stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({acquiring, asked_to_stop}, return_when=asyncio.FIRST_COMPLETED)
        if not acquiring.done():
            raise StandbyStoppedError("the server was asked to stop while it stood by")
        acquiring.result()
    finally:
        asked_to_stop.cancel()
        acquiring.cancel()
        await asyncio.wait({acquiring, asked_to_stop})
    answers.active = None
    if standing_by:
        logger.info("active: this server has the lease of %s and opens the store", url)
    async with lease.renewing():
        yield
