"""Several destinations of one archive: the first one decides, the others follow.

Every destination has all files before any manifest names them. The manifest is swapped in the first
destination, which is the commit, and then brought forward in the others. A destination that does
not respond at that point is *lagging*: its readers see an older, complete table. It is repaired
once it responds again: missing files are copied, then its manifest is brought forward. No manifest
ever goes back.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Collection, Sequence
from functools import partial

from streamfold.archive.destinations.destination import (
    SWAP_REFUSED,
    Destination,
    Pieces,
    StoredManifest,
    finish_all,
)
from streamfold.archive.errors import ArtifactCorruptError, CommitConflictError
from streamfold.archive.manifest.model import Manifest, Part, age, are_versions
from streamfold.archive.manifest.positions import PositionOrder
from streamfold.errors import InvalidError, StreamfoldError


class Mirrors:
    """The destinations of one table, and the last known manifest of each."""

    def __init__(self, destinations: Sequence[Destination], order: PositionOrder) -> None:
        uris = [destination.uri for destination in destinations]
        if not uris or len(set(uris)) < len(uris):
            raise InvalidError(f"destinations {uris} must be at least one, each named once")
        self.primary, *self._others = destinations
        self._all = tuple(destinations)
        self._order = order
        # Manifests that this object has brought forward. All their files are known to exist.
        self._stored: dict[str, StoredManifest] = {}
        #: Destinations whose manifest is older than the first one's, by URI, with the reason.
        self.lagging: dict[str, StreamfoldError] = {}

    async def put(self, path: str, pieces: Pieces) -> frozenset[str]:
        """Store a file in every destination, and return the URIs of those that failed.

        When this returns, the file is durable in all others, which is at least one. It is not
        written again just because one of several destinations is down: `complete` copies it there.
        """
        failures: dict[str, StreamfoldError] = {}

        async def put(destination: Destination) -> None:
            try:
                await destination.put(path, pieces)
            except StreamfoldError as error:
                failures[destination.uri] = error

        await finish_all(put(destination) for destination in self._all)
        if len(failures) == len(self._all):
            raise failures[self.primary.uri]
        return frozenset(failures)

    async def complete(self, part: Part, lacking: Collection[str]) -> bool:
        """Copy a file to those destinations in `lacking` that do not have it.

        Returns True once the file is durable in all destinations, or False if none has it.
        """
        missing = [
            destination
            for destination in self._all
            if destination.uri in lacking
            and not await destination.holds(part.path, part.size_bytes)
        ]
        source = next((d for d in self._all if d not in missing), None)
        if source is None:
            return False
        await finish_all(d.put(part.path, partial(_checked, source, part)) for d in missing)
        return True

    @property
    def uris(self) -> tuple[str, ...]:
        """The URIs of all destinations, the deciding one first."""
        return tuple(destination.uri for destination in self._all)

    async def open(self, *names: str) -> StoredManifest | None:
        """Return the newest manifest of all, once the first destination has it.

        Its table must have one of these names. All destinations must respond, because one that was
        first in an earlier run may have a newer manifest than the others.
        """
        manifests = {d.uri: await self._find(d, names) for d in self._all}
        stored = [(s, d) for d in self._all if (s := manifests[d.uri])]
        if not stored:
            return None
        # `max` returns the first of equal manifests.
        newest, source = max(stored, key=lambda pair: age(pair[0].manifest, self._order))
        for other, destination in stored:
            self._check_lineage(destination, other.manifest, newest.manifest)
        if source is not self.primary:
            return await self._bring_forward(self.primary, newest.manifest, source)
        return newest

    async def follow(self, manifest: Manifest) -> None:
        """Bring the other destinations forward to the committed manifest, or note them as lagging.

        Never raises for them: the table is committed, and the commit must not appear to have
        failed.
        """
        await finish_all(self._follow(other, manifest) for other in self._others)

    async def _follow(self, other: Destination, manifest: Manifest) -> None:
        try:
            try:
                await self._bring_forward(other, manifest, self.primary)
            except SWAP_REFUSED:  # garbage collection may have brought it forward: read it again
                self._stored.pop(other.uri, None)
                await self._bring_forward(other, manifest, self.primary)
        except StreamfoldError as error:
            self._stored.pop(other.uri, None)
            self.lagging[other.uri] = error
        else:
            self.lagging.pop(other.uri, None)

    async def _find(self, destination: Destination, names: Sequence[str]) -> StoredManifest | None:
        stored = await destination.read(self._order)
        if stored and stored.manifest.table not in names:
            raise CommitConflictError(
                f"destination {destination.uri} holds table {stored.manifest.table!r}, not "
                f"{names[0]!r}: give each table a folder of its own"
            )
        return stored

    async def _bring_forward(
        self, target: Destination, manifest: Manifest, source: Destination
    ) -> StoredManifest:
        swapped = self._stored.get(target.uri)
        current = swapped or await target.read(self._order)
        if current:
            self._check_lineage(target, current.manifest, manifest)
            # It has this or a later commit: another process was faster.
            if age(current.manifest, self._order) >= age(manifest, self._order):
                return current
        if not swapped:
            await self._copy_missing(target, current, manifest, source)
        stored = await target.swap(manifest, current)
        self._stored[target.uri] = stored
        return stored

    def _check_lineage(self, target: Destination, stored: Manifest, manifest: Manifest) -> None:
        if not are_versions(stored, manifest, self._order):
            raise CommitConflictError(
                f"destination {target.uri} holds another archive of table {manifest.table!r}, not "
                "a copy of this one: use a folder of its own for each, or empty that one"
            )

    async def _copy_missing(
        self,
        target: Destination,
        current: StoredManifest | None,
        manifest: Manifest,
        source: Destination,
    ) -> None:
        there = current.manifest.paths() if current else set()
        missing = (part for part in manifest.parts() if part.path not in there)
        for part in missing:
            if not await target.holds(part.path, part.size_bytes):
                await target.put(part.path, partial(_checked, source, part))


async def _checked(source: Destination, part: Part) -> AsyncIterator[bytes]:
    """Yield a file. Raises before its end if the bytes are not the committed ones."""
    digest, size = hashlib.sha256(), 0
    async for piece in source.stream(part.path):
        digest.update(piece)
        size += len(piece)
        yield piece
    if size != part.size_bytes or part.sha256 not in (None, digest.hexdigest()):
        raise ArtifactCorruptError(
            f"file {part.path!r} in {source.uri} is not what was committed: restore it there"
        )
