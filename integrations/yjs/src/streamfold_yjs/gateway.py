"""The Durable Streams Yjs protocol as an ASGI application in front of Streamfold."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from streamfold_yjs.documents import (
    BASIN,
    BINARY,
    Compactor,
    Document,
    StoredSnapshot,
    is_name,
    newest_snapshot,
)
from streamfold_yjs.updates import MalformedUpdateError, frame, unframed

log = logging.getLogger(__name__)

#: Pages of this machine.
_LOCAL_ORIGINS: Final = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
_METHODS: Final = ["GET", "HEAD", "POST", "PUT", "DELETE"]
_PRODUCER: Final = ["producer-id", "producer-epoch", "producer-seq"]
_EXPOSED: Final = [
    "location", "stream-next-offset", "stream-up-to-date", "stream-cursor", "stream-closed",
    "stream-sse-data-encoding", "producer-epoch", "producer-seq", "producer-expected-seq",
    "producer-received-seq",
]  # fmt: skip
#: Seconds for which presence is stored after its last use.
_AWARENESS_TTL: Final = "3600"
_CODES: Final = {
    400: "INVALID_REQUEST", 401: "UNAUTHORIZED", 403: "FORBIDDEN", 404: "DOCUMENT_NOT_FOUND",
    405: "INVALID_REQUEST", 410: "OFFSET_EXPIRED", 429: "RATE_LIMITED", 503: "UNAVAILABLE",
}  # fmt: skip


def make_app(
    streamfold: str,
    *,
    token: str = "",
    compact_after: int = 1 << 20,
    cors_origins: Sequence[str] = (),
) -> Starlette:
    """Return an application that serves documents at `/v1/yjs/{service}/docs/{name}`.

    Requests go to Streamfold with the client's `Authorization`, compaction and the deletion of what
    belongs to a document with `token`.
    """
    # Every page that follows a document has a connection.
    http = httpx.AsyncClient(
        base_url=streamfold,
        timeout=httpx.Timeout(10, read=60),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
    )
    own = {"authorization": f"Bearer {token}"} if token else {}
    own_http = httpx.AsyncClient(base_url=streamfold, headers=own, timeout=60)
    gateway = _Gateway(http, own_http, Compactor(own_http, compact_after))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with http, own_http:
            yield
            await gateway.compactor.close()

    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(cors_origins),
        allow_origin_regex=_LOCAL_ORIGINS,
        allow_methods=_METHODS,
        allow_headers=["authorization", "content-type", *_PRODUCER],
        expose_headers=_EXPOSED,
    )
    route = Route("/v1/yjs/{service}/docs/{name:path}", gateway.serve, methods=[*_METHODS, "PATCH"])
    return Starlette(
        routes=[route],
        middleware=[cors],
        lifespan=lifespan,
        exception_handlers={httpx.TransportError: _away},
    )


async def _away(_: Request, error: Exception) -> Response:
    return _error(503, f"Streamfold does not answer: {error!r}")


class _Gateway:
    def __init__(
        self, http: httpx.AsyncClient, own_http: httpx.AsyncClient, compactor: Compactor
    ) -> None:
        self._http = http
        self._own_http = own_http
        self.compactor = compactor

    async def serve(self, request: Request) -> Response:
        service, name = request.path_params["service"], request.path_params["name"]
        awareness = request.query_params.get("awareness")
        if not all(map(is_name, (service, name, awareness or "default"))) or "/" in service:
            return _error(400, "names have letters, digits, _, - and /")
        document = Document(service, name)
        if request.method not in _METHODS:
            return _error(405, f"{request.method} is not allowed")
        if awareness is not None:
            return await self._awareness(request, document, document.awareness(awareness))
        match request.method:
            case "PUT":
                return await self._create(request, document)
            case "POST":
                return await self._append(request, document)
            case "DELETE":
                return await self._delete(request, document)
            case "HEAD":
                return _relayed(await self._send(request, "HEAD", document.path))
        offset = request.query_params.get("offset", "-1")
        if offset == "snapshot":
            return await self._discover(request, document)
        if offset.endswith("_snapshot"):
            return await self._snapshot(request, document, offset.removesuffix("_snapshot"))
        return await self._read(request, document, offset)

    async def _create(self, request: Request, document: Document) -> Response:
        answer = await self._send(request, "PUT", document.path)
        if answer.status_code in (200, 201):
            await self._create_awareness(request, document.awareness("default"))
        return _relayed(answer)

    async def _append(self, request: Request, document: Document) -> Response:
        body = await request.body()
        try:
            unframed(body)
        except MalformedUpdateError as error:
            head = await self._send(request, "HEAD", document.path)
            return _error(400, str(error)) if head.is_success else _relayed(head)
        answer = await self._send(request, "POST", document.path, body)
        if answer.is_success:
            self.compactor.appended(document, len(body))
        return _acknowledged(request, answer)

    async def _delete(self, request: Request, document: Document) -> Response:
        answer = await self._send(request, "DELETE", document.path)
        if answer.is_success:
            for name in await self._awareness_streams(document):
                await self._own_http.delete(f"/v1/stream/{name}")
        return _relayed(answer)

    async def _awareness_streams(self, document: Document) -> list[str]:
        answer = await self._own_http.get(
            "/v1/streams",
            params={"prefix": document.awareness_prefix},
            headers={"s2-basin": BASIN},
        )
        return [stream["name"] for stream in answer.raise_for_status().json()["streams"]]

    async def _discover(self, request: Request, document: Document) -> Response:
        """Redirect to the newest snapshot, or to the beginning."""
        head = await self._send(request, "HEAD", document.path)
        if not head.is_success:
            return _relayed(head)
        newest = await self._send(request, "GET", f"{document.path}/snapshot")
        location = newest.headers.get("location", "")
        offset = location.rpartition("/")[2] or None
        self.compactor.opened(document, head.headers["stream-next-offset"], offset)
        target = request.url.include_query_params(offset=f"{offset}_snapshot" if offset else "-1")
        headers = {
            "location": f"{target.path}?{target.query}",
            "cache-control": "private, max-age=5",
        }
        return Response(status_code=307, headers=headers)

    async def _snapshot(self, request: Request, document: Document, offset: str) -> Response:
        answer = await self._send(request, "GET", f"{document.path}/snapshot/{offset}")
        if answer.status_code in (400, 404, 410):
            return _error(404, "there is no such snapshot", "SNAPSHOT_NOT_FOUND")
        if not answer.is_success:
            return _relayed(answer)
        return Response(
            answer.content,
            media_type=BINARY,
            headers={"stream-next-offset": _behind(offset), "cache-control": "no-store"},
        )

    async def _read(self, request: Request, document: Document, offset: str) -> Response:
        """Updates from an offset. Where a snapshot has replaced them, it comes as the first update."""
        live = request.query_params.get("live", "").replace("true", "long-poll")
        snapshot: StoredSnapshot | None = None
        while True:
            answer = await self._open(request, document.path, offset, live)
            if answer.status_code != 410:
                return await _passed_on(answer, snapshot)
            await answer.aread()
            snapshot = await newest_snapshot(self._http, document, _authorization(request))
            if snapshot is None:
                return _relayed(answer)
            if live != "sse":
                headers = {"stream-next-offset": snapshot.offset, "cache-control": "no-store"}
                return Response(frame(snapshot.body), media_type=BINARY, headers=headers)
            offset = snapshot.offset

    async def _awareness(self, request: Request, document: Document, path: str) -> Response:
        """Presence: a stream of its own, which ends after an hour without use."""
        if request.method == "GET":
            live = request.query_params.get("live", "").replace("true", "sse")
            offset = request.query_params.get("offset", "-1")
            return await _passed_on(await self._open(request, path, offset, live))
        if request.method not in ("PUT", "POST"):
            answer = await self._send(request, request.method, path)
            return _relayed(answer, missing="STREAM_NOT_FOUND")
        if request.method == "POST":
            body = await request.body()
            answer = await self._send(request, "POST", path, body)
            if answer.status_code != 404:
                return _relayed(answer)
        head = await self._send(request, "HEAD", document.path)
        if not head.is_success:
            return _relayed(head)
        created = await self._create_awareness(request, path)
        if request.method == "PUT" or not created.is_success:
            return _relayed(created)
        return _relayed(await self._send(request, "POST", path, body))

    async def _create_awareness(self, request: Request, path: str) -> httpx.Response:
        headers = _authorization(request) | {"content-type": BINARY, "stream-ttl": _AWARENESS_TTL}
        return await self._http.put(path, headers=headers)

    async def _open(self, request: Request, path: str, offset: str, live: str) -> httpx.Response:
        """The head of a read's answer; its body is still to be read, and it has to be closed."""
        query = {"offset": _within_streamfold(offset)} | ({"live": live} if live else {})
        if cursor := request.query_params.get("cursor"):
            query["cursor"] = cursor
        headers = _authorization(request)
        prepared = self._http.build_request("GET", path, params=query, headers=headers)
        return await self._http.send(prepared, stream=True)

    async def _send(
        self, request: Request, method: str, path: str, body: bytes = b""
    ) -> httpx.Response:
        headers = _authorization(request)
        if method in ("PUT", "POST"):
            headers["content-type"] = BINARY
        return await self._http.request(method, path, content=body, headers=headers)


def _authorization(request: Request) -> dict[str, str]:
    value = request.headers.get("authorization")
    return {"authorization": value} if value else {}


def _acknowledged(request: Request, answer: httpx.Response) -> Response:
    """An append's answer as its producer expects it.

    Streamfold does not get the producer's numbers: the provider of 0.2.7 begins with 0 again when it
    connects again, so that its next edits would count as repeated. An edit that is stored twice, or
    before an earlier one, is none to Yjs.
    """
    relayed = _relayed(answer)
    if answer.is_success and "producer-id" in request.headers:
        relayed.status_code = 200
        for name in ("producer-epoch", "producer-seq"):
            relayed.headers[name] = request.headers.get(name, "0")
    return relayed


def _behind(snapshot_offset: str) -> str:
    """Where to read on behind a snapshot. The protocol's tests want the next number, not the same."""
    return snapshot_offset.removesuffix("0") + "1"


def _within_streamfold(offset: str) -> str:
    """The offset that `_behind` was made from; any other is returned as it is."""
    return offset.removesuffix("1") + "0" if offset.endswith("_0000000000000001") else offset


async def _passed_on(answer: httpx.Response, snapshot: StoredSnapshot | None = None) -> Response:
    """The answer to a read, in the form that it has."""
    if answer.is_success and answer.headers["content-type"].startswith("text/event-stream"):
        return StreamingResponse(_events(answer, snapshot), headers=_headers(answer))
    await answer.aread()
    return _relayed(answer)


async def _events(answer: httpx.Response, snapshot: StoredSnapshot | None) -> AsyncIterator[bytes]:
    """A snapshot, then the answer's events, each with the control event that tells its offset.

    If Streamfold goes away, the reader connects again at that offset and misses nothing.
    """
    try:
        if snapshot:
            control = json.dumps({"streamNextOffset": snapshot.offset}).encode()
            yield b"event: data\ndata:%b\n\n" % base64.b64encode(frame(snapshot.body))
            yield b"event: control\ndata:%b\n\n" % control
        rest, pending = b"", b""
        async for piece in answer.aiter_raw():
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                pending += event + b"\n\n"
                if not event.startswith(b"event: data"):
                    yield pending
                    pending = b""
    except httpx.TransportError as error:
        log.info("a read has lost Streamfold: %r", error)
    finally:
        await answer.aclose()


def _headers(answer: httpx.Response) -> dict[str, str]:
    return {
        name: value
        for name, value in answer.headers.items()
        if name in ("content-type", "cache-control", "retry-after")
        or name.startswith(("stream-", "producer-"))
    }


def _relayed(answer: httpx.Response, missing: str | None = None) -> Response:
    """Streamfold's answer, with errors in the form of the protocol."""
    headers = _headers(answer)
    if answer.is_success:
        return Response(answer.content, answer.status_code, headers)
    headers.pop("content-type", None)
    try:
        message = str(json.loads(answer.content)["message"])
    except (ValueError, KeyError, TypeError):
        message = f"Streamfold answered {answer.status_code}"
    code = missing if answer.status_code == 404 else None
    return _error(answer.status_code, message, code, headers)


def _error(
    status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    code = code or _CODES.get(status, "INTERNAL_ERROR" if status >= 500 else "CONFLICT")
    return JSONResponse({"error": {"code": code, "message": message}}, status, headers)
