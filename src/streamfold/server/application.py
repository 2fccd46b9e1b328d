"""Takes every request through admission, routing, problem responses and the access log."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Sequence
from time import perf_counter
from typing import Final

from streamfold.cluster import LeaseKeeper
from streamfold.errors import ServerBusyError, StoreClosingError
from streamfold.server.durable_streams.routes import DurableStreamsFace
from streamfold.server.http import cors
from streamfold.server.http.access_log import AccessLog
from streamfold.server.http.bodies import answer_json
from streamfold.server.http.cors import PagePolicy
from streamfold.server.http.door import STREAMS_MAX
from streamfold.server.http.drain import DrainGate
from streamfold.server.http.headers import text_of
from streamfold.server.http.problems import (
    ClientHangupError,
    ProblemWriter,
    answer_problem,
    drop_traceback,
)
from streamfold.server.http.request import Request
from streamfold.server.http.router import Route, Router, memoize_short

#: A name or address with an optional port, as in RFC 3986.
_HOST: Final = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")
#: The methods of the whole server, for `OPTIONS *`.
_METHODS: Final = b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
_AMBIGUOUS: Final = "host, origin, authorization and s2-basin may come once each: send one of each"
#: Access log status of a client that hung up before its response, as in nginx.
_HUNG_UP: Final = 499
#: Maximum requests in progress per connection: twice what HTTP/2 lets it open, because a request that
#: the client resets counts until the server notices.
CONNECTION_REQUESTS_MAX: Final = 2 * STREAMS_MAX
#: Maximum requests per address, as a multiple of those that the server could still accept: a single
#: address gets three quarters of all, and any number of addresses leave some for the next.
_CLIENT_SHARE: Final = 3
#: Paths served even while draining, because monitoring needs them.
_ALWAYS_OPEN: Final = frozenset(("/health", "/ping", "/ready", "/metrics", "/v1/busiest-streams"))


class Application:
    """Sends exactly one response to each request, or visibly breaks it off."""

    def __init__(
        self,
        router: Router,
        durable: DurableStreamsFace,
        write_problem: ProblemWriter,
        drain_gate: DrainGate,
        access_log: AccessLog | None,
        pages: PagePolicy,
        public_url: str | None,
        requests_max: int,
        lease: LeaseKeeper | None = None,
    ) -> None:
        self._router = router
        self._durable = durable
        self._write_problem = write_problem
        self._gate = drain_gate
        self._access_log = access_log
        self._pages = pages
        self._public_url = public_url
        self._requests_max = requests_max
        self._lease = lease

    @property
    def routes(self) -> Sequence[Route]:
        """All routes of all faces with the rights they need."""
        return (*self._router.routes, *self._durable.routes)

    async def __call__(self, request: Request) -> None:
        started = perf_counter()
        self._gate.enter(request.task)
        try:
            await self._answer(request)
        except ClientHangupError as error:
            drop_traceback(error)
            if not request.status:
                await _answer_hangup(request)
        except asyncio.CancelledError as error:
            # Cut off at the end of a drain. The missing end shows that the response is incomplete.
            drop_traceback(error)
        except Exception as error:
            await answer_problem(request, error, self._write_problem)
        finally:
            self._gate.leave(request.task)
        if self._access_log is not None:
            self._access_log.record(request, perf_counter() - started)

    def _answer(self, request: Request) -> Awaitable[None]:
        request.public_url = self._public_url
        if request.ambiguous:
            return _refuse(request, 400, "bad_header", _AMBIGUOUS)
        refusal = self._pages.judge(request)
        if refusal is not None:
            return _refuse(request, 403, refusal.code, refusal.message)
        if request.method == "OPTIONS" and self._pages.enabled and cors.is_preflight(request):
            return cors.answer_preflight(request)
        path, running, host = request.raw_path, request.running, request.headers.get(b"host")
        if not path.startswith("/") or (host is not None and not _is_host(host)):
            return _answer_malformed(request, host)
        if running.on_connection > CONNECTION_REQUESTS_MAX:
            raise ServerBusyError(CONNECTION_REQUESTS_MAX, "connection")
        always_open = path in _ALWAYS_OPEN
        free = self._requests_max - self._gate.inside
        if not always_open and (free < 0 or running.of_client > _CLIENT_SHARE * (free + 1)):
            raise self._no_room(free, running.of_client)
        if self._lease is not None and not always_open:
            request.check_active = self._lease.check
            request.check_active()
        match = self._router.match(path)
        draining = self._gate.draining.is_set()
        if match is None and self._durable.serves(path) and not draining:
            return self._durable.handle(request)
        if draining and not always_open:
            raise StoreClosingError
        if match is None:
            return _refuse(request, 404, "not_found", f"there is nothing at {path[:200]!r}")
        handler = match.handlers.get(request.method)
        if handler is None:
            allow = (b"allow", match.allowed.encode())
            what = f"{request.method[:20]} is not possible here, only {match.allowed}"
            return _refuse(request, 405, "method_not_allowed", what, allow)
        return handler(request, *match.segments)

    def _no_room(self, free: int, of_client: int) -> ServerBusyError:
        """Return the error for a request that is its client's `of_client`-th in progress."""
        if free < 0:
            return ServerBusyError(self._requests_max, "server")
        return ServerBusyError(of_client - 1, "address")


async def _answer_hangup(request: Request) -> None:
    """Reject a request whose body ends early, before anything was done.

    A client that sent malformed chunks or half-closed too early still listens. A broken-off response
    would leave the outcome open.
    """
    message = "the body ends early or its chunks are malformed: send the whole request again"
    await _refuse(request, 400, "bad_body", message)
    request.status = _HUNG_UP


def _answer_malformed(request: Request, host: bytes | None) -> Awaitable[None]:
    """Reject a request with a malformed host or target."""
    if host is not None and not _is_host(host):
        message = (
            f"host {text_of(host)[:80]!r} is not a name or an address: send the one you reached"
        )
        return _refuse(request, 400, "bad_header", message)
    path = request.raw_path
    if path == "*" and request.method == "OPTIONS":
        return request.respond(204, ((b"allow", _METHODS),))
    message = f"target {path[:80]!r} is not a path: send one that begins with a slash"
    return _refuse(request, 400, "bad_path", message)


@memoize_short
def _is_host(value: bytes) -> bool:
    return _HOST.fullmatch(value) is not None


async def _refuse(
    request: Request, status: int, code: str, message: str, *headers: tuple[bytes, bytes]
) -> None:
    await answer_json(request, {"code": code, "message": message}, status, headers)
