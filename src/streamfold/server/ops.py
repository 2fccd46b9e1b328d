"""For operators: health, readiness, metrics, and what a browser shows at `/`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec
from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from streamfold import __version__
from streamfold.errors import DataCorruptError, StorageFullError, StreamfoldError
from streamfold.model.access_tokens import Operation
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
<p>A durable stream store that knows about snapshots. This server works; it is meant for programs:</p>
<ul>
<li><code>/v1/basins</code>, <code>/v1/streams</code>:
<a href="https://s2.dev/docs">S2 v1</a></li>
<li><code>/&#123;bucket&#125;/&#123;stream&#125;</code>, <code>/v1/stream/&#123;path&#125;</code>:
<a href="https://github.com/durable-streams/durable-streams">Durable Streams</a></li>
<li><a href="/health">/health</a>, <a href="/ready">/ready</a>, <a href="/metrics">/metrics</a>:
its state</li>
</ul>
<p>On a command line, <code>streamfold --help</code> lists the verbs, and the documentation is in the
folder <code>docs</code> of the sources.</p>
</body>
</html>
""".encode()
_TEXT: Final = (b"content-type", b"text/plain; charset=utf-8")
_JSON: Final = (b"content-type", b"application/json")
_NOT_KEPT: Final = (b"cache-control", b"no-store")
_PROMETHEUS: Final = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

#: Streams that /v1/busiest-streams shows: as many as fit a screen beside the rest.
_BUSIEST_MAX: Final = 10


def add_front_page(router: Router, *, console: bool) -> None:
    """Answer `GET /`: send browsers to the console if there is one, and others the page."""
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
        *,
        open_metrics: bool,
    ) -> None:
        """With `open_metrics`, /metrics needs no right; it names no streams."""
        self._store = store
        self._gate = drain_gate
        self._access = access
        self._open_metrics = open_metrics
        self._registry = CollectorRegistry()
        for collector in (*instruments, PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            self._registry.register(collector)

    def add_to(self, router: Router) -> None:
        for method in ("GET", "HEAD"):
            router.add(method, "/health", PUBLIC, self.health)
            router.add(method, "/ping", PUBLIC, self.health)
            router.add(method, "/ready", PUBLIC, self.ready)
        needs = PUBLIC if self._open_metrics else Operation.ACCOUNT_METRICS
        router.add("GET", "/metrics", needs, self.metrics)
        # Below /v1, which cannot be a bucket of Durable Streams.
        router.add("GET", "/v1/busiest-streams", Operation.STREAM_METRICS, self.busiest)
        router.add("GET", "/v1/damage", Operation.ACCOUNT_METRICS, self.damage)

    async def health(self, request: Request) -> None:
        """Answer whether the process works and its storage responds."""
        await self._respond_health(request, (_TEXT,), b"OK")

    async def _respond_health(self, request: Request, headers: Headers, body: bytes) -> None:
        try:
            # Damaged storage responds, too.
            with suppress(DataCorruptError):
                await self._store.list_basins(limit=1)
        except StreamfoldError as error:
            await request.respond(503, (_TEXT,), f"{shown_message(error)}\n".encode())
        else:
            await request.respond(200, headers, body)

    async def ready(self, request: Request) -> None:
        """Answer whether the server takes new work: not while it drains, nor when storage is full.

        A server whose storage is damaged serves what is whole: 200, with a body that says so.
        """
        if self._gate.draining.is_set():
            await request.respond(503, (_TEXT,), b"draining\n")
            return
        try:
            self._store.space.check()
        except StorageFullError as error:
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
            await self._access.allow(request, Operation.ACCOUNT_METRICS)
        await request.respond(200, (_PROMETHEUS,), generate_latest(self._registry))

    async def damage(self, request: Request) -> None:
        """Answer which streams and records cannot be read, and which files are damaged."""
        grant = await self._access.allow(request, Operation.ACCOUNT_METRICS)
        report = self._store.damage
        shown: list[dict[str, object]] = []
        for place in report.places:
            entry: dict[str, object] = {"effect": place.effect, "file": place.file}
            if place.ref is not None:
                name = grant.visible_stream_name(Operation.STREAM_METRICS, *place.ref)
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
        """Answer which streams got the most bytes in the last seconds, of those the caller may see."""
        grant = await self._access.allow_some(request, Operation.STREAM_METRICS)

        def name_of(ref: StreamRef) -> str | None:
            return grant.visible_stream_name(Operation.STREAM_METRICS, *ref)

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
