"""Changes one table's archive, one update at a time, each starting at the manifest's head.

The table's own thread brings new records, requests, due bases and the last flush; Spark's threads bring
batches of a query that takes in a backlog. A lock serializes them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from pyspark.sql import DataFrame

from streamfold.archive.schema import TableSchema
from streamfold.errors import StreamfoldError
from streamfold.snapshotter.errors import ValuesIncompatibleError
from streamfold.snapshotter.spark.errors_from_spark import ChangesLostError
from streamfold.snapshotter.spark.table.archive import TableArchive, TableEvents
from streamfold.snapshotter.spark.table.arrivals import Arrivals
from streamfold.snapshotter.spark.table.intake import Batch, TableStream
from streamfold.snapshotter.spark.table.pipeline import FIRST, TablePipeline
from streamfold.snapshotter.spark.table.progress import (
    CommitLog,
    TableProgress,
    UnreadRecords,
)
from streamfold.spark.errors import StreamReplacedError

logger = logging.getLogger(__name__)

#: Reason of a base that a request asked for.
REQUESTED = "requested"
#: Seconds between two looks at who owns the table, each a small request to the first destination.
OWNER_CHECK_SECONDS = 10.0
#: Seconds that a search for a record may take once the table is to stop: an orchestrator often grants
#: 30 s in all.
STOP_SEARCH_SECONDS = 10.0


class ArchiveUpdates:
    """Serializes the updates of one table; until `open` and after `close`, batches do nothing."""

    def __init__(
        self,
        stream: TableStream,
        pipeline: TablePipeline,
        published: TableArchive,
        events: TableEvents,
        progress: TableProgress,
        on_failure: Callable[[], None],
        stopping: threading.Event | None = None,
    ) -> None:
        """`stopping`: set when the table is to stop, which long searches must not hold up."""
        self._stream = stream
        self._pipeline = pipeline
        self._published = published
        published.timestamp_of = stream.timestamp
        self._events = events
        self._watch = progress
        self._on_failure = on_failure
        self._stopping = stopping or threading.Event()
        self._log = CommitLog(stream.job.table)
        self._turn = threading.Lock()
        self._open = False
        #: Whether the archive is known to end where the pipeline continues.
        self._settled = False
        #: The first record that is not taken in, and the tail, when the stream was last asked for both.
        self._noted: tuple[int, int] | None = None
        #: When the table was last known to be this writer's.
        self._owned_at = time.monotonic()
        #: The error of a batch of the query.
        self.failure: Exception | None = None
        #: Whether any records were taken in since `open`.
        self.progressed = False

    def open(self) -> int:
        """Open the archive, and return where the query has to start."""
        with self._turn:
            self._reopen()
            if self._published.head is not None:
                # Before the status shows its head, up to which publish has streams trimmed.
                self._check_length(self._stream.tail())
                self._check_last_record()
            else:
                self._watch.begin(self._stream.start().seq_num)
            self._resume()
            self._begin_empty()
            self._adopt()
            self._publish_delta()  # the process may have ended before it wrote the last version
            start, tail = self._next(), self._stream.tail()
            self._open = True
            self.note_tail(tail)
            self._watch.note_update(caught_up=tail <= start)
            if tail <= start:
                self._watch.recover()
            self._log.follows(self._stream.job.stream, start, tail)
            return start

    def note_tail(self, tail: int | None) -> None:
        """Report how far the table is behind its stream; from any thread, whatever the table is doing.

        None says that the tail is not known.
        """
        self._watch.note_tail(tail)
        unread = self._watch.unread_range()
        if unread is None or unread == self._noted:
            return
        timestamp = newest_commit = None
        try:
            timestamp = self._stream.timestamp(unread[0])
            newest_commit = self._stream.newest_commit(*unread)
        except StreamfoldError as error:
            # They may be trimmed, which the next update reports: their times are unknown.
            logger.debug("table %s: %s", self._stream.job.table, error.message)
        self._watch.note_unread(UnreadRecords(unread[0], timestamp, newest_commit))
        self._noted = unread

    def close(self, *, failed: bool = False) -> None:
        """Wait for the current update; later ones do nothing."""
        with self._turn:
            self._open = False
            self._settled = self._settled and not failed

    def process_batch(self, records: DataFrame, batch_id: int) -> None:
        """Process a batch of a query, in a thread of Spark's."""
        with self._turn:
            if not self._open:
                return
            try:
                self._process(self._stream.of(records))
            except Exception as error:
                # Kept as it is: Spark would turn it into text, and not stop the query sooner.
                self.failure, self._open, self._settled = error, False, False
                self._on_failure()

    @property
    def position(self) -> int:
        """The first record that is not taken in yet."""
        with self._turn:
            return self._next()

    def advance(self) -> bool:
        """Take in what the stream holds now, on the driver; False if that is too much for it."""
        with self._turn:
            if not self._open:
                return True
            tail = self._tail()
            self._check_not_replaced(tail)
            while (start := self._next()) < tail:
                end = min(tail, start + self._stream.job.max_records)
                few = self._stream.few(start, end, self._pipeline.intake.held_from)
                if few is None:
                    self._watch.note_update(caught_up=False)
                    return False
                self._process(few)
                if self._next() <= start:
                    break
            self._watch.note_update(caught_up=True)
            return True

    def _tail(self) -> int:
        """Return the tail of the stream, which the status shows from then on."""
        tail = self._stream.tail()
        self._watch.note_tail(tail)
        return tail

    def _check_not_replaced(self, tail: int) -> None:
        """Raise if the stream was created anew; one that has grown no further is not read yet."""
        self._check_length(tail)
        if tail > self._next():
            self._check_last_record()

    def _check_length(self, tail: int) -> None:
        """Raise if the stream ends before the next record: it was created anew."""
        if tail < (position := self._next()):
            raise ChangesLostError.shortened(self._stream.job.stream, tail, position)

    def _check_last_record(self) -> None:
        """Raise if the last record of the archive is another one now: its stream was created anew.

        The same holds for a stream of another name, unless it is a copy with the same records. The
        record is not found if it was trimmed; then only the length tells.
        """
        manifest, head = self._published.manifest, self._published.head
        source, stream = manifest.source if manifest else None, self._stream.job.stream
        if source is None or source.timestamp is None or head is None:
            return
        if str(head + 1) in source.offsets.values():
            found = self._stream.timestamp(head)
            if found not in (None, source.timestamp):
                raise StreamReplacedError(stream, head, source.timestamp, found)

    def check_owner_if_due(self) -> None:
        """Raise WriterFencedOutError if another writer has taken the table, also without a commit."""
        with self._turn:
            now = time.monotonic()
            if self._open and now - self._owned_at >= OWNER_CHECK_SECONDS:
                self._published.check_owner()
                self._owned_at = now

    def rebase_if_due(self) -> None:
        """Write a base that is due by time, even without changes."""
        with self._turn:
            if self._open and (reason := self._pipeline.due()):
                self._rebase(reason)

    def release_if_due(self) -> None:
        """Take in an open transaction whose wait is over, if no record follows it."""
        with self._turn:
            if not (self._open and self._pipeline.intake.is_held_enough()):
                return
            if self._stream.tail() <= self._next():
                self._count(self._pipeline.release)

    def rebase_on_request(self) -> None:
        """Write a base with everything that the stream holds now.

        Does nothing while all records belong to an open transaction and no base exists.
        """
        with self._turn:
            if not self._open or self._drain(REQUESTED):
                return
            if self._published.manifest is not None:
                self._rebase(REQUESTED)

    def flush(self) -> None:
        """Take in everything that the stream holds now, up to the last complete transaction."""
        with self._turn:
            if not self._settled:
                self._reopen()
                self._resume()
            self._drain(None)

    def _reopen(self) -> None:
        """Open the archive as it is stored, and forget what was read after it."""
        self._settled = False
        self._published.open()
        self._pipeline.intake.restart()
        self.failure, self.progressed = None, False

    def _resume(self) -> None:
        """Commit what an earlier attempt has written."""
        self._count(self._pipeline.resume)
        self._settled = True

    def _drain(self, force: str | None) -> bool:
        """Take in all records; returns whether the last of them became the base that `force` wants."""
        tail, based = self._tail(), False
        self._check_not_replaced(tail)
        while (start := self._next()) < tail:
            end = min(tail, start + self._stream.job.max_records)
            epoch = self._epoch()
            held_from = self._pipeline.intake.held_from
            records = self._stream.arrivals(start, end, held_from)
            self._process(records, force if end == tail else None)
            based = end == tail and self._epoch() > epoch
            if self._next() <= start:
                break  # the rest belongs to an open transaction
        self._watch.note_update(caught_up=True)
        return based

    def _process(self, records: Arrivals, force: str | None = None) -> None:
        while True:
            try:
                return self._count(partial(self._pipeline.process, records, force=force))
            except ValuesIncompatibleError as error:
                self._skip_to_truncate(error)

    def _skip_to_truncate(self, error: ValuesIncompatibleError) -> None:
        """Continue at the record that empties the table after the one that does not fit.

        A copy that is repeated begins with such a record: nothing before it matters any more. Raises
        the error if there is none, or if the search holds up a stop: the next run searches again.
        """
        began = time.monotonic()

        def give_up() -> bool:
            took = time.monotonic() - began
            return self._stopping.is_set() and took >= STOP_SEARCH_SECONDS

        truncate = self._stream.first_truncate(error.seq_num + 1, give_up)
        if truncate is None:
            raise error
        logger.warning(
            "table %s: record %d does not fit the table, and record %d empties it: those before it "
            "are skipped (%s)",
            self._stream.job.table, error.seq_num, truncate, "; ".join(error.problems),
        )  # fmt: skip
        self._pipeline.intake.skip_to(truncate)

    def _count(self, work: Callable[[], Batch | None]) -> None:
        """Do `work`, which may take records in, and count them."""
        began, before, epoch = time.monotonic(), self._published.manifest, self._epoch()
        batch = work()
        seconds = time.monotonic() - began
        self._log.committed(before, self._published.manifest, seconds)
        if batch is not None:
            self.progressed = True
            self._watch.take(batch, seconds, self._pipeline.intake.held_from)
            self._log.lettered(batch, self._stream.job.dead_letters.location)
            self._log.took(batch.seen, batch.records / seconds if seconds > 0 else 0.0)
        if batch is not None or self._published.manifest is not before:
            self._watch.recover()
        self._committed()
        if self._epoch() > epoch:
            self._publish_delta()
            self._collect()

    def _rebase(self, reason: str) -> None:
        began, before = time.monotonic(), self._published.manifest
        self._pipeline.rebase(reason)
        self._log.committed(before, self._published.manifest, time.monotonic() - began)
        self._watch.recover()
        self._committed()
        self._publish_delta()
        self._collect()

    def _publish_delta(self) -> None:
        """Write the versions of committed bases; a failure does not affect the archive."""
        for uri, error in self._published.publish_delta().items():
            self._watch.count_delta_error()
            logger.warning(
                "table %s: the Delta log in %s was not written, the next base tries again: %s",
                self._stream.job.table, uri, error.message,
            )  # fmt: skip

    def _collect(self) -> None:
        try:
            self._published.collect()
        except StreamfoldError as error:
            # The commit succeeded; the next base deletes what is left.
            if error.destination is not None:
                self._watch.count_destination_error(error.destination)
            logger.warning(
                "table %s: old files were not deleted: %s", self._stream.job.table, error.message
            )

    def _begin_empty(self) -> None:
        """Publish a table whose stream is still empty, so that readers find it.

        Undeclared columns are learned later; until then the key fields have no type.
        """
        if self._published.manifest is not None:
            return
        start = self._stream.start()
        if self._stream.tail() <= start.seq_num:
            began = time.monotonic()
            keys = TableSchema.of_keys(self._stream.job.decoder.key_fields)
            self._published.begin_empty(
                self._published.schema or keys,
                start.seq_num - 1,
                FIRST,
                self._pipeline.incomplete_before(start),
            )
            self._log.committed(None, self._published.manifest, time.monotonic() - began)

    def _next(self) -> int:
        """The first record that is not taken in yet."""
        known = [at for at in (self._pipeline.intake.seen, self._published.head) if at is not None]
        return max(known) + 1 if known else self._stream.start().seq_num

    def _epoch(self) -> int:
        return self._published.manifest.epoch if self._published.manifest else 0

    def _committed(self) -> None:
        self._adopt()
        self._events.wake()

    def _adopt(self) -> None:
        self._watch.adopt(self._published.manifest, self._published.lagging)
