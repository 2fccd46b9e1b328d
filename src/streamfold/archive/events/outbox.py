"""The outbox: what is still to be sent follows from the manifest and the sink's position.

Nothing is queued. What was committed can be derived again for as long as it is live, so no crash
between a commit and its events loses one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec

from streamfold.archive.events.event import Event, describe
from streamfold.archive.manifest.model import Artifact, Manifest


class SinkPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The artifact whose event was delivered last."""

    archive_id: str | None
    commit_id: str | None
    kind: str
    epoch: int
    from_position: str | None
    to_position: str


class DueArtifact(msgspec.Struct, frozen=True):
    """An artifact to announce, and whether something before it is missing."""

    artifact: Artifact
    gap: bool


def position_of(manifest: Manifest, artifact: Artifact) -> SinkPosition:
    """Return the position of a sink that has the event of this artifact."""
    return SinkPosition(
        archive_id=manifest.archive_id,
        commit_id=artifact.commit_id,
        kind=artifact.kind,
        epoch=artifact.epoch,
        from_position=artifact.from_position,
        to_position=artifact.to_position,
    )


def find_due(manifest: Manifest, position: SinkPosition | None) -> list[DueArtifact]:
    """Return what is to be announced after `position`, in order; everything live after None.

    If the artifacts that followed `position` are no longer live, announcing begins at the newest base,
    which is marked as a gap.
    """
    artifacts = manifest.artifacts
    if position is None:
        return [DueArtifact(artifacts[0], False), *_linked(artifacts)]
    for index in range(len(artifacts) - 1, -1, -1):
        if position_of(manifest, artifacts[index]) == position:
            return list(_linked(artifacts[index:]))
    return _find_due_after_pruning(manifest, position)


def events_of(manifest: Manifest, due: list[DueArtifact], manifest_uri: str) -> Iterator[Event]:
    """Yield the events one by one: a long backlog takes no memory beyond the manifest's."""
    for item in due:
        yield describe(manifest, item.artifact, manifest_uri, gap=item.gap)


def _find_due_after_pruning(manifest: Manifest, position: SinkPosition) -> list[DueArtifact]:
    later = tuple(a for a in manifest.artifacts if a.epoch > position.epoch)
    same_archive = manifest.archive_id == position.archive_id
    # The last diff of an epoch ends where the next base is: nothing is missing between the two.
    if same_archive and later and later[0].to_position == position.to_position:
        return [DueArtifact(later[0], False), *_linked(later)]
    newest = manifest.artifacts.index(manifest.base)
    return [DueArtifact(manifest.base, True), *_linked(manifest.artifacts[newest:])]


def _linked(artifacts: tuple[Artifact, ...]) -> Iterator[DueArtifact]:
    """Yield all but the first; a base that does not begin where the one before ends has a gap."""
    for before, after in pairwise(artifacts):
        yield DueArtifact(after, after.is_base and after.to_position != before.to_position)
