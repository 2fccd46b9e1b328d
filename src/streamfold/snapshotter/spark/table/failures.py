"""How a table handles failures: whether and when to try again, and what log and status say."""

from __future__ import annotations

import logging
import random
import re
import time

from streamfold.backoff import Backoff
from streamfold.errors import StreamfoldError, WriterFencedError
from streamfold.snapshotter.spark.errors_from_spark import (
    ServerUnreachableError,
    StreamMissingError,
    error_from_spark,
    in_terms_of_tables,
    is_retryable,
)
from streamfold.snapshotter.spark.table.progress import TableProgress
from streamfold.snapshotter.spark.table_job import TableJob
from streamfold.snapshotter.status.table_status import State

logger = logging.getLogger(__name__)

#: The most seconds between two attempts to reach a server, and between two log lines that say the same.
#: An attempt takes up to three seconds if the server drops packets: then a line comes about every five.
_WAITING_PAUSE, _REPEAT = 2.0, 4.0
#: Names that each attempt makes up anew.
_RANDOM_NAME = re.compile(r"[0-9a-f]{12,}")
#: The table waits for somebody else, so the next attempt comes soon.
_WAITING = (ServerUnreachableError, StreamMissingError)


class TableFailures:
    """The failures of one table; used on one loop."""

    def __init__(self, job: TableJob, progress: TableProgress, backoff: Backoff) -> None:
        self._table, self._server = job.table, job.endpoint.origin
        self._progress = progress
        self._backoff = backoff
        self._rng = random.Random()  # noqa: S311 - only for pauses
        #: The last logged failure, and its time.
        self._logged: tuple[str, float] = ("", 0.0)

    def understood(self, raised: Exception) -> StreamfoldError:
        """Translate an error to the terms of the configuration."""
        return in_terms_of_tables(error_from_spark(raised), self._server)

    def may_retry(self, error: StreamfoldError) -> bool:
        """Record a failure; returns whether a retry may help."""
        if is_retryable(error):
            self.note(error)
            return True
        fenced = isinstance(error, WriterFencedError)
        self._progress.fail(error, State.FENCED if fenced else State.STOPPED)
        logger.error("table %s stops: %s (%s)", self._table, error.message, error.code)
        return False

    def note(self, error: StreamfoldError) -> None:
        """Record a transient failure; logs the same one again only after the table has recovered.

        While a server does not answer, or a stream is missing, the log says so every few seconds.
        """
        if isinstance(error, ServerUnreachableError):
            self._progress.tail = None
        repeats = isinstance(error, _WAITING) or not self._progress.has_error
        self._progress.fail(error, State.RETRYING)
        message, at = self._logged
        text, now = _RANDOM_NAME.sub("*", error.message), time.monotonic()
        if text != message or (repeats and now - at >= _REPEAT):
            logger.warning("table %s: %s; retrying", self._table, error.message)
            self._logged = text, now

    def pause(self, error: StreamfoldError, failures: int) -> float:
        """Return the seconds to wait after this many failures in a row."""
        pause = self._backoff.pause(failures, self._rng)
        return min(pause, _WAITING_PAUSE) if isinstance(error, _WAITING) else pause
