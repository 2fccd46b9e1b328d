"""Log lines for operators: one per commit, and the progress through a backlog."""

from __future__ import annotations

import logging

from streamfold.archive.manifest.model import Artifact, Manifest
from streamfold.archive.read.decoding import count_of

logger = logging.getLogger(__name__)

#: Reason of a diff without a base.
INTERVAL = "interval"
#: Reason of a diff that was committed together with its base.
CLOSING = "closing"


class CommitLog:
    """Logs the commits of one table."""

    def __init__(self, table: str) -> None:
        self._table = table
        #: Where the query started, and the stream's tail at that time.
        self._start = self._tail = 0

    def follows(self, stream: str, start: int, tail: int) -> None:
        """Log that the query starts at `start`; the records before `tail` are the backlog."""
        self._start, self._tail = start, max(start, tail)
        logger.info(
            "table %s: follows stream %s from record %d on, %d records behind",
            self._table, stream, start, self._tail - start,
        )  # fmt: skip

    def committed(self, before: Manifest | None, after: Manifest | None, seconds: float) -> None:
        """Log each artifact that was committed between two manifests."""
        if after is None or after is before:
            return
        known = {_identity(artifact) for artifact in before.artifacts} if before else set()
        fresh = [a for a in after.artifacts if _identity(a) not in known]
        based = any(artifact.is_base for artifact in fresh)
        for artifact in fresh:
            logger.info(
                "table %s: committed %s", self._table, commit_line(artifact, based, seconds)
            )

    def took(self, last: int, rate: float) -> None:
        """Log that a batch up to the record `last` was taken in, at `rate` records per second."""
        done, backlog = last + 1 - self._start, self._tail - self._start
        if not 0 < done < backlog:
            return
        left = f", about {(backlog - done) / rate:.0f} s left" if rate > 0 else ""
        logger.info(
            "table %s: %d of %d records of the backlog taken in (%.0f %%), %.0f records/s%s",
            self._table, done, backlog, 100 * done / backlog, rate, left,
        )  # fmt: skip


def commit_line(artifact: Artifact, with_base: bool, seconds: float) -> str:
    """Format kind, range, rows, bytes, seconds and reason of one commit."""
    if artifact.is_base:
        kind, extent = "base", f"at {artifact.to_position}"
        reason = artifact.rebase_reason or "unknown"
    else:
        kind, extent = "diff", f"({artifact.from_position}, {artifact.to_position}]"
        reason = CLOSING if with_base else INTERVAL
    size = sum(files.size_bytes for files in artifact.formats.values())
    return (
        f"{kind} {extent} of epoch {artifact.epoch}: {count_of(artifact)} rows, {size} bytes, "
        f"{seconds:.2f} s, reason {reason}"
    )


def _identity(artifact: Artifact) -> tuple[object, ...]:
    return artifact.kind, artifact.epoch, artifact.to_position
