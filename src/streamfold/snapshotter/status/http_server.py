"""HTTP for operators: health, status, metrics, and requests for bases.

| request | answer |
|---|---|
| `GET /health/live` | 200 while the process answers |
| `GET /health/ready` | 200 if every table has a durable base and has caught up, else 503 |
| `GET /status` | positions, lag, last artifacts and last error of every table; Spark's work |
| `POST /snapshot` | 202 if bases will be written, 404 unknown table, 409 with the reason if not |
| `GET /metrics` | Prometheus |

`POST /snapshot` is for all tables, or with `?table=…` for one. With `?wait=30s` it answers 200 when the
bases are committed, or 504 after that time.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import SplitResult, parse_qs, urlsplit

import msgspec

from streamfold.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    RetryLaterError,
    StreamfoldError,
)
from streamfold.model.units import duration_text, parse_duration
from streamfold.snapshotter.errors import AddressUnavailableError
from streamfold.snapshotter.status.metrics import render_metrics
from streamfold.snapshotter.status.table_status import ArtifactStatus, TableWriters

logger = logging.getLogger(__name__)

#: The longest wait of a request: the base of a large table takes minutes.
WAIT_MAX = timedelta(minutes=10)
#: Requests that wait at once, each in a thread.
WAITS_MAX = 16

Answer = tuple[HTTPStatus, dict[str, Any]]
#: Seconds for a client to send its request, so that silent ones hold no threads.
REQUEST_TIMEOUT: Final = 10
_JSON, _PROMETHEUS = "application/json", "text/plain; version=0.0.4; charset=utf-8"
_STATUS_OF: Final = {
    NotFoundError: HTTPStatus.NOT_FOUND,
    ConflictError: HTTPStatus.CONFLICT,
    InvalidError: HTTPStatus.BAD_REQUEST,
    RetryLaterError: HTTPStatus.SERVICE_UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class RebaseRequest:
    """One request."""

    #: None for all tables.
    table: str | None = None
    #: None to answer at once.
    wait: timedelta | None = None

    @classmethod
    def of(cls, query: str) -> RebaseRequest:
        """Parse a query string; InvalidError says what is wrong."""
        parameters = parse_qs(query, keep_blank_values=True)
        for name, values in parameters.items():
            if name not in ("table", "wait"):
                raise InvalidError(
                    f"parameter {name!r} is not known: the parameters are table and wait"
                )
            if len(values) != 1:
                raise InvalidError(f"{name} is given {len(values)} times: give it once")
        [table], [wait] = (parameters.get(name, [None]) for name in ("table", "wait"))
        return cls(table, None if wait is None else _duration(wait))

    def serve(self, writers: TableWriters, waits: threading.BoundedSemaphore) -> Answer:
        """Request the bases, and wait for them if `wait` is given."""
        if self.wait is None:
            requests, refused = self._requests(writers)
            return HTTPStatus.ACCEPTED, {"accepted": True, **_shown(list(requests), refused)}
        if not waits.acquire(blocking=False):
            raise RetryLaterError(
                f"{WAITS_MAX} requests already wait for bases: try again later, or omit wait"
            )
        try:
            requests, refused = self._requests(writers)
            return self._await(requests, refused, self.wait)
        finally:
            waits.release()

    def _requests(
        self, writers: TableWriters
    ) -> tuple[dict[str, Future[ArtifactStatus]], dict[str, StreamfoldError]]:
        """Return requests and refusals by table; raises if all are refused."""
        requests: dict[str, Future[ArtifactStatus]] = {}
        refused: dict[str, StreamfoldError] = {}
        for name in [self.table] if self.table is not None else writers.statuses():
            try:
                requests[name] = writers.request_snapshot(name)
            except StreamfoldError as error:
                refused[name] = error
        if not requests:
            raise next(iter(refused.values()))
        return requests, refused

    def _await(
        self,
        requests: dict[str, Future[ArtifactStatus]],
        refused: dict[str, StreamfoldError],
        wait: timedelta,
    ) -> Answer:
        end = time.monotonic() + wait.total_seconds()
        bases: dict[str, ArtifactStatus] = {}
        late: list[str] = []
        for name, request in requests.items():
            try:
                bases[name] = request.result(max(0.0, end - time.monotonic()))
            except TimeoutError:
                late.append(name)
            except StreamfoldError as error:
                refused[name] = error
        shown = {**_shown(list(requests), refused), "bases": bases}
        if late:
            message = (
                f"no base of {', '.join(late)} was committed within {duration_text(wait)}: it is "
                "still pending, see last_base and last_error at /status"
            )
            problem = {"code": "snapshot_timeout", "message": message, "committed": False}
            return HTTPStatus.GATEWAY_TIMEOUT, {**problem, **shown, "waiting": late}
        if not bases:
            raise next(iter(refused.values()))
        return HTTPStatus.OK, {"committed": not refused, **shown}


def _duration(text: str) -> timedelta:
    try:
        # A bare number means seconds.
        duration = parse_duration(f"{text}s" if text.isdecimal() else text)
    except ValueError as error:
        raise InvalidError(f"wait: {text} {error}") from None
    if not timedelta(0) < duration <= WAIT_MAX:
        raise InvalidError(
            f"wait: {text} must be more than 0s and at most {duration_text(WAIT_MAX)}"
        )
    return duration


def _shown(names: list[str], refused: dict[str, StreamfoldError]) -> dict[str, Any]:
    shown: dict[str, Any] = {"tables": [name for name in names if name not in refused]}
    if len(names) == 1:
        shown["table"] = names[0]
    if refused:
        shown["refused"] = {
            name: {"code": error.code, "message": error.message} for name, error in refused.items()
        }
    return shown


class StatusServer:
    """Answers at `port`, or a free one for 0, until it is closed.

    AddressUnavailableError if the address is in use or not this machine's.
    """

    def __init__(self, writers: TableWriters, host: str, port: int) -> None:
        try:
            self._http = _Server((host, port), writers)
        except OSError as error:
            raise AddressUnavailableError(host, port, error.strerror or str(error)) from None
        self._thread = threading.Thread(
            target=self._http.serve_forever, name="snapshotter-http", daemon=True
        )

    def __enter__(self) -> StatusServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], writers: TableWriters) -> None:
        super().__init__(address, _Handler)
        self.writers = writers
        #: One per request that waits for a base.
        self.waits = threading.BoundedSemaphore(WAITS_MAX)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "streamfold-snapshotter"
    timeout = REQUEST_TIMEOUT
    server: _Server

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/health/live":
            self._answer(HTTPStatus.OK, {"live": True})
        elif url.path == "/health/ready":
            self._ready()
        elif url.path == "/status":
            writers = self.server.writers
            self._answer(HTTPStatus.OK, {"tables": writers.statuses(), "spark": writers.spark()})
        elif url.path == "/metrics":
            self._send(HTTPStatus.OK, render_metrics(self.server.writers), _PROMETHEUS)
        else:
            self._refuse_path(url, "GET")

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        self.close_connection = True  # the body is not read
        if url.path != "/snapshot":
            self._refuse_path(url, "POST")
            return
        try:
            asked = RebaseRequest.of(url.query)
            status, answer = asked.serve(self.server.writers, self.server.waits)
        except StreamfoldError as error:
            self._refuse(error)
        else:
            self._answer(status, answer)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        logger.debug(format, *args)

    def _ready(self) -> None:
        ready = {name: s.ready for name, s in self.server.writers.statuses().items()}
        status = HTTPStatus.OK if all(ready.values()) else HTTPStatus.SERVICE_UNAVAILABLE
        self._answer(status, {"ready": all(ready.values()), "tables": ready})

    def _refuse(self, error: StreamfoldError) -> None:
        statuses = (status for kind, status in _STATUS_OF.items() if isinstance(error, kind))
        status = next(statuses, HTTPStatus.INTERNAL_SERVER_ERROR)
        self._answer(status, {"code": error.code, "message": error.message})

    def _refuse_path(self, url: SplitResult, method: str) -> None:
        message = f"there is no {method} {url.path}: see /status, /metrics, /health, /snapshot"
        self._answer(HTTPStatus.NOT_FOUND, {"code": "not_found", "message": message})

    def _answer(self, status: HTTPStatus, value: object) -> None:
        self._send(status, msgspec.json.encode(value), _JSON)

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)
