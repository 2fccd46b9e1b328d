"""The progress of one table's writer as status and log lines.

The loop writes it and any thread reads the status, so what it shows is replaced, never changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from streamfold.archive.manifest.model import Artifact, Manifest
from streamfold.archive.manifest.positions import LSN, format_time, parse_time
from streamfold.archive.read.decoding import count_of
from streamfold.archive.write.layout import layout_of
from streamfold.errors import StreamfoldError
from streamfold.snapshotter.source_positions import SourceSpan
from streamfold.snapshotter.spark.tasks.intake import Batch
from streamfold.snapshotter.status.table_status import (
    ArtifactStatus,
    Counts,
    DeadLetterStatus,
    SparkCounts,
    State,
    TableFailure,
    TableStatus,
)
from streamfold.wording import noun

logger = logging.getLogger(__name__)

#: Reason of a diff without a base.
INTERVAL = "interval"
#: Reason of a diff that was committed together with its base.
CLOSING = "closing"


class CommitLog:
    """Logs the commits of one table."""

    def __init__(self, table: str) -> None:
        self._table = table
        #: Where the table started, and the stream's tail at that time.
        self._start = self._tail = 0

    def follows(self, stream: str, start: int, tail: int) -> None:
        """Log that the table starts at `start`; the records before `tail` are the backlog."""
        self._start, self._tail = start, max(start, tail)
        behind = self._tail - start
        logger.info(
            "table %s: follows stream %s from record %d on, %d %s behind",
            self._table, stream, start, behind, noun(behind, "record"),
        )  # fmt: skip

    def committed(self, before: Manifest | None, after: Manifest | None, seconds: float) -> None:
        """Log each artifact that was committed between two manifests."""
        if after is None or after is before:
            return
        new = _new_artifacts(before, after)
        based = any(artifact.is_base for artifact in new)
        for artifact in new:
            line = commit_line(artifact, based, seconds)
            logger.info("table %s: committed %s", self._table, line)

    def warn(self, batch: Batch, letters_at: str) -> None:
        """Warn of dead letters, and of a transaction that is published in parts."""
        if batch.letter is not None:
            logger.warning(
                "table %s: %d of %d records became dead letters, in %s; the first is record %d: %s",
                self._table, batch.dead, batch.records, letters_at, *batch.letter,
            )  # fmt: skip
        if (transaction := batch.cut) is not None:
            logger.warning(
                "table %s: transaction %s began at record %d and has no end up to record %d: it is "
                "published in parts; raise transactions.max_wait or max_records if it is to end later",
                self._table, transaction.id, transaction.since, batch.seen,
            )  # fmt: skip

    def took(self, last: int, rate: float) -> None:
        """Log that records up to `last` were taken in, at `rate` records per second."""
        done, backlog = last + 1 - self._start, self._tail - self._start
        if not 0 < done < backlog:
            return
        left = f", about {(backlog - done) / rate:.0f} s left" if rate > 0 else ""
        logger.info(
            "table %s: %d of %d records of the backlog taken in (%.0f %%), %.0f records/s%s",
            self._table, done, backlog, 100 * done / backlog, rate, left,
        )  # fmt: skip


def commit_line(artifact: Artifact, with_base: bool, seconds: float) -> str:
    """Return kind, range, rows, bytes, seconds and reason of one commit."""
    if artifact.is_base:
        kind, extent = "base", f"at {artifact.to_position}"
        reason = artifact.rebase_reason or "unknown"
    else:
        kind, extent = "diff", f"({artifact.from_position}, {artifact.to_position}]"
        reason = CLOSING if with_base else INTERVAL
    rows, size = count_of(artifact), sum(files.size_bytes for files in artifact.formats.values())
    return (
        f"{kind} {extent} of epoch {artifact.epoch}: {rows} {noun(rows, 'row')}, {size} bytes, "
        f"{seconds:.2f} s, reason {reason}"
    )


def _new_artifacts(before: Manifest | None, after: Manifest) -> list[Artifact]:
    earlier = {(a.kind, a.epoch, a.to_position) for a in before.artifacts} if before else set()
    return [a for a in after.artifacts if (a.kind, a.epoch, a.to_position) not in earlier]


@dataclass(frozen=True, slots=True)
class UnreadRecords:
    """The records that a table has not taken in."""

    #: The first of them, and its time in milliseconds; None if it no longer exists.
    first: int
    timestamp: int | None
    #: LSN of the newest commit among them; None if the records name no source positions.
    newest_commit: int | None = None


class TableProgress:
    """Counts and states of one table."""

    def __init__(
        self,
        table: str,
        stream: str,
        destinations: Iterable[str],
        now: Callable[[], datetime],
        letters_at: str = "",
    ) -> None:
        """`letters_at`: where dead letters go."""
        self._letters_at = letters_at
        #: The first dead letter of the last batch that had any.
        self._letter: tuple[int, str] | None = None
        self._now = now
        counts = Counts(destination_errors=dict.fromkeys(destinations, 0))
        self._status = TableStatus(table=table, stream=stream, state=State.STARTING, counts=counts)
        self._manifest: Manifest | None = None
        #: Milliseconds of the last record taken in.
        self._last_time: int | None = None
        #: The source commits that were read.
        self._source: SourceSpan | None = None
        #: Where a table without an archive starts.
        self.start: int | None = None
        #: The tail of the stream; None while it is unknown.
        self.tail: int | None = None
        #: The records that are not taken in yet.
        self.unread: UnreadRecords | None = None
        #: Whether the last update took in everything that the stream held when it began.
        self.caught_up = False

    @property
    def has_error(self) -> bool:
        """Whether something failed and has not succeeded since."""
        return self._status.last_error is not None

    def enter(self, state: State) -> None:
        self._change(state=state)

    def fail(self, error: StreamfoldError, state: State) -> None:
        failure = TableFailure(error.code, error.message, format_time(self._now()))
        self.count(failures=1)
        if error.destination is not None:
            self.count_destination_error(error.destination)
        self._change(state=state, last_error=failure)

    def recover(self) -> None:
        """Clear the error: what failed has succeeded since."""
        self._change(last_error=None)

    def adopt(self, manifest: Manifest | None, lagging: Mapping[str, StreamfoldError]) -> None:
        """Show the committed manifest, and count what is new in it."""
        if manifest is not None and manifest is not self._manifest:
            if self._manifest is not None or manifest.commit_number == 1:
                new = _new_artifacts(self._manifest, manifest)
                bases = sum(artifact.is_base for artifact in new)
                self.count(bases=bases, diffs=len(new) - bases)
            self._manifest = manifest
        for uri in lagging:
            self.count_destination_error(uri)
        shown = {uri: error.message for uri, error in lagging.items()}
        self._change(lagging_destinations=shown)

    def count_destination_error(self, uri: str) -> None:
        errors = self._status.counts.destination_errors
        self._set_count(destination_errors=errors | {uri: errors.get(uri, 0) + 1})

    def count(self, **more: int) -> None:
        """Add to fields of `Counts`."""
        counts = self._status.counts
        self._set_count(**{name: getattr(counts, name) + n for name, n in more.items()})

    def take(self, batch: Batch, seconds: float, held_from: int | None) -> None:
        """Count a batch that was taken in, except what is held back."""
        self._last_time = batch.timestamp
        self._letter = batch.letter or self._letter
        self._source = batch.source_seen or self._source
        self.count(
            records=batch.records,
            changes=batch.changes,
            dead_letters=batch.dead,
            ignored=batch.ignored,
            transactions_cut=int(batch.cut is not None),
        )
        rate = batch.records / seconds if seconds > 0 else 0.0
        self._change(rows_per_second=rate, position=batch.seen, waiting_from=held_from)

    def unread_range(self) -> tuple[int, int] | None:
        """Return the first record that is not taken in, and the tail; None if there is none."""
        following, tail = self._following(), self.tail
        return None if following is None or tail is None or following >= tail else (following, tail)

    def status(
        self, event_errors: Mapping[str, int], spark: SparkCounts | None = None
    ) -> TableStatus:
        # The manifest first: the loop replaces it after the status of the batch that led to it.
        manifest, status, unread = self._manifest, self._status, self.unread
        following, tail, last_time = self._following(), self.tail, self._last_time
        source, now = self._source, self._now()
        lag = None if following is None or tail is None else max(0, tail - following)
        if unread is not None and following is not None and unread.first >= following:
            last_time = unread.timestamp
        status = msgspec.structs.replace(
            status,
            counts=msgspec.structs.replace(status.counts, event_errors=dict(event_errors)),
            lag_records=lag,
            lag_seconds=_lag_seconds(lag, last_time, now),
            spark=spark or SparkCounts(),
        )
        if manifest is None:
            return status
        base, chain = manifest.base, manifest.chain
        head = layout_of(manifest).seq_num(manifest.head_position)
        diffs = [artifact for artifact in manifest.artifacts if not artifact.is_base]
        position = max(head, status.position if status.position is not None else head)
        newest_unread = unread.newest_commit if unread is not None else None
        return msgspec.structs.replace(
            status,
            dead_letters=_letters(manifest, self._letters_at, self._letter),
            ready=status.state is State.RUNNING and self.caught_up,
            position=position,
            buffer_depth=position - head,
            manifest_head=manifest.head_position,
            incomplete_before=manifest.incomplete_before,
            epoch=manifest.epoch,
            churn_records=sum(diff.change_count or 0 for diff in chain),
            snapshot_age_seconds=max(0.0, (now - parse_time(base.created_at)).total_seconds()),
            last_base=_shown(base),
            last_diff=_shown(diffs[-1]) if diffs else None,
            **_source_lag(status, manifest, source.last if source else None, newest_unread, now),
        )

    def _following(self) -> int | None:
        """Return the first record that is not taken in; None if that is not known yet."""
        ends = [] if self._status.position is None else [self._status.position]
        if (manifest := self._manifest) is not None:
            ends.append(layout_of(manifest).seq_num(manifest.head_position))
        return max(ends) + 1 if ends else self.start

    def _set_count(self, **fields: object) -> None:
        self._change(counts=msgspec.structs.replace(self._status.counts, **fields))

    def _change(self, **fields: object) -> None:
        self._status = msgspec.structs.replace(self._status, **fields)


def _letters(
    manifest: Manifest, location: str, letter: tuple[int, str] | None
) -> DeadLetterStatus | None:
    total = manifest.source.dead_letters if manifest.source else None
    return DeadLetterStatus(total, location, *(letter or ())) if total else None


def _lag_seconds(records: int | None, last_time: int | None, now: datetime) -> float | None:
    if records == 0:
        return 0.0
    if records is None or last_time is None:
        return None
    return max(0.0, (now - datetime.fromtimestamp(last_time / 1000, UTC)).total_seconds())


def _source_lag(
    status: TableStatus, manifest: Manifest, read: int | None, unread: int | None, now: datetime
) -> dict[str, Any]:
    """Return the lag behind the database's log; nothing if records have no positions.

    `read` and `unread` are the newest commits among the records that were read and that were not.
    """
    archived = next((a.source_range for a in reversed(manifest.artifacts) if a.source_range), None)
    commits = [lsn for lsn in (read, unread) if lsn is not None]
    if archived is None and not commits:
        return {}
    head = LSN.rank(archived.last) if archived else 0
    newest, lag = max([head, *commits]), status.lag_records
    seconds: float | None = 0.0
    if lag is None or lag:
        seconds = status.lag_seconds
    elif newest > head:
        age = now - parse_time(archived.time) if archived and archived.time else None
        seconds = None if age is None else max(0.0, age.total_seconds())
    is_known = archived is not None and lag is not None and not (lag and unread is None)
    return {
        "source_position": LSN.position(newest),
        "source_head": archived.last if archived else None,
        "source_lag_bytes": newest - head if is_known else None,
        "source_lag_seconds": seconds,
    }


def _shown(artifact: Artifact) -> ArtifactStatus:
    files = next(iter(artifact.formats.values()))
    return ArtifactStatus(
        position=artifact.to_position,
        at=artifact.created_at,
        epoch=artifact.epoch,
        size_bytes=files.size_bytes,
        rows=count_of(artifact),
        reason=artifact.rebase_reason,
    )
