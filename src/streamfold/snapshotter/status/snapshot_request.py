"""`POST /snapshot`: which tables it is for, and how long it waits for their bases."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from streamfold.errors import InvalidError, RetryLaterError, StreamfoldError
from streamfold.model.units import duration_text, parse_duration
from streamfold.snapshotter.status.table_status import ArtifactStatus, TableWriters

#: The longest wait of a request: a base of a large table takes minutes.
WAIT_MAX = timedelta(minutes=10)
#: Concurrent requests that wait, each of which holds a thread.
WAITS_MAX = 16

Answer = tuple[HTTPStatus, dict[str, Any]]
_PARAMETERS = ("table", "wait")


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """One request."""

    #: None for all tables.
    table: str | None = None
    #: None to answer at once.
    wait: timedelta | None = None

    @classmethod
    def of(cls, query: str) -> SnapshotRequest:
        """Parse a query string; InvalidError says what is wrong with it."""
        found = parse_qs(query, keep_blank_values=True)
        for name, values in found.items():
            if name not in _PARAMETERS:
                raise InvalidError(
                    f"parameter {name!r} is not known: the parameters are table and wait"
                )
            if len(values) != 1:
                raise InvalidError(f"{name} is given {len(values)} times: give it once")
        wait = found.get("wait", [None])[0]
        return cls(found.get("table", [None])[0], None if wait is None else _duration(wait))

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
        """Return requests by table, and refusals; raises if all are refused."""
        names = [self.table] if self.table is not None else list(writers.statuses())
        requests: dict[str, Future[ArtifactStatus]] = {}
        refused: dict[str, StreamfoldError] = {}
        for name in names:
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
                refused = {**refused, name: error}
        shown = {**_shown(list(requests), refused), "bases": bases}
        if not late and not bases:
            raise next(iter(refused.values()))
        if not late:
            return HTTPStatus.OK, {"committed": not refused, **shown}
        message = (
            f"no base of {', '.join(late)} was committed within {duration_text(wait)}: it is still "
            "pending, see last_base and last_error at /status"
        )
        problem = {"code": "snapshot_timeout", "message": message, "committed": False}
        return HTTPStatus.GATEWAY_TIMEOUT, {**problem, **shown, "waiting": late}


def _duration(text: str) -> timedelta:
    try:
        # A bare number is seconds.
        found = parse_duration(f"{text}s" if text.isdecimal() else text)
    except ValueError as error:
        raise InvalidError(f"wait: {text} {error}") from None
    if not timedelta(0) < found <= WAIT_MAX:
        raise InvalidError(
            f"wait: {text} must be more than 0s and at most {duration_text(WAIT_MAX)}"
        )
    return found


def _shown(names: list[str], refused: dict[str, StreamfoldError]) -> dict[str, Any]:
    shown: dict[str, Any] = {"tables": [name for name in names if name not in refused]}
    if len(names) == 1:
        shown["table"] = names[0]
    if refused:
        shown["refused"] = {
            name: {"code": error.code, "message": error.message} for name, error in refused.items()
        }
    return shown
