"""The archive and events of one table as the driver sees them: opened once, used from any thread.

Opening fences out the previous writer, so it happens once in a run: a writer that was fenced out
must not take the table back on its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple
from uuid import uuid4

from streamfold.archive.destinations.aws_credentials import Profiles
from streamfold.archive.destinations.destination import Destination
from streamfold.archive.engines.delta_log import publish_delta_log
from streamfold.archive.errors import CommitConflictError
from streamfold.archive.events import EventDispatcher, open_sink
from streamfold.archive.maintenance.garbage_collection import Collector
from streamfold.archive.manifest.model import (
    Artifact,
    FormatFiles,
    Manifest,
    Source,
    SourceRange,
    check_manifest,
)
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.artifacts import PartPlan, WrittenDiff, WrittenPart
from streamfold.archive.write.writer import ArchiveWriter
from streamfold.errors import StreamfoldError
from streamfold.snapshotter.spark.driver_loop import DriverLoop
from streamfold.snapshotter.spark.jobs import TableJob

logger = logging.getLogger(__name__)

#: Seconds for the events of the last commits at a stop: an orchestrator often grants 30 s in all.
LAST_EVENTS_SECONDS = 10.0


class Written(NamedTuple):
    """A diff that is durable and not committed."""

    plan: PartPlan
    parts: Sequence[WrittenPart]
    records: int
    #: Records that became dead letters.
    dead: int = 0


class WrittenBase(NamedTuple):
    """A base that is durable and not committed, with the diff that leads to it."""

    plan: PartPlan
    parts: Sequence[WrittenPart]
    reason: str
    #: Buckets of the last base whose files are reused.
    reuse: Sequence[int] = ()
    closing: Written | None = None
    #: Records of a first base that became dead letters.
    dead: int = 0


class TableArchive:
    """The committed state, and how to commit more. One caller at a time."""

    def __init__(self, job: TableJob, loop: DriverLoop) -> None:
        self._job = job
        self._loop = loop
        self._opened: list[Destination] = []
        self._writer: ArchiveWriter | None = None
        #: Returns the timestamp of a record of the stream, if it is known.
        self.timestamp_of: Callable[[int], int | None] | None = None

    @property
    def _destinations(self) -> list[Destination]:
        """Open the destinations on first use: one that fails stops only this table."""
        if not self._opened:
            self._opened = [spec.open() for spec in self._job.destination_specs]
        return self._opened

    def check(self) -> None:
        """Check that every destination answers; raises the error of the first that does not."""
        for destination in self._destinations:
            self._read(destination)

    def open(self) -> None:
        """Continue where the archive ends; without one, wait until the columns are known."""
        if self._writer is not None:
            self._loop.call(self._writer.refresh())
            return
        archived = self._archived_schema()
        schema = self._job.schema or archived
        if schema is not None:
            self.begin(schema)

    def begin(self, schema: TableSchema) -> None:
        """Open the archive with the columns known so far; later calls only add to them."""
        if self._writer is not None:
            self._writer.evolve(schema)
            return
        self._writer = self._loop.call(
            ArchiveWriter.open(
                self._job.table,
                schema,
                self._destinations,
                formats=self._job.formats,
                diff_formats=self._job.diff_formats,
                writer_id=self._job.writer_id,
                former_names=self._job.former_names,
                layout=self._job.layout,
            )
        )

    def check_owner(self) -> None:
        """Raise WriterFencedOutError if another writer has taken the table."""
        if self._writer is not None:
            self._loop.call(self._writer.check_owner())

    @property
    def primary(self) -> Destination:
        return self._destinations[0]

    @property
    def manifest(self) -> Manifest | None:
        return self._writer.manifest if self._writer else None

    @property
    def schema(self) -> TableSchema | None:
        return self._writer.schema if self._writer else None

    @property
    def head(self) -> int | None:
        """The last record in the archive."""
        return self._job.layout.seq_num(self.manifest.head_position) if self.manifest else None

    @property
    def source_range(self) -> SourceRange | None:
        """The commits of the source that the last artifact holds."""
        return self.manifest.artifacts[-1].source_range if self.manifest else None

    @property
    def lagging(self) -> dict[str, StreamfoldError]:
        return dict(self._writer.lagging) if self._writer else {}

    @property
    def writer(self) -> ArchiveWriter:
        if self._writer is None:
            raise RuntimeError(f"table {self._job.table!r} is not open")
        return self._writer

    def begin_empty(
        self, schema: TableSchema, last: int, reason: str, incomplete_before: str | None = None
    ) -> None:
        """Start the archive after record `last` with a base without rows, in one bucket."""
        self.begin(schema)
        position = self._job.layout.position(last)
        self._loop.call(
            self.writer.write_base(
                {0: []},
                position,
                reason=reason,
                source=self._source(position),
                incomplete_before=incomplete_before,
            )
        )

    def commit_diff(self, diff: Written) -> Manifest:
        source = self._source(diff.plan.to_position, diff.dead)
        return self._loop.call(
            self.writer.commit_diff(diff.plan, diff.parts, record_count=diff.records, source=source)
        )

    def commit_base(self, base: WrittenBase) -> Manifest:
        closing, dead = None, base.dead
        if base.closing is not None:
            diff = base.closing
            closing, dead = WrittenDiff(diff.plan, diff.parts, diff.records), dead + diff.dead
        return self._loop.call(
            self.writer.commit_base(
                base.plan,
                base.parts,
                reason=base.reason,
                reuse=base.reuse,
                closing=closing,
                source=self._source(base.plan.to_position, dead),
            )
        )

    def complete(self, diff: Written) -> None:
        """Copy an uncommitted diff to every destination, so that it can be folded."""
        self._loop.call(self.writer.complete(diff.parts))

    def continues_with(self, written: Written | WrittenBase) -> bool:
        """Return whether the archive still ends where this starts, and its files still exist."""
        first = written.closing if isinstance(written, WrittenBase) else written
        manifest = self.manifest
        known = (manifest.epoch, manifest.head_position) if manifest else (0, None)
        if first is not None:
            fits = known == (first.plan.epoch, first.plan.from_position)
        else:
            head = written.plan.to_position if manifest else None
            fits = known == (written.plan.epoch - 1, head)
        parts = [*written.parts, *(first.parts if first and first is not written else ())]
        return fits and self._loop.call(self.writer.holds(parts))

    def reusable(self, plan: PartPlan) -> bool:
        """Return whether the next base can reuse parts of the last."""
        base = self.manifest.base if self.manifest else None
        return (
            base is not None
            and not plan.layout.is_published
            and base.schema_id == plan.schema.id
            and all(_fits(base, form.id, form.compression) for form in plan.formats)
        )

    def publish_delta(self) -> dict[str, StreamfoldError]:
        """Bring the Delta log of each destination to what is committed there; returns failures."""
        failures: dict[str, StreamfoldError] = {}
        for destination in self._destinations if self._job.delta else ():
            try:
                self._loop.call(publish_delta_log(destination, self._job.layout.order))
            except StreamfoldError as error:
                failures[destination.uri] = error
        return failures

    def collect(self) -> None:
        """Delete what retention does not keep."""
        if self._job.retention is not None:
            collector = Collector(
                self._destinations,
                now=lambda: datetime.now(UTC),
                new_id=lambda: uuid4().hex,
                order=self._job.layout.order,
            )
            self._loop.call(collector.collect(self._job.retention))

    def _archived_schema(self) -> TableSchema | None:
        for destination in self._destinations:
            manifest = self._read(destination)
            if manifest and manifest.schema_id in manifest.schemas:
                return TableSchema.from_json(manifest.schemas[manifest.schema_id])
        return None

    def _read(self, destination: Destination) -> Manifest | None:
        """Return the manifest; refuse one whose positions are not records of a stream."""
        stored = self._loop.call(destination.read())
        if stored is None:
            return None
        manifest, layout = stored.manifest, self._job.layout
        layout.check(manifest)
        check_manifest(manifest, layout.order)
        following = str(layout.seq_num(manifest.head_position) + 1)
        known = manifest.source.offsets.values() if manifest.source else ()
        if layout.is_published and following not in known:
            raise CommitConflictError(
                f"the archive of table {manifest.table!r} in {destination.uri} was not written by a "
                f"snapshotter: its head {manifest.head_position} is not a record of stream "
                f"{self._job.stream!r}; use an empty folder"
            )
        return manifest

    @property
    def dead_letters(self) -> int:
        """Records that became dead letters since the table began."""
        source = self.manifest.source if self.manifest else None
        return (source.dead_letters or 0) if source else 0

    def _source(self, position: str, dead: int = 0) -> Source:
        name = f"{self._job.source.get('basin', '')}/{self._job.stream}"
        last = self._job.layout.seq_num(position)
        offsets = {self._job.stream: str(last + 1)}
        total = self.dead_letters + dead
        return Source(
            name=name,
            offsets=offsets,
            timestamp=self._timestamp(last),
            dead_letters=total or None,
        )

    def _timestamp(self, seq_num: int) -> int | None:
        if self.timestamp_of is None or seq_num < 0:
            return None
        try:
            return self.timestamp_of(seq_num)
        except StreamfoldError as error:
            # The commit is complete without it; only a stream that is created anew is noticed later.
            logger.debug("table %s: %s", self._job.table, error.message)
            return None


def _fits(base: Artifact, form: str, compression: str) -> bool:
    files: FormatFiles | None = base.formats.get(form)
    return files is not None and files.compression == compression


class TableEvents:
    """A dispatcher if sinks are configured, otherwise nothing."""

    def __init__(
        self, job: TableJob, loop: DriverLoop, last_events: float = LAST_EVENTS_SECONDS
    ) -> None:
        """`last_events`: the most seconds that a stop waits for sinks."""
        self._job = job
        self._last_events = last_events
        self._loop = loop
        self._dispatcher: EventDispatcher | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, destination: Destination) -> None:
        """Send events for what the primary destination commits, from now on."""
        if self._dispatcher is None and self._job.events:
            profiles = Profiles(self._job.credentials)
            sinks = {
                name: open_sink(dict(raw), profiles, path=f"events.{name}")
                for name, raw in self._job.events.items()
            }
            self._dispatcher = EventDispatcher(destination, sinks, order=self._job.layout.order)
        if self._dispatcher is not None and self._task is None:
            self._task = self._loop.start(self._dispatcher.run(), "events")

    def wake(self) -> None:
        """Wake the dispatcher after a commit."""
        if self._dispatcher is not None:
            self._loop.soon(self._dispatcher.wake)

    def stop(self, *, deliver: bool) -> None:
        """Stop sending, if `deliver` after sinks had some seconds for what is committed.

        The next run sends the rest.
        """
        if self._dispatcher is not None and self._task is not None:
            if deliver:
                self._loop.call(self._deliver(self._dispatcher))
            self._loop.end(self._task)
            self._task = None
            self._loop.call(self._dispatcher.close())

    async def _deliver(self, dispatcher: EventDispatcher) -> None:
        try:
            async with asyncio.timeout(self._last_events):
                await dispatcher.settle()
        except TimeoutError:
            logger.warning(
                "table %s: some events were not delivered within %.0f s of the stop, the next run "
                "sends them: %s",
                self._job.table, self._last_events,
                ", ".join(
                    f"sink {name}: {status.last_error or 'no answer yet'}"
                    for name, status in dispatcher.status.items()
                    if status.lag or status.failures_in_row
                ) or "sinks answer slowly",
            )  # fmt: skip

    @property
    def errors(self) -> Mapping[str, int]:
        return (
            self._dispatcher.errors
            if self._dispatcher is not None
            else dict.fromkeys(self._job.events, 0)
        )
