"""The archive of one table on the driver: commits what tasks wrote, and knows when a base is due.

Opening fences out the previous writer, so it happens once per run: a writer that was fenced out must
not take the table back on its own. Files are durable before the manifest names them. Written files that
could not be committed are remembered, and `resume` commits them: retries during an outage write no file
twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeAlias
from uuid import uuid4

import msgspec

from streamfold.archive.destinations.destination import Destination
from streamfold.archive.engines.delta_log import publish_delta_log
from streamfold.archive.errors import CommitConflictError
from streamfold.archive.maintenance.garbage_collection import Collector, Retention
from streamfold.archive.manifest.model import Manifest, Source, check_manifest
from streamfold.archive.read.layers import Layer, Stack
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.artifacts import PartPlan, WrittenDiff, WrittenPart
from streamfold.archive.write.thresholds import Action, Pending, chain_state, decide, is_overdue
from streamfold.archive.write.writer import ArchiveWriter
from streamfold.errors import StreamfoldError
from streamfold.snapshotter.spark.table_job import TableJob
from streamfold.snapshotter.spark.tasks.fold import FoldStep
from streamfold.snapshotter.spark.tasks.intake import BaseParts, Batch, Intake, buckets_for

#: Folds buckets into the parts of a base.
Fold: TypeAlias = Callable[[FoldStep], Awaitable[list[WrittenPart]]]


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Uncommitted:
    """Durable files that are not committed yet, and what remains to be done."""

    written: WrittenDiff | BaseParts
    #: The records taken in with it; None for a base of what is already committed.
    batch: Batch | None
    #: When the first of the files were written.
    written_at: datetime
    #: Reason of a base to write instead of this diff.
    force: str | None = None


class TableArchive:
    """The committed state of one table; one caller at a time, on one loop."""

    def __init__(self, job: TableJob, now: Callable[[], datetime] = utc_now) -> None:
        self._job = job
        self._now = now
        self._opened: list[Destination] = []
        self._writer: ArchiveWriter | None = None
        self._uncommitted: Uncommitted | None = None

    async def _destinations(self) -> list[Destination]:
        """Open the destinations on first use: one that fails stops only this table.

        In a thread: a hanging disk must not block the loop of all tables.
        """
        if not self._opened:
            specs = self._job.destination_specs
            self._opened = await asyncio.to_thread(lambda: [spec.open() for spec in specs])
        return self._opened

    async def check(self) -> None:
        """Raise the error of the first destination that does not answer."""
        for destination in await self._destinations():
            await self._read(destination)

    async def open(self) -> None:
        """Continue where the archive ends, and fence out its previous writer, once."""
        if self._writer is not None:
            await self._writer.refresh()
            return
        keys = TableSchema.of_keys(self._job.decoder.key_fields)
        archived = await self._archived_schema()
        self._writer = await ArchiveWriter.open(
            self._job.table,
            self._job.schema or archived or keys,
            await self._destinations(),
            formats=self._job.formats,
            diff_formats=self._job.diff_formats,
            writer_id=self._job.writer_id,
            former_names=self._job.former_names,
            layout=self._job.layout,
        )

    @property
    def primary(self) -> Destination:
        """The first destination of an open archive."""
        return self._opened[0]

    @property
    def writer(self) -> ArchiveWriter:
        if self._writer is None:
            raise RuntimeError(f"table {self._job.table!r} is not open")
        return self._writer

    @property
    def manifest(self) -> Manifest | None:
        return self._writer.manifest if self._writer else None

    @property
    def _committed(self) -> Manifest:
        """The manifest of an archive that has a base."""
        manifest = self.writer.manifest
        assert manifest is not None  # noqa: S101 - callers know that a base exists
        return manifest

    @property
    def epoch(self) -> int:
        return self.manifest.epoch if self.manifest else 0

    @property
    def head(self) -> int | None:
        """The last record in the archive."""
        return self._job.layout.seq_num(self.manifest.head_position) if self.manifest else None

    @property
    def lagging(self) -> dict[str, StreamfoldError]:
        return dict(self._writer.lagging) if self._writer else {}

    async def begin_empty(
        self, last: int, reason: str, incomplete_before: str | None, timestamp: int | None
    ) -> None:
        """Start the archive after record `last` with a base without rows, in one bucket."""
        position = self._job.layout.position(last)
        await self.writer.write_base(
            {0: []},
            position,
            reason=reason,
            source=self._source(position, timestamp),
            incomplete_before=incomplete_before,
        )

    async def commit(self, intake: Intake, fold: Fold, force: str | None = None) -> None:
        """Commit what was written of a batch: as a diff, or with the base that is due instead.

        `force` is the reason of a base to write whatever the thresholds say.
        """
        if intake.schema is not None:
            self.writer.evolve(intake.schema)
        if intake.written is not None:
            written_at = self._now() - timedelta(seconds=intake.seconds)
            await self._commit(Uncommitted(intake.written, intake.batch, written_at, force), fold)

    async def resume(self, fold: Fold) -> Batch | None:
        """Commit what an earlier attempt has written, if the archive still ends where that starts.

        Returns the records that it takes in; None without any.
        """
        left = self._uncommitted
        if left is None:
            return None
        # Collection may already delete files older than the grace: write them again.
        grace = (self._job.retention or Retention()).grace
        is_old = self._now() - left.written_at > grace / 2
        if is_old or not await self._continues_with(left.written):
            self._uncommitted = None
            return None
        await self._commit(left, fold)
        return left.batch

    def due(self) -> str | None:
        """Return the reason of a base that is due without changes; None if none is."""
        manifest = self.manifest
        if manifest is None or not is_overdue(self._job.thresholds, manifest, self._now()):
            return None
        return "max_interval"

    async def rebase(self, reason: str, fold: Fold) -> None:
        """Fold the archive into a new base; buckets without a change keep their files if possible."""
        await self._rebase(reason, None, None, self._now(), fold)

    async def publish_delta(self) -> dict[str, StreamfoldError]:
        """Bring the Delta log of each destination up to date; returns failures."""
        failures: dict[str, StreamfoldError] = {}
        for destination in self._opened if self._job.delta else ():
            try:
                await publish_delta_log(destination, self._job.layout.order)
            except StreamfoldError as error:
                failures[destination.uri] = error
        return failures

    async def collect(self) -> None:
        """Delete what retention does not keep."""
        if self._job.retention is not None:
            order = self._job.layout.order
            collector = Collector(
                self._opened, now=utc_now, new_id=lambda: uuid4().hex, order=order
            )
            await collector.collect(self._job.retention)

    async def _commit(self, left: Uncommitted, fold: Fold) -> None:
        """Commit what is written, and remember it for another attempt until that succeeds."""
        self._uncommitted = left
        written, batch = left.written, left.batch
        source = self._source_after(written.plan.to_position, batch)
        if isinstance(written, BaseParts):
            await self.writer.commit_base(
                written.plan,
                written.parts,
                reason=written.reason,
                reuse=written.reuse,
                closing=written.closing,
                source=source,
            )
        elif reason := left.force or self._base_after(written.parts):
            await self._rebase(reason, written, batch, left.written_at, fold)
        else:
            await self.writer.commit_diff(
                written.plan, written.parts, record_count=written.record_count, source=source
            )
        self._uncommitted = None

    def _base_after(self, parts: Sequence[WrittenPart]) -> str | None:
        """Return the reason of the base that thresholds demand instead of a diff."""
        manifest, files = self._committed, [next(iter(part.files.values())) for part in parts]
        pending = Pending(
            changes=sum(file.rows or 0 for file in files),
            size_bytes=sum(file.size_bytes for file in files),
            table_rows=manifest.base.row_count or 0,
        )
        decision = decide(self._job.thresholds, chain_state(manifest, self._now()), pending)
        return decision.trigger if decision.action is Action.BASE else None

    async def _rebase(
        self,
        reason: str,
        closing: WrittenDiff | None,
        batch: Batch | None,
        written_at: datetime,
        fold: Fold,
    ) -> None:
        """Fold the archive and its closing diff into a new base, and commit both."""
        manifest = self._committed
        stack = Stack.of(manifest)
        to_position = closing.plan.to_position if closing else manifest.head_position
        if closing is not None:
            await self.writer.complete(closing.parts)
            stack = stack.with_diff(Layer.pending(closing.plan, closing.parts))
        last = closing.plan.source_range if closing else manifest.artifacts[-1].source_range
        incomplete = (closing.plan if closing else manifest).incomplete_before
        plan = self.writer.plan_base(to_position, last.of_base() if last else None, incomplete)
        # As many buckets as now, or more if the table has grown.
        files = manifest.base.formats.get(self._job.formats[0].id)
        count = buckets_for(self._job, files.size_bytes if files else 0, stack.buckets)
        everything = set(range(stack.buckets))
        keeps = count == stack.buckets and stack.is_bucketed and self._is_reusable(plan)
        touched = stack.touched() if keeps else everything
        step = FoldStep(stack, plan, self._job.destination_specs, tuple(sorted(touched)), count)
        base = BaseParts(plan, await fold(step), reason, sorted(everything - touched), closing)
        await self._commit(Uncommitted(base, batch, written_at), fold)

    async def _continues_with(self, written: WrittenDiff | BaseParts) -> bool:
        """Return whether the archive still ends where this starts, and its files still exist."""
        first = written.closing if isinstance(written, BaseParts) else written
        manifest = self.manifest
        end = (manifest.epoch, manifest.head_position) if manifest else (0, None)
        if first is not None:
            fits = end == (first.plan.epoch, first.plan.from_position)
        else:
            head = written.plan.to_position if manifest else None
            fits = end == (written.plan.epoch - 1, head)
        parts = [*written.parts, *(first.parts if first and first is not written else ())]
        return fits and await self.writer.holds(parts)

    def _is_reusable(self, plan: PartPlan) -> bool:
        """Return whether the next base can reuse parts of the last."""
        base = self._committed.base
        if plan.layout.is_published or base.schema_id != plan.schema.id:
            return False
        files = [(base.formats.get(form.id), form.compression) for form in plan.formats]
        return all(f is not None and f.compression == compression for f, compression in files)

    async def _archived_schema(self) -> TableSchema | None:
        for destination in await self._destinations():
            manifest = await self._read(destination)
            if manifest and manifest.schema_id in manifest.schemas:
                return TableSchema.from_json(manifest.schemas[manifest.schema_id])
        return None

    async def _read(self, destination: Destination) -> Manifest | None:
        """Return the manifest; refuse one whose positions are not records of a stream."""
        stored = await destination.read()
        if stored is None:
            return None
        manifest, layout = stored.manifest, self._job.layout
        layout.check(manifest)
        check_manifest(manifest, layout.order)
        following = str(layout.seq_num(manifest.head_position) + 1)
        offsets = manifest.source.offsets.values() if manifest.source else ()
        if layout.is_published and following not in offsets:
            raise CommitConflictError(
                f"the archive of table {manifest.table!r} in {destination.uri} was not written by a "
                f"snapshotter: its head {manifest.head_position} is not a record of stream "
                f"{self._job.stream!r}; use an empty folder"
            )
        return manifest

    def _source_after(self, position: str, batch: Batch | None) -> Source:
        """Return the source of a commit: after a batch, or where it was without one."""
        if batch is not None:
            return self._source(position, batch.last_timestamp, batch.dead)
        before = self._committed.source
        return self._source(position, before.timestamp if before else None)

    def _source(self, position: str, timestamp: int | None, dead: int = 0) -> Source:
        """Return the source at a position; `dead` counts new dead letters."""
        before = self.manifest.source if self.manifest else None
        return Source(
            name=f"{self._job.source.get('basin', '')}/{self._job.stream}",
            offsets={self._job.stream: str(self._job.layout.seq_num(position) + 1)},
            timestamp=timestamp,
            dead_letters=((before.dead_letters or 0) if before else 0) + dead or None,
        )


def without_chain(manifest: Manifest) -> Manifest:
    """Return the manifest with its base and its last artifact alone, small enough for every plan."""
    base, last = manifest.base, manifest.artifacts[-1]
    return msgspec.structs.replace(manifest, artifacts=(base,) if last is base else (base, last))
