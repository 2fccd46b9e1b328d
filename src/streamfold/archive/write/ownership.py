"""The right to commit to a table, and what is known to be committed.

Opening claims the table with the next fencing token: from then on no earlier writer can commit.
Before the first base no manifest exists to claim; then the first base is the claim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from streamfold.archive.destinations.destination import (
    Destination,
    Stored,
    check_compare_and_swap,
    name_destination_on_error,
)
from streamfold.archive.destinations.mirrors import Mirrors
from streamfold.archive.errors import CommitUnknownError
from streamfold.archive.manifest.model import Manifest, Writer
from streamfold.archive.manifest.positions import PositionOrder
from streamfold.archive.manifest.updates import (
    AppendArtifacts,
    ClaimTable,
    RequireHead,
    Requirement,
    RequireNoArchive,
    RequireWriter,
    Stamp,
    Update,
)
from streamfold.archive.write.commit import Commit, Committed, Conflict


class OwnedTable:
    """One writer's view of the manifest, updated only when a commit is confirmed."""

    def __init__(
        self,
        table: str,
        mirrors: Mirrors,
        writer_id: str,
        *,
        order: PositionOrder,
        now: Callable[[], datetime],
        new_id: Callable[[], str],
        former_names: Sequence[str] = (),
    ) -> None:
        self.table = table
        self._former_names = tuple(former_names)
        self.mirrors = mirrors
        self._order = order
        self._now = now
        self._new_id = new_id
        self._writer = Writer(id=writer_id, fencing_token=1, claim_id=new_id())
        self._stored: Stored | None = None
        # Set while the outcome of a commit is not known: what was adopted may be out of date.
        self._unsettled = False

    @property
    def manifest(self) -> Manifest | None:
        return self._stored.manifest if self._stored else None

    async def check_destinations(self, destinations: Sequence[Destination]) -> None:
        """Refuse storage that cannot compare and swap."""
        for destination in destinations:
            await check_compare_and_swap(destination, self._new_id())

    async def load(self) -> Manifest | None:
        """Return the newest manifest of all destinations."""
        self._adopt(await self.mirrors.open(self.table, *self._former_names))
        return self.manifest

    async def claim(self) -> None:
        """Take the table from its previous writer."""
        if self._stored is None:
            return
        claim = ClaimTable(self._writer.id, self._writer.claim_id, self.table)
        manifest = await self._commit([claim], [])
        self._writer = manifest.writer or self._writer

    async def append(self, update: AppendArtifacts) -> Manifest:
        """Commit artifacts if the head is still where they were planned."""
        if self._stored is None:
            return await self._commit([update], [RequireNoArchive(self._writer)])
        first, head = update.artifacts[0], self._stored.manifest.head_position
        following = (
            RequireHead(first.epoch, first.from_position)
            if first.from_position is not None
            else RequireHead(first.epoch - 1, head)
        )
        return await self._commit([update], [RequireWriter(self._writer), following])

    async def settle(self) -> None:
        """Establish what is committed and that the table is still ours; repair lagging destinations."""
        if self._unsettled:
            stored = await self.mirrors.primary.read(self._order)
            # A manifest that disappeared does not make a new table: the check refuses it.
            if stored or self._stored:
                RequireWriter(self._writer).check(stored.manifest if stored else None)
            self._adopt(stored)
        if self._stored and self.mirrors.lagging:
            await self.mirrors.follow(self._stored.manifest)

    async def _commit(
        self, updates: Sequence[Update], requirements: Sequence[Requirement]
    ) -> Manifest:
        stamp = Stamp(self._new_id(), self._now())
        commit = Commit(updates, requirements, stamp, self._order, self._blank())
        self._unsettled = True
        primary = self.mirrors.primary
        outcome = await commit.run(primary, self._stored)
        if isinstance(outcome, Committed):
            self._adopt(outcome.stored)
            await self.mirrors.follow(outcome.stored.manifest)
            return outcome.stored.manifest
        if isinstance(outcome, Conflict):
            raise outcome.cause
        with name_destination_on_error(primary.uri):
            raise CommitUnknownError(
                f"the commit of table {self.table!r} may or may not have taken effect "
                f"({outcome.cause.message}): its files stay, and the next call reads the manifest "
                "first"
            ) from outcome.cause

    def _adopt(self, stored: Stored | None) -> None:
        self._stored = stored
        self._unsettled = False

    def _blank(self) -> Manifest:
        """Return the manifest of a new table; it breaks the rules until a base is in it."""
        return Manifest(
            table=self.table,
            epoch=0,
            updated_at="",
            head_position="",
            artifacts=(),
            archive_id=self._writer.claim_id,
            writer=self._writer,
        )
