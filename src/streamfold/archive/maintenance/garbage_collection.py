"""Garbage collection: removes old epochs from the manifest and deletes unreachable files.

The order makes it safe. First, a commit removes an epoch from the manifest and records its files as
retired at that time. They are deleted only after they have been retired for the whole grace period,
so a reader with an earlier plan has that much time. Files that were never committed, because a
writer crashed or lost a race, are deleted once they are older than the grace period by the
storage's own clock. After an unknown outcome nothing is deleted.

In the published layout, a rewritten artifact reuses its names. There, files that were never
committed stay until a later epoch begins: from then on no writer writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from streamfold.archive.destinations.destination import (
    PROBE,
    Destination,
    StoredManifest,
    name_destination_on_error,
)
from streamfold.archive.destinations.mirrors import Mirrors
from streamfold.archive.engines.delta_log import has_delta_log, publish_delta_log
from streamfold.archive.errors import CommitUnknownError, ManifestNotFoundError
from streamfold.archive.manifest.model import PUBLISHED_LAYOUT, Manifest, Pin, order_of
from streamfold.archive.manifest.positions import PositionOrder, format_time, parse_time
from streamfold.archive.manifest.updates import (
    AddPin,
    ManifestUpdate,
    PruneEpochs,
    RemovePin,
    Stamp,
)
from streamfold.archive.write.commit import Committed, Conflict, ManifestCommit
from streamfold.blob import BlobMeta
from streamfold.errors import InvalidError

#: Much longer than a writer takes to write an artifact, or a reader to read what it planned.
DEFAULT_GRACE = timedelta(days=1)
#: Prefixes of artifacts, and of files that a crashed self-test leaves. Nothing else in the folder
#: is deleted.
COLLECTED = ("epoch=", PROBE)
_EPOCH = re.compile(r"epoch=(\d+)/")


@dataclass(frozen=True, slots=True)
class Retention:
    """Retains at least the newest `keep_epochs`, and epochs replaced less than `max_age` ago.

    With neither, every epoch is retained.
    """

    keep_epochs: int | None = None
    max_age: timedelta | None = None
    grace: timedelta = DEFAULT_GRACE

    def __post_init__(self) -> None:
        if self.keep_epochs is not None and self.keep_epochs < 1:
            raise InvalidError(f"keep_epochs is {self.keep_epochs}: at least the newest one stays")
        if self.grace < timedelta(0):
            raise InvalidError(f"grace is {self.grace}: it cannot be negative")


@dataclass(frozen=True, slots=True)
class UnreachableFile:
    """A file in one destination that no manifest entry reaches."""

    destination: str
    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Collected:
    """The results of a collection, or of its dry run."""

    epochs: tuple[int, ...]
    files: tuple[UnreachableFile, ...]
    dry_run: bool


@dataclass(frozen=True, slots=True)
class Reachable:
    """The paths that must stay in a destination."""

    paths: frozenset[str]
    #: First epoch whose names a writer may reuse, in the published layout.
    rewritten_from: int | None = None

    def may_be_rewritten(self, path: str) -> bool:
        """Return whether a writer could rewrite and commit this file while it is being deleted."""
        epoch = _EPOCH.match(path)
        return self.rewritten_from is not None and (
            epoch is not None and int(epoch[1]) >= self.rewritten_from
        )


class Collector:
    """Prunes and deletes for one archive. May run beside its writer, on any machine."""

    def __init__(
        self,
        destinations: Sequence[Destination],
        *,
        now: Callable[[], datetime],
        new_id: Callable[[], str],
        order: PositionOrder | None = None,
    ) -> None:
        self._destinations = tuple(destinations)
        self._primary = self._destinations[0]
        self._now = now
        self._new_id = new_id
        self._order = order

    async def pin(
        self, pin_id: str, epoch: int, lifetime: timedelta, reason: str | None = None
    ) -> Manifest:
        """Protect an epoch for `lifetime`. Every pin expires, so no dead reader holds it forever."""
        if lifetime <= timedelta(0):
            raise InvalidError(f"pin {pin_id!r} has a lifetime of {lifetime}: it must be above 0")
        now = self._now()
        pin = Pin(
            id=pin_id,
            epoch=epoch,
            created_at=format_time(now),
            expires_at=format_time(now + lifetime),
            reason=reason,
        )
        return await self._commit(await self._read(), AddPin(pin))

    async def unpin(self, pin_id: str) -> Manifest:
        """Remove a pin, which releases its epoch."""
        return await self._commit(await self._read(), RemovePin(pin_id))

    async def collect(
        self,
        retention: Retention,
        *,
        dry_run: bool = False,
        on_found: Callable[[Sequence[UnreachableFile]], None] | None = None,
        on_deleted: Callable[[UnreachableFile], None] | None = None,
    ) -> Collected:
        """Prune epochs outside `retention`, and delete files unreachable beyond the grace period.

        `on_found` is called once with all files to delete, `on_deleted` with each deleted file.
        """
        stored = await self._read()
        now = self._now()
        epochs = prunable_epochs(stored.manifest, retention, now)
        update = PruneEpochs(frozenset(epochs), forget_before=now - retention.grace)
        if not dry_run and self._changes(stored.manifest, update, now):
            await self._commit(stored, update)
        if not dry_run:
            await self._forget_in_delta_logs()
        doomed = [
            file
            for destination in self._destinations
            for file in await self._unreachable(destination, retention.grace, dry_run)
        ]
        if on_found:
            on_found(doomed)
        if not dry_run:
            await self._delete(doomed, on_deleted)
        return Collected(epochs, tuple(doomed), dry_run)

    async def _forget_in_delta_logs(self) -> None:
        """Remove pruned epochs from Delta logs. If that fails, no file is deleted.

        A log that is behind first gets its newest version, so none of its readers loses files.
        """
        for destination in self._destinations:
            if await has_delta_log(destination):
                await publish_delta_log(destination, self._order)

    def _changes(self, manifest: Manifest, update: PruneEpochs, now: datetime) -> bool:
        return update.apply(manifest, Stamp("", now)) != manifest

    async def _unreachable(
        self, destination: Destination, grace: timedelta, dry_run: bool
    ) -> list[UnreachableFile]:
        """Return the unreachable files of one destination.

        Files are listed before manifests are read, so a concurrent commit's files count as live.
        """
        with name_destination_on_error(destination.uri):
            # A dry run writes nothing, so it must trust this machine's clock.
            clock = self._now() if dry_run else await self._clock(destination)
            old = [
                meta
                for prefix in COLLECTED
                async for meta in destination.blobs.list(prefix)
                if meta.last_modified < clock - grace
            ]
        reachable = await self._reachable(destination, grace)
        if reachable is None:
            return []
        return [
            _unreachable_file(destination, meta)
            for meta in old
            if meta.key not in reachable.paths and not reachable.may_be_rewritten(meta.key)
        ]

    async def _reachable(self, destination: Destination, grace: timedelta) -> Reachable | None:
        """Return the paths that a manifest still names, or None if a manifest is missing."""
        paths: set[str] = set()
        rewritten_from: int | None = None
        for holder in {self._primary.uri: self._primary, destination.uri: destination}.values():
            stored = await holder.read(self._order)
            if stored is None:
                return None
            paths |= stored.manifest.paths()
            paths |= {
                retired.path
                for retired in stored.manifest.retired
                if parse_time(retired.at) > self._now() - grace
            }
            if stored.manifest.layout == PUBLISHED_LAYOUT:
                rewritten_from = min(stored.manifest.epoch, rewritten_from or stored.manifest.epoch)
        return Reachable(frozenset(paths), rewritten_from)

    async def _delete(
        self,
        doomed: Sequence[UnreachableFile],
        on_deleted: Callable[[UnreachableFile], None] | None,
    ) -> None:
        by_uri = {destination.uri: destination for destination in self._destinations}
        for file in doomed:
            with name_destination_on_error(file.destination):
                await by_uri[file.destination].blobs.delete(file.path)
            if on_deleted:
                on_deleted(file)

    async def _clock(self, destination: Destination) -> datetime:
        """Return the storage's own time, which is on the files. This machine's clock may be wrong."""
        key = f"{PROBE}{self._new_id()}"
        await destination.blobs.put(key, b"")
        try:
            return (await destination.blobs.head(key)).last_modified
        finally:
            await destination.blobs.delete(key)

    async def _read(self) -> StoredManifest:
        stored = await self._primary.read(self._order)
        if stored is None:
            raise ManifestNotFoundError(
                f"no archive exists at {self._primary.uri}: name the folder of a table"
            )
        return stored

    async def _commit(self, stored: StoredManifest, update: ManifestUpdate) -> Manifest:
        order = order_of(stored.manifest, self._order)
        commit = ManifestCommit([update], [], Stamp(self._new_id(), self._now()), order)
        outcome = await commit.run(self._primary, stored)
        if isinstance(outcome, Conflict):
            raise outcome.cause
        if not isinstance(outcome, Committed):
            raise CommitUnknownError(
                f"the commit at {self._primary.uri} may or may not have taken effect "
                f"({outcome.cause.message}): nothing was deleted; run it again"
            ) from outcome.cause
        await Mirrors(self._destinations, order).follow(outcome.stored.manifest)
        return outcome.stored.manifest


def prunable_epochs(manifest: Manifest, retention: Retention, now: datetime) -> tuple[int, ...]:
    """Return the epochs that may leave the manifest: never the newest, and never a pinned one.

    An epoch's age counts from the base that replaced it.
    """
    bases = [artifact for artifact in manifest.artifacts if artifact.is_base]
    pinned = {pin.epoch for pin in manifest.pins if parse_time(pin.expires_at) > now}
    replaced = {old.epoch: parse_time(new.created_at) for old, new in pairwise(bases)}
    if retention.keep_epochs is None and retention.max_age is None:
        return ()
    staying = {base.epoch for base in bases[-(retention.keep_epochs or 1) :]}
    if retention.max_age is not None:
        staying |= {epoch for epoch, at in replaced.items() if now - at < retention.max_age}
    return tuple(base.epoch for base in bases if base.epoch not in staying | pinned)


def _unreachable_file(destination: Destination, meta: BlobMeta) -> UnreachableFile:
    return UnreachableFile(destination.uri, meta.key, meta.size)
