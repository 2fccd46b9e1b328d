"""Bases that somebody asked for: each request is answered when its base is committed."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from streamfold.errors import StreamfoldError
from streamfold.snapshotter.status.table_status import ArtifactStatus

Request = Future[ArtifactStatus]


class SnapshotRequests:
    """The requests for one table; used from any thread.

    Requests that come before a base is begun share it. One that comes later gets the next base: the
    one under way may lack what was in the stream by then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[Request] = []
        #: How many of the pending ones the base under way is for.
        self._served = 0
        self._refusal: StreamfoldError | None = None

    def add(self) -> Request:
        """Ask for a base; raises what `close` was given once there will be none."""
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            if len(self._pending) == self._served:
                self._pending.append(Future())
            return self._pending[-1]

    def begin(self) -> bool:
        """Begin with a base for all that is asked for by now; whether anything is."""
        with self._lock:
            self._served = len(self._pending)
            return bool(self._pending)

    def give_up(self) -> None:
        """The base could not be written: the requests wait for the next try."""
        with self._lock:
            self._served = 0

    def answer(self, base: ArtifactStatus) -> None:
        """The base is committed."""
        with self._lock:
            answered, self._pending = self._pending[: self._served], self._pending[self._served :]
            self._served = 0
        for request in answered:
            request.set_result(base)

    def close(self, refusal: StreamfoldError) -> None:
        """There will be no base any more, for the reason given."""
        with self._lock:
            self._refusal, pending = refusal, self._pending
            self._pending, self._served = [], 0
        for request in pending:
            request.set_exception(refusal)
