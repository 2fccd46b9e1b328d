"""For those who watch the server: is it alive, does it take work, what does it measure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from streamfold.errors import StorageFullError, StreamfoldError
from streamfold.model.access_tokens import Operation
from streamfold.server.auth.access import Access
from streamfold.server.http.drain import Gate
from streamfold.server.http.request import Request
from streamfold.server.http.router import Router
from streamfold.store.store import StreamStore
from streamfold.wire.s2.errors import shown_message

_TEXT: Final = (b"content-type", b"text/plain; charset=utf-8")
_PROMETHEUS: Final = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


class Operations:
    """Handlers of /health, /ping, /ready and /metrics."""

    def __init__(
        self,
        store: StreamStore,
        gate: Gate,
        instruments: Sequence[Collector],
        access: Access | None,
    ) -> None:
        """With `access`, /metrics is for those who may see the account's metrics."""
        self._store = store
        self._gate = gate
        self._access = access
        self._registry = CollectorRegistry()
        for collector in (*instruments, PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            self._registry.register(collector)

    def add_to(self, router: Router) -> None:
        for method in ("GET", "HEAD"):
            router.add(method, "/health", self.health)
            router.add(method, "/ping", self.health)
            router.add(method, "/ready", self.ready)
        router.add("GET", "/metrics", self.metrics)

    async def health(self, request: Request) -> None:
        """Whether the process works and its storage answers."""
        try:
            await self._store.list_basins(limit=1)
        except StreamfoldError as error:
            await request.respond(503, (_TEXT,), f"{shown_message(error)}\n".encode())
        else:
            await request.respond(200, (_TEXT,), b"OK")

    async def ready(self, request: Request) -> None:
        """Whether new work should be sent here; not while draining, nor when storage is full."""
        if self._gate.draining.is_set():
            await request.respond(503, (_TEXT,), b"draining\n")
            return
        try:
            self._store.space.check()
        except StorageFullError as error:
            await request.respond(503, (_TEXT,), f"{error.message}\n".encode())
        else:
            await self.health(request)

    async def metrics(self, request: Request) -> None:
        if self._access is not None:
            await self._access.allow(request, Operation.ACCOUNT_METRICS)
        await request.respond(200, (_PROMETHEUS,), generate_latest(self._registry))
