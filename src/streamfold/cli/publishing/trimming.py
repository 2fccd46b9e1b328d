"""Trims the streams of `publish` to the records that its archives do not have yet.

The ingester is the only writer of its streams, so it trims them, as directed by a file. For each
stream, the file names the record after the head of the archive, because the snapshotter resumes
from its last commit. The ingester also keeps a stream's last record, from which it resumes itself.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec
from s2_sdk import S2Basin

from streamfold.archive.errors import ManifestNotFoundError
from streamfold.archive.write.layout import Layout
from streamfold.cli.archives.options import open_archive
from streamfold.cli.publishing.plan import PublicationPlan
from streamfold.errors import ConflictError
from streamfold.follow.clients.s2 import S2Client
from streamfold.snapshotter.status.table_status import TableStatus
from streamfold.wording import reason_of

logger = logging.getLogger(__name__)

#: Records of a stream that are worth a trim, which is itself a record.
_RECORDS: Final = 1000
#: Seconds after which fewer records are trimmed too, because they may be large.
_SECONDS: Final = 60.0


class TrimFile:
    """The file with the first record to keep in each stream. All earlier records are in an archive."""

    def __init__(
        self, file: Path, layout: Layout, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # A file from an earlier run may refer to another archive.
        file.unlink(missing_ok=True)
        self._file = file
        self._layout = layout
        self._clock = clock
        self._points: dict[str, int] = {}
        self._tried_at = clock()
        self._failed = False

    def update(self, statuses: Iterable[TableStatus]) -> None:
        """Write the file if the archives have progressed enough since the last time."""
        points = {
            status.stream: self._layout.seq_num(status.manifest_head) + 1
            for status in statuses
            if status.manifest_head is not None
        }
        gained = max((at - self._points.get(name, 0) for name, at in points.items()), default=0)
        waited = self._clock() - self._tried_at >= _SECONDS
        if gained > 0 and (waited or (gained >= _RECORDS and not self._failed)):
            self._replace({**self._points, **points})

    def _replace(self, points: dict[str, int]) -> None:
        self._tried_at = self._clock()
        try:
            self._write(msgspec.json.encode(points))
        except OSError as error:
            # Streams then keep growing, which does less harm than stopping the ingest.
            self._failed = True
            logger.warning(
                "streams are not trimmed, %s cannot be written and is tried again in %.0f s: %s",
                self._file, _SECONDS, reason_of(error),
            )  # fmt: skip
            return
        self._points, self._failed = points, False

    def _write(self, data: bytes) -> None:
        draft = self._file.with_suffix(".draft")
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._file)


async def check_archives_have_what_was_trimmed(plan: PublicationPlan, basin: S2Basin) -> None:
    """Raise ConflictError if a table has no archive, but its stream was trimmed."""
    for table in plan.tables:
        first = await S2Client(basin.stream(table.full_name)).peek(0, 1)
        if not first or first[0].seq_num == 0:
            continue
        location = plan.archives.options.get("path")
        folder = f"{location}/{table.full_name}" if location else plan.archives.of(table)
        try:
            await open_archive(folder)
        except ManifestNotFoundError:
            raise ConflictError(
                f"table {table.full_name} has no archive in {folder}, and its stream was trimmed to "
                "what followed an earlier archive: name that folder with --to, copy the tables again "
                "with --recopy, or publish what is left as incomplete with --on-trimmed publish"
            ) from None
