"""The commit: one compare-and-swap of the manifest, with three unambiguous outcomes.

A lost response looks like a conflict, and a conflict like a lost response. So every commit has an
id, which goes into the manifest and into the artifacts that it adds. After anything but a plain
success, reading the manifest back decides. Repeating the swap is then safe: of two requests with
the same etag, storage lets one win, and both carry the same commit.

`OwnedTable` is the right to commit. Opening it claims the table with the next fencing token, after
which no earlier writer can commit. Before the first base there is no manifest to claim, so the
first base is the claim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from streamfold.archive.destinations.destination import (
    SWAP_REFUSED,
    Destination,
    StoredManifest,
    check_compare_and_swap,
    name_destination_on_error,
)
from streamfold.archive.destinations.mirrors import Mirrors
from streamfold.archive.errors import (
    CommitConflictError,
    CommitUnknownError,
    ManifestNotFoundError,
    WriterFencedOutError,
)
from streamfold.archive.manifest.model import Manifest, Writer
from streamfold.archive.manifest.positions import PositionOrder
from streamfold.archive.manifest.updates import (
    AppendArtifacts,
    ClaimTable,
    ManifestUpdate,
    RequireHead,
    Requirement,
    RequireNoArchive,
    RequireWriter,
    Stamp,
    apply_updates,
)
from streamfold.errors import (
    ConflictError,
    OutcomeUnknownError,
    StreamfoldError,
)
from streamfold.tracing import span

#: Swaps to try before giving up a commit. Only pins and pruning compete with a table's one writer,
#: so more conflicts than this mean that something else is wrong.
SWAP_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class Committed:
    """The commit is in the manifest, which is now `stored`."""

    stored: StoredManifest


@dataclass(frozen=True, slots=True)
class Conflict:
    """The commit is not in the manifest and never will be. `current` is the manifest found instead."""

    current: StoredManifest | None
    cause: StreamfoldError


@dataclass(frozen=True, slots=True)
class Unknown:
    """The commit may have taken effect, or still may. Nothing that it names may be deleted."""

    cause: StreamfoldError


Outcome = Committed | Conflict | Unknown


@dataclass(frozen=True, slots=True)
class ManifestCommit:
    """Updates committed together, and their requirements. A new table starts from `blank`."""

    updates: Sequence[ManifestUpdate]
    requirements: Sequence[Requirement]
    stamp: Stamp
    order: PositionOrder
    blank: Manifest | None = None

    async def run(self, destination: Destination, current: StoredManifest | None) -> Outcome:
        """Swap the manifest of `destination`, starting from `current`, until an outcome is known.

        Raises only for definite failures: an update that breaks a rule, or storage that no attempt
        reached.
        """
        unknown: StreamfoldError | None = None
        cause: StreamfoldError = CommitConflictError("no swap was tried")
        for _ in range(SWAP_ATTEMPTS):
            if refusal := self._refusal(current):
                return Conflict(current, refusal)
            manifest = self._build(current)
            try:
                return Committed(await destination.swap(manifest, current))
            except SWAP_REFUSED as error:
                cause = error
            except OutcomeUnknownError as error:
                unknown = error
            except StreamfoldError:
                if unknown is None:
                    raise
            try:
                current = await destination.read(self.order)
            except StreamfoldError as error:
                if unknown is None:
                    raise
                return Unknown(error)
            if current and self._is_in(current.manifest):
                return Committed(current)
        if unknown:
            return Unknown(unknown)
        return Conflict(current, cause)

    def _refusal(self, current: StoredManifest | None) -> StreamfoldError | None:
        manifest = current.manifest if current else None
        try:
            for requirement in self.requirements:
                requirement.check(manifest)
        except (ConflictError, WriterFencedOutError) as error:
            return error
        return None

    def _build(self, current: StoredManifest | None) -> Manifest:
        start = current.manifest if current else self.blank
        if start is None:
            raise ManifestNotFoundError("the table has no manifest to change: write a base first")
        return apply_updates(start, self.updates, self.stamp, self.order)

    def _is_in(self, manifest: Manifest) -> bool:
        commit_id = self.stamp.commit_id
        return commit_id == manifest.commit_id or any(
            artifact.commit_id == commit_id for artifact in manifest.artifacts
        )


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
        layout: str | None = None,
    ) -> None:
        self.table = table
        self._layout = layout
        self._former_names = tuple(former_names)
        self.mirrors = mirrors
        self._order = order
        self._now = now
        self._new_id = new_id
        self._writer = Writer(id=writer_id, fencing_token=1, claim_id=new_id())
        self._stored: StoredManifest | None = None
        # Set while the outcome of a commit is unknown: the adopted manifest may be out of date.
        self._unsettled = False

    @property
    def manifest(self) -> Manifest | None:
        return self._stored.manifest if self._stored else None

    async def check_destinations(self, destinations: Sequence[Destination]) -> None:
        """Reject storage that cannot compare and swap."""
        for destination in destinations:
            await check_compare_and_swap(destination, self._new_id())

    async def load(self) -> Manifest | None:
        """Return the newest manifest of all destinations."""
        self._adopt(await self.mirrors.open(self.table, *self._former_names))
        return self.manifest

    async def claim(self) -> None:
        """Take over the table from its previous writer."""
        if self._stored is None:
            return
        claim = ClaimTable(self._writer.id, self._writer.claim_id, self.table, self._layout)
        manifest = await self._commit([claim], [])
        self._writer = manifest.writer or self._writer

    async def append(self, update: AppendArtifacts) -> Manifest:
        """Commit artifacts if the head has not moved since they were planned."""
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
        """Reread the manifest and check ownership after a failed commit.

        Also repairs lagging destinations.
        """
        if self._unsettled:
            await self._read()
        if self._stored and self.mirrors.lagging:
            await self.mirrors.follow(self._stored.manifest)

    async def check_owner(self) -> None:
        """Raise WriterFencedOutError if another writer has taken the table.

        While the adopted manifest is current, this costs one request that does not transfer it.
        """
        adopted = self._stored.etag if self._stored else None
        if self._unsettled or await self.mirrors.primary.manifest_etag() != adopted:
            await self._read()

    async def _read(self) -> None:
        """Adopt the committed manifest. Raises if another writer owns it."""
        stored = await self.mirrors.primary.read(self._order)
        # A missing manifest does not mean a new table: the check rejects it.
        if stored or self._stored:
            RequireWriter(self._writer).check(stored.manifest if stored else None)
        self._adopt(stored)

    async def _commit(
        self, updates: Sequence[ManifestUpdate], requirements: Sequence[Requirement]
    ) -> Manifest:
        with span("commit table", **{"streamfold.table": self.table}):
            return await self._commit_manifest(updates, requirements)

    async def _commit_manifest(
        self, updates: Sequence[ManifestUpdate], requirements: Sequence[Requirement]
    ) -> Manifest:
        stamp = Stamp(self._new_id(), self._now())
        commit = ManifestCommit(updates, requirements, stamp, self._order, self._blank())
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

    def _adopt(self, stored: StoredManifest | None) -> None:
        self._stored = stored
        self._unsettled = False

    def _blank(self) -> Manifest:
        """Return the manifest of a new table. It breaks the rules until it has a base."""
        return Manifest(
            table=self.table,
            epoch=0,
            updated_at="",
            head_position="",
            artifacts=(),
            layout=self._layout,
            archive_id=self._writer.claim_id,
            writer=self._writer,
        )
