"""The commit: one compare-and-swap of the manifest, with three outcomes that are never confused.

A lost answer looks like a conflict, and a conflict like a lost answer. So every commit has an id,
which goes into the manifest and into the artifacts that it adds; after anything but a plain success
the manifest is read back, and what it says decides. Repeating the swap is safe then: of
two requests that name the same etag storage lets one win, and both carry the same commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamfold.archive.destinations.destination import Destination, Stored
from streamfold.archive.errors import (
    CommitConflictError,
    ManifestNotFoundError,
    WriterFencedOutError,
)
from streamfold.archive.manifest.model import Manifest
from streamfold.archive.manifest.positions import PositionOrder
from streamfold.archive.manifest.updates import Requirement, Stamp, Update, apply_updates
from streamfold.blob import BlobChangedError
from streamfold.errors import (
    BlobExistsError,
    BlobNotFoundError,
    ConflictError,
    OutcomeUnknownError,
    StreamfoldError,
)

#: Swaps that are tried before a commit is given up. Only pins and pruning compete with the one
#: writer of a table, so more conflicts than this mean that something else is wrong.
SWAP_ATTEMPTS = 8
#: What storage raises when the condition of a swap did not hold.
REFUSED = (BlobChangedError, BlobExistsError, BlobNotFoundError)


@dataclass(frozen=True, slots=True)
class Committed:
    """The commit is in the manifest, which is `stored` now."""

    stored: Stored


@dataclass(frozen=True, slots=True)
class Conflict:
    """The commit is not in the manifest and never will be; `current` is the manifest instead."""

    current: Stored | None
    cause: StreamfoldError


@dataclass(frozen=True, slots=True)
class Unknown:
    """The commit may have taken effect, or may yet; nothing that it names may be deleted."""

    cause: StreamfoldError


Outcome = Committed | Conflict | Unknown


@dataclass(frozen=True, slots=True)
class Commit:
    """Updates that belong together, and what they require; `blank` is where a new table begins."""

    updates: Sequence[Update]
    requirements: Sequence[Requirement]
    stamp: Stamp
    order: PositionOrder
    blank: Manifest | None = None

    async def run(self, destination: Destination, current: Stored | None) -> Outcome:
        """Swap the manifest of `destination`, beginning at `current`, until an outcome is known.

        Raises only for definite failures: an update that breaks a rule, storage that was not
        reached by any attempt.
        """
        unknown: StreamfoldError | None = None
        cause: StreamfoldError = CommitConflictError("no swap was tried")
        for _ in range(SWAP_ATTEMPTS):
            if refusal := self._refusal(current):
                return Conflict(current, refusal)
            wanted = self._build(current)
            try:
                return Committed(await destination.swap(wanted, current))
            except REFUSED as error:
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

    def _refusal(self, current: Stored | None) -> StreamfoldError | None:
        manifest = current.manifest if current else None
        try:
            for requirement in self.requirements:
                requirement.check(manifest)
        except (ConflictError, WriterFencedOutError) as error:
            return error
        return None

    def _build(self, current: Stored | None) -> Manifest:
        start = current.manifest if current else self.blank
        if start is None:
            raise ManifestNotFoundError("the table has no manifest to change: write a base first")
        return apply_updates(start, self.updates, self.stamp, self.order)

    def _is_in(self, manifest: Manifest) -> bool:
        commit_id = self.stamp.commit_id
        return commit_id == manifest.commit_id or any(
            artifact.commit_id == commit_id for artifact in manifest.artifacts
        )
