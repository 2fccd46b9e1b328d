"""Requests for bases of one table; made and answered by any thread."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TypeAlias

from streamfold.errors import StreamfoldError
from streamfold.snapshotter.status.table_status import ArtifactStatus

Request: TypeAlias = Future[ArtifactStatus]


class SnapshotRequests:
    """The requests for one table.

    Requests made before a base starts share it. A later one gets the next base, since the current one
    may lack what the stream held by then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[Request] = []
        #: How many of the pending requests the current base is for.
        self._served = 0
        self._refusal: StreamfoldError | None = None

    def add(self) -> Request:
        """Request a base; after `close`, raises its error."""
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            self._pending.append(Future())
            return self._pending[-1]

    def begin(self) -> bool:
        """Start a base for all requests so far; returns whether there are any."""
        with self._lock:
            self._served = len(self._pending)
            return self._served > 0

    def answer(self, base: ArtifactStatus) -> None:
        """Answer the requests that the committed base is for."""
        with self._lock:
            answered, self._pending = self._pending[: self._served], self._pending[self._served :]
        for request in answered:
            request.set_result(base)

    def close(self, refusal: StreamfoldError) -> None:
        """Refuse all requests from now on."""
        with self._lock:
            self._refusal, pending, self._pending = refusal, self._pending, []
        for request in pending:
            request.set_exception(refusal)
