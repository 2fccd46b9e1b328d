"""A table's only archive writer: bases, diffs and re-bases, each in one commit.

Data passed to a call is safe once the call returns, and not before. A call that raises may be
repeated with the same positions, even by another process. It never commits half of its data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from streamfold.archive.destinations.destination import Destination, finish_all
from streamfold.archive.destinations.mirrors import Mirrors
from streamfold.archive.errors import (
    ArtifactCorruptError,
    ChainGapError,
    ManifestInvalidError,
    PositionInvalidError,
)
from streamfold.archive.formats.format import Format
from streamfold.archive.manifest.model import Artifact, Manifest, Source, SourceRange
from streamfold.archive.manifest.positions import PositionOrder, format_time
from streamfold.archive.manifest.updates import AppendArtifacts
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.artifacts import (
    Batches,
    PartPlan,
    WrittenDiff,
    WrittenPart,
    build_artifact,
    reused_parts,
    table_shape,
    write_part,
)
from streamfold.archive.write.commit import OwnedTable
from streamfold.archive.write.layout import STREAMFOLD, Layout
from streamfold.errors import InvalidError, StreamfoldError

#: Rows of a base, all together or by key bucket.
Rows = Batches | Mapping[int, Batches]

#: Reason for a base before which changes are missing, so followers must load it.
GAP = "gap"
#: Files to check or copy together: enough to hide an object store's round trips.
FILES_AT_ONCE = 16


def _now() -> datetime:
    return datetime.now(UTC)


def _new_id() -> str:
    return uuid4().hex


class ArchiveWriter:
    """Publishes one table. `open` takes over the table from its previous writer.

    Allows one call at a time. After `WriterFencedOutError`, every further call fails the same way.
    After any other error, the next call first reads the manifest and continues from its head.
    """

    def __init__(
        self,
        owned: OwnedTable,
        schema: TableSchema,
        *,
        formats: Sequence[Format],
        diff_formats: Sequence[Format],
        order: PositionOrder,
        now: Callable[[], datetime],
        new_id: Callable[[], str],
        spool: Path | None,
        layout: Layout,
    ) -> None:
        self._owned = owned
        self._schema = schema
        self._formats = tuple(formats)
        self._diff_formats = tuple(diff_formats)
        self._order = order
        self._now = now
        self._new_id = new_id
        self._spool = spool
        self._layout = layout

    @classmethod
    async def open(
        cls,
        table: str,
        schema: TableSchema,
        destinations: Sequence[Destination],
        *,
        formats: Sequence[Format],
        diff_formats: Sequence[Format] | None = None,
        writer_id: str,
        order: PositionOrder | None = None,
        now: Callable[[], datetime] = _now,
        new_id: Callable[[], str] = _new_id,
        spool: Path | None = None,
        former_names: Sequence[str] = (),
        layout: Layout = STREAMFOLD,
    ) -> ArchiveWriter:
        """Return the writer of `table`, which continues at the head of an existing archive.

        Renames an archive that has one of `former_names`. Positions are in the order of the layout
        unless `order` is given.

        First tests every destination for compare-and-swap, then claims the table, after which no
        earlier writer can commit. Merges the schema with the archive's. Rejects a schema that does
        not fit, and storage that ignores conditions, before anything is written to the table.
        """
        diffs = formats if diff_formats is None else diff_formats
        _check_formats(formats)
        _check_formats(diffs)
        formats, diffs = layout.formats(formats, diffs)
        order = order or layout.order
        if not table or not writer_id:
            raise InvalidError(f"table {table!r} and writer_id {writer_id!r} may not be empty")
        mirrors = Mirrors(destinations, order)
        owned = OwnedTable(
            table, mirrors, writer_id, order=order, now=now, new_id=new_id,
            former_names=former_names, layout=layout.name if layout.is_published else None,
        )  # fmt: skip
        await owned.check_destinations(destinations)
        _merged_schema(await _load(owned, layout, destinations), schema)  # rejects before the claim
        await owned.claim()
        return cls(
            owned,
            # The previous writer may have added columns before the claim.
            _merged_schema(owned.manifest, schema),
            formats=formats,
            diff_formats=diffs,
            order=order,
            now=now,
            new_id=new_id,
            spool=spool,
            layout=layout,
        )

    @property
    def manifest(self) -> Manifest | None:
        """The last committed manifest, or None before the first base."""
        return self._owned.manifest

    @property
    def head(self) -> str | None:
        """The last position that the archive covers."""
        return self.manifest.head_position if self.manifest else None

    @property
    def schema(self) -> TableSchema:
        """The schema of new artifacts."""
        return self._schema

    @property
    def lagging(self) -> Mapping[str, StreamfoldError]:
        """Destinations that lack the last commit, by URI, with reasons. The next write repairs them."""
        return dict(self._owned.mirrors.lagging)

    def evolve(self, schema: TableSchema) -> None:
        """Use the merged schema from now on. Raises and changes nothing if it does not fit."""
        self._schema = self._schema.merged(schema)

    async def write_base(
        self,
        rows: Rows,
        to_position: str,
        *,
        reason: str,
        reuse: Iterable[int] = (),
        source: Source | None = None,
        source_range: SourceRange | None = None,
        incomplete_before: str | None = None,
    ) -> Manifest:
        """Commit all `rows` of the table at `to_position`, and open an epoch.

        The manifest records `reason`. `reuse` names key buckets that have not changed since the last
        base, whose files are reused. `source` names the source of the records and how far it was read;
        `source_range` names the source commits that the rows contain.
        A base after the head needs the reason `GAP`: no diff has the changes in between, so
        followers must load the base. `rebase` commits those changes too, which saves followers
        the load. `incomplete_before` states that changes before that position, and so perhaps rows,
        are missing.
        """
        await self._owned.settle()
        if self._is_after_head(to_position) and reason != GAP:
            raise ChainGapError(
                f"a base at {to_position!r} leaves out the changes after {self.head!r}: call "
                f"rebase with them, or give the reason {GAP!r} if they are lost"
            )
        plan = self.plan_base(to_position, source_range, incomplete_before)
        return await self.commit_base(
            plan, await self._write_rows(plan, rows), reason=reason, reuse=reuse, source=source
        )

    async def rebase(
        self,
        rows: Rows,
        changes: Batches,
        to_position: str,
        *,
        reason: str,
        reuse: Iterable[int] = (),
        record_count: int | None = None,
        source: Source | None = None,
        source_range: SourceRange | None = None,
    ) -> Manifest:
        """Commit a base together with the diff from the head to it, which saves followers a reload.

        `rows` are the table's at `to_position`, and `changes` the net changes since the head; earlier
        ones are already in the archive and are not read. `record_count` is the number of stream
        records behind the changes. `reason`, `reuse`, `source` and `source_range` are those of
        `write_base`.
        """
        await self._owned.settle()
        if not self._is_after_head(to_position):
            if self.manifest and self.manifest.artifacts[-1].is_base and self.head == to_position:
                return self.manifest  # a repeated call, or nothing to fold
            return await self.write_base(
                rows,
                to_position,
                reason=reason,
                reuse=reuse,
                source=source,
                source_range=source_range and source_range.of_base(),
                incomplete_before=self.manifest.incomplete_before if self.manifest else None,
            )
        closing_plan = self.plan_diff(str(self.head), to_position, source_range)
        closing = await write_part(closing_plan, changes, self._owned.mirrors, spool=self._spool)
        plan = self.plan_base(
            to_position, source_range and source_range.of_base(), closing_plan.incomplete_before
        )
        return await self.commit_base(
            plan,
            await self._write_rows(plan, rows),
            reason=reason,
            reuse=reuse,
            closing=WrittenDiff(closing_plan, [closing], record_count),
            source=source,
        )

    async def write_diff(
        self,
        changes: Batches,
        from_position: str,
        to_position: str,
        *,
        record_count: int | None = None,
        source: Source | None = None,
        source_range: SourceRange | None = None,
    ) -> Manifest:
        """Commit the net `changes` after `from_position`, up to and including `to_position`.

        Writes nothing if the archive covers them already. `record_count` is the number of stream
        records behind the changes; `source` and `source_range` are those of `write_base`.
        """
        await self._owned.settle()
        if self._covers(from_position, to_position):
            return self._committed()
        plan = self.plan_diff(from_position, to_position, source_range)
        part = await write_part(plan, changes, self._owned.mirrors, spool=self._spool)
        return await self.commit_diff(plan, [part], record_count=record_count, source=source)

    def plan_base(
        self,
        to_position: str,
        source_range: SourceRange | None = None,
        incomplete_before: str | None = None,
    ) -> PartPlan:
        """Return the plan that all parts of a base at `to_position` share.

        `incomplete_before` is that of the artifacts from which the base is folded.
        """
        rank = self._order.rank(to_position)
        if self.head is not None and rank < self._order.rank(self.head):
            raise PositionInvalidError(
                f"a base at {to_position!r} would go back before the head {self.head!r}: positions "
                "of a table only grow; publish it under another name"
            )
        epoch = self.manifest.epoch + 1 if self.manifest else 1
        return self._plan(epoch, None, to_position, self._formats, source_range, incomplete_before)

    def plan_diff(
        self,
        from_position: str,
        to_position: str,
        source_range: SourceRange | None = None,
        *,
        empties: bool = False,
    ) -> PartPlan:
        """Return the plan that all parts of a diff share. A diff must continue exactly at the head.

        A diff that `empties` the table clears `incomplete_before`.
        """
        if self._covers(from_position, to_position) or from_position != self.head:
            raise ChainGapError(
                f"a diff of ({from_position}, {to_position}] does not continue at the head "
                f"{self.head!r}: begin there, or write a base"
            )
        manifest = self._committed()
        incomplete_before = None if empties else manifest.incomplete_before
        return self._plan(
            manifest.epoch, from_position, to_position, self._diff_formats, source_range,
            incomplete_before,
        )  # fmt: skip

    async def commit_base(
        self,
        plan: PartPlan,
        parts: Sequence[WrittenPart],
        *,
        reason: str,
        reuse: Iterable[int] = (),
        closing: WrittenDiff | None = None,
        source: Source | None = None,
    ) -> Manifest:
        """Commit base parts that were written elsewhere, from `plan_base`'s plan.

        `closing` is the diff from the head to the base, planned by `plan_diff`. A call that raises
        may be repeated with the same parts.
        """
        await self.complete([*parts, *(closing.parts if closing else ())])
        reused = reused_parts(self.manifest, plan, reuse)
        base = self._artifact(plan, [*parts, *reused], reason=reason)
        if closing is None:
            return await self._append(plan.schema, (base,), source)
        if closing.plan.schema.id != plan.schema.id:
            raise InvalidError("a base and its closing diff must have one schema: plan both again")
        diff = self._artifact(closing.plan, closing.parts, record_count=closing.record_count)
        return await self._append(plan.schema, (diff, base), source)

    async def commit_diff(
        self,
        plan: PartPlan,
        parts: Sequence[WrittenPart],
        *,
        record_count: int | None = None,
        source: Source | None = None,
    ) -> Manifest:
        """Commit diff parts that were written elsewhere, from `plan_diff`'s plan.

        A call that raises may be repeated with the same parts.
        """
        await self.complete(parts)
        diff = self._artifact(plan, parts, record_count=record_count)
        return await self._append(plan.schema, (diff,), source)

    async def complete(self, parts: Sequence[WrittenPart]) -> None:
        """Ensure that every destination has the files of these parts."""
        incomplete = [part for part in parts if part.lacking]
        if not await self._all_held([(part, part.lacking) for part in incomplete]):
            names = sorted(file.path for part in incomplete for file in part.files.values())
            raise ArtifactCorruptError(
                f"some of the files {names} are no longer in any destination: write them again"
            )

    async def holds(self, parts: Sequence[WrittenPart]) -> bool:
        """Return whether the files of previously written parts still exist.

        Files that one destination has lost are copied from another.
        """
        everywhere = self._owned.mirrors.uris
        return await self._all_held([(part, everywhere) for part in parts])

    async def _all_held(self, parts: Sequence[tuple[WrittenPart, Collection[str]]]) -> bool:
        """Copy files to destinations that lack them. Returns False if some file is in none."""
        files = [(file, lacking) for part, lacking in parts for file in part.files.values()]
        complete = self._owned.mirrors.complete
        for start in range(0, len(files), FILES_AT_ONCE):
            group = files[start : start + FILES_AT_ONCE]
            if not all(await finish_all(complete(file, lacking) for file, lacking in group)):
                return False
        return True

    async def refresh(self) -> Manifest | None:
        """Return the committed manifest, reread after a failed commit.

        Also repairs lagging destinations.
        """
        await self._owned.settle()
        return self.manifest

    async def check_owner(self) -> None:
        """Raise WriterFencedOutError if another writer has taken the table. Commits nothing."""
        await self._owned.check_owner()

    async def _write_rows(self, plan: PartPlan, rows: Rows) -> list[WrittenPart]:
        if isinstance(rows, Mapping):
            return [
                await write_part(
                    plan, batches, self._owned.mirrors, bucket=bucket, spool=self._spool
                )
                for bucket, batches in rows.items()
            ]
        return [await write_part(plan, rows, self._owned.mirrors, spool=self._spool)]

    def _plan(
        self,
        epoch: int,
        start: str | None,
        end: str,
        formats: tuple[Format, ...],
        source_range: SourceRange | None,
        incomplete_before: str | None,
    ) -> PartPlan:
        return PartPlan(
            epoch,
            start,
            end,
            attempt=self._new_id(),
            schema=self._schema,
            formats=formats,
            order=self._order,
            source_range=source_range,
            incomplete_before=incomplete_before,
            layout=self._layout,
        )

    def _artifact(
        self,
        plan: PartPlan,
        parts: Sequence[WrittenPart],
        *,
        reason: str | None = None,
        record_count: int | None = None,
    ) -> Artifact:
        created_at = format_time(self._now())
        return build_artifact(
            plan, parts, created_at=created_at, reason=reason, record_count=record_count
        )

    async def _append(
        self, schema: TableSchema, artifacts: tuple[Artifact, ...], source: Source | None
    ) -> Manifest:
        return await self._owned.append(AppendArtifacts(artifacts, table_shape(schema), source))

    def _committed(self) -> Manifest:
        if self.manifest is None:
            raise ChainGapError(f"table {self._owned.table!r} has no base yet: write one first")
        return self.manifest

    def _is_after_head(self, position: str) -> bool:
        rank = self._order.rank(position)
        return self.head is not None and rank > self._order.rank(self.head)

    def _covers(self, from_position: str, to_position: str) -> bool:
        start, end = self._order.rank(from_position), self._order.rank(to_position)
        if start >= end:
            raise PositionInvalidError(
                f"a diff of ({from_position}, {to_position}] covers nothing: it ends at the last "
                "record that is in it, which comes after the one before it"
            )
        return end <= self._order.rank(self._committed().head_position)


async def _load(
    owned: OwnedTable, layout: Layout, destinations: Sequence[Destination]
) -> Manifest | None:
    """Return the newest manifest, or reject one with another layout."""
    try:
        manifest = await owned.load()
    except ManifestInvalidError:
        # Layouts also differ in the order of positions. The layout that the manifest names explains
        # the error.
        for stored in await finish_all(destination.read() for destination in destinations):
            if stored:
                layout.check(stored.manifest)
        raise
    if manifest:
        layout.check(manifest)
    return manifest


def _check_formats(formats: Sequence[Format]) -> None:
    ids = [form.id for form in formats]
    if not ids or len(set(ids)) < len(ids):
        raise InvalidError(f"formats {ids} must be at least one, each named once")


def _merged_schema(manifest: Manifest | None, schema: TableSchema) -> TableSchema:
    newest = manifest.schemas.get(manifest.schema_id or "") if manifest else None
    return schema if newest is None else TableSchema.from_json(newest).merged(schema)
