"""Operator endpoints: health, readiness, metrics, and the front page."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec
from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from streamfold import __version__
from streamfold.cluster import LeaseKeeper
from streamfold.errors import DataCorruptError, NotActiveError, StorageFullError, StreamfoldError
from streamfold.model.access_tokens import Right
from streamfold.model.names import StreamRef
from streamfold.server.auth import Access
from streamfold.server.http.drain import DrainGate
from streamfold.server.http.headers import Headers
from streamfold.server.http.request import Request
from streamfold.server.http.router import PUBLIC, Router
from streamfold.store.store import StreamStore
from streamfold.wire.s2.errors import hide_prefix, shown_message

_HEADERS: Final = (
    (b"content-type", b"text/html; charset=utf-8"),
    # The page has no script and loads nothing.
    (b"content-security-policy", b"default-src 'none'; base-uri 'none'; form-action 'none'"),
)
_PAGE: Final = f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>Streamfold {__version__}</title></head>
<body>
<h1>Streamfold {__version__}</h1>
<p>A durable stream store with built-in snapshots. This server is running. Its APIs are for programs:
</p>
<ul>
<li><code>/v1/basins</code>, <code>/v1/streams</code>:
<a href="https://s2.dev/docs">S2 v1</a></li>
<li><code>/&#123;bucket&#125;/&#123;stream&#125;</code>, <code>/v1/stream/&#123;path&#125;</code>:
<a href="https://github.com/durable-streams/durable-streams">Durable Streams</a></li>
<li><a href="/health">/health</a>, <a href="/ready">/ready</a>, <a href="/metrics">/metrics</a>:
its state</li>
</ul>
<p><code>streamfold --help</code> lists the commands. The documentation is in the folder
<code>docs</code> of the sources.</p>
</body>
</html>
""".encode()
_TEXT: Final = (b"content-type", b"text/plain; charset=utf-8")
_JSON: Final = (b"content-type", b"application/json")
_NOT_KEPT: Final = (b"cache-control", b"no-store")
_PROMETHEUS: Final = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

#: Streams in /v1/busiest-streams: as many as fit on a screen alongside everything else.
_BUSIEST_MAX: Final = 10


def add_front_page(router: Router, *, console: bool) -> None:
    """Respond to `GET /` with a redirect to the console, if there is one, or with the front page."""
    for method in ("GET", "HEAD"):
        router.add(method, "/", PUBLIC, _redirect_browser if console else _show)


async def _show(request: Request) -> None:
    await request.respond(200, _HEADERS, _PAGE)


async def _redirect_browser(request: Request) -> None:
    if "text/html" in (request.header("accept") or ""):
        headers = ((b"location", b"console/"), (b"cache-control", b"no-store"))
        await request.respond(302, headers)
    else:
        await _show(request)


class OpsEndpoints:
    """Handlers of /health, /ping, /ready, /metrics, /v1/busiest-streams and /v1/damage."""

    def __init__(
        self,
        store: StreamStore,
        drain_gate: DrainGate,
        instruments: Sequence[Collector],
        access: Access,
        lease: LeaseKeeper | None = None,
        *,
        open_metrics: bool,
    ) -> None:
        """With `open_metrics`, /metrics needs no right. It names no streams."""
        self._store = store
        self._gate = drain_gate
        self._access = access
        self._lease = lease
        self._open_metrics = open_metrics
        self._registry = CollectorRegistry()
        for collector in (*instruments, PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            self._registry.register(collector)

    def add_to(self, router: Router) -> None:
        for method in ("GET", "HEAD"):
            router.add(method, "/health", PUBLIC, self.health)
            router.add(method, "/ping", PUBLIC, self.health)
            router.add(method, "/ready", PUBLIC, self.ready)
        needs = PUBLIC if self._open_metrics else Right.ACCOUNT_METRICS
        router.add("GET", "/metrics", needs, self.metrics)
        # Below /v1, which cannot be a Durable Streams bucket.
        router.add("GET", "/v1/busiest-streams", Right.STREAM_METRICS, self.busiest)
        router.add("GET", "/v1/damage", Right.ACCOUNT_METRICS, self.damage)

    async def health(self, request: Request) -> None:
        """Report whether the process works and its storage responds."""
        await self._respond_health(request, (_TEXT,), b"OK")

    async def _respond_health(self, request: Request, headers: Headers, body: bytes) -> None:
        try:
            # Damaged storage responds too.
            with suppress(DataCorruptError):
                await self._store.list_basins(limit=1)
        except StreamfoldError as error:
            await request.respond(503, (_TEXT,), f"{shown_message(error)}\n".encode())
        else:
            await request.respond(200, headers, body)

    async def ready(self, request: Request) -> None:
        """Report whether the server accepts work.

        It does not accept work while draining, when storage is full, or when another server may be
        active. With damaged storage, it serves the intact part and responds with 200 and a body that
        reports the damage.
        """
        if self._gate.draining.is_set():
            # HAProxy keeps the open connections of a server that answers 404 (`disable-on-404`).
            status = 404 if request.query == "draining=404" else 503
            await request.respond(status, (_TEXT,), b"draining\n")
            return
        try:
            if self._lease is not None:
                self._lease.check()
            self._store.space.check()
        except (StorageFullError, NotActiveError) as error:
            await request.respond(503, (_TEXT,), f"{error.message}\n".encode())
        else:
            summary = self._store.damage.summary
            if not summary:
                await self.health(request)
                return
            body = msgspec.json.encode({"status": "degraded", "degraded": summary})
            await self._respond_health(request, (_JSON, _NOT_KEPT), body)

    async def metrics(self, request: Request) -> None:
        if not self._open_metrics:
            await self._access.allow(request, Right.ACCOUNT_METRICS)
        await request.respond(200, (_PROMETHEUS,), generate_latest(self._registry))

    async def damage(self, request: Request) -> None:
        """List unreadable streams and records, and damaged files."""
        grant = await self._access.allow(request, Right.ACCOUNT_METRICS)
        report = self._store.damage
        shown: list[dict[str, object]] = []
        for place in report.places:
            entry: dict[str, object] = {"effect": place.effect, "file": place.file}
            if place.ref is not None:
                name = grant.visible_stream_name(Right.STREAM_METRICS, *place.ref)
                if name is None:
                    continue
                effect = hide_prefix(place.effect, grant.stream_prefix)
                entry |= {"effect": effect, "basin": place.ref.basin, "stream": name}
            if place.seq_nums is not None:
                entry |= {
                    "first_seq_num": place.seq_nums.start,
                    "next_seq_num": place.seq_nums.stop,
                }
            shown.append(entry)
        answer = {
            "summary": report.summary,
            "read_only": report.read_only,
            "places": shown,
            "files": report.files,
        }
        await request.respond(200, (_JSON, _NOT_KEPT), msgspec.json.encode(answer))

    async def busiest(self, request: Request) -> None:
        """List the streams with the most recent bytes, among those that the caller may see."""
        grant = await self._access.allow_some(request, Right.STREAM_METRICS)

        def name_of(ref: StreamRef) -> str | None:
            return grant.visible_stream_name(Right.STREAM_METRICS, *ref)

        seconds, streams = self._store.usage.busy.busiest(
            _BUSIEST_MAX, lambda ref: name_of(ref) is not None
        )
        shown = [
            {
                "basin": stream.ref.basin,
                "stream": name_of(stream.ref),
                "records_per_second": round(stream.records / seconds, 3),
                "bytes_per_second": round(stream.bytes / seconds, 3),
            }
            for stream in streams
        ]
        body = msgspec.json.encode({"seconds": seconds, "streams": shown})
        await request.respond(200, (_JSON, _NOT_KEPT), body)
