"""Asks the server of a table for the stream's tail, whatever else the table is doing.

A query contacts its server once per interval, and a task waits for a silent one for up to minutes:
neither reports in time that the server does not answer. And a table that is stuck, or has stopped, asks
for nothing, while its stream grows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from streamfold.errors import StreamfoldError
from streamfold.snapshotter.spark.errors_from_spark import ServerUnreachableError
from streamfold.snapshotter.spark.table.intake import StreamEdges

#: Seconds between two checks; one takes up to three if the server is silent.
_PAUSE = 2.0
#: Seconds between two checks once the table is to stop.
_STOP_PAUSE = 0.5


class ServerWatch:
    """Checks a server in its own thread, from `start` to `close`.

    `on_tail` gets the tail after every check; None if it is not known.

    In a `with` block of the watch, `report` gets the error of every failed check, and None when
    the server answers again; it is not called after the block. `give_up` gets the last error, once, if
    the server does not answer when the table is to stop: it must end the work that waits for the
    server, which the next run repeats.
    """

    def __init__(
        self,
        edges: StreamEdges,
        stopping: threading.Event,
        *,
        on_tail: Callable[[int | None], None],
        report: Callable[[StreamfoldError | None], None],
        give_up: Callable[[StreamfoldError], None],
    ) -> None:
        self._edges = edges
        self._stopping = stopping
        self._on_tail = on_tail
        self._report = report
        self._give_up = give_up
        #: Why the last check in the block failed, if it did.
        self._failure: StreamfoldError | None = None
        self._entered = False
        self._closed = threading.Event()
        #: Held by a report and while giving up, so that neither happens after the block.
        self._reporting = threading.Lock()

    def start(self) -> None:
        """Check until `close`."""
        name = f"server of {self._edges.job.table}"
        threading.Thread(target=self._watch, name=name, daemon=True).start()

    def close(self) -> None:
        """Make no further check."""
        self._closed.set()

    def __enter__(self) -> ServerWatch:
        with self._reporting:
            self._entered, self._failure = True, None
        return self

    def __exit__(self, *_: object) -> None:
        with self._reporting:
            self._entered = False

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._note(self._check())
            if not self._stopping.wait(_PAUSE):
                continue
            with self._reporting:
                if self._failure is not None and self._entered:
                    self._give_up(self._failure)
                    return
            self._closed.wait(_STOP_PAUSE)

    def _check(self) -> StreamfoldError | None:
        try:
            tail = self._edges.tail()
        except StreamfoldError as error:
            self._on_tail(None)
            # Any other error is an answer; the query reports what is wrong.
            return error if isinstance(error, ServerUnreachableError) else None
        self._on_tail(tail)
        return None

    def _note(self, error: StreamfoldError | None) -> None:
        with self._reporting:
            if self._entered and (error is not None or self._failure is not None):
                self._failure = error
                self._report(error)
