"""Checks that the server of a table answers while Spark reads from it.

A query contacts its server once per interval, and a task waits for a silent one for up to minutes:
neither reports in time that the server does not answer.
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
    """Checks a server in its own thread while the block runs.

    `report` gets the error of every failed check, and None when the server answers again; it is not
    called after the block. `give_up` gets the last error, once, if the server does not answer when the
    table is to stop: it must end the work that waits for the server, which the next run repeats.
    """

    def __init__(
        self,
        edges: StreamEdges,
        stopping: threading.Event,
        *,
        report: Callable[[StreamfoldError | None], None],
        give_up: Callable[[StreamfoldError], None],
    ) -> None:
        self._edges = edges
        self._stopping = stopping
        self._report = report
        self._give_up = give_up
        #: Why the last check failed, if it did.
        self._failure: StreamfoldError | None = None
        self._done = threading.Event()
        #: Held by a report and while giving up, so that neither happens after the block.
        self._reporting = threading.Lock()

    def __enter__(self) -> ServerWatch:
        name = f"server of {self._edges.job.table}"
        threading.Thread(target=self._watch, name=name, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._reporting:
            self._done.set()

    def _watch(self) -> None:
        while not self._done.is_set():
            self._note(self._check())
            if not self._stopping.wait(_PAUSE):
                continue
            with self._reporting:
                if self._failure is not None and not self._done.is_set():
                    self._give_up(self._failure)
                    return
            self._done.wait(_STOP_PAUSE)

    def _check(self) -> StreamfoldError | None:
        try:
            self._edges.tail()
        except StreamfoldError as error:
            # Any other error is an answer; the query reports what is wrong.
            return error if isinstance(error, ServerUnreachableError) else None
        return None

    def _note(self, error: StreamfoldError | None) -> None:
        with self._reporting:
            if not self._done.is_set() and (error is not None or self._failure is not None):
                self._failure = error
                self._report(error)
