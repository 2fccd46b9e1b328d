"""Whether two manifests of a table are versions of one archive, and which of them is the later one.

Writers of ours number their commits, and give each an id. Manifests of other writers have neither;
of those one is a version of the other when the artifacts that both could hold are the same.
"""

from __future__ import annotations

from streamfold.archive.manifest.model import Artifact, Manifest
from streamfold.archive.manifest.positions import PositionOrder


def age(manifest: Manifest, order: PositionOrder) -> tuple[int, object]:
    """Return a value that grows with the version; without commit numbers the head decides."""
    return manifest.commit_number, order.rank(manifest.head_position)


def are_versions(one: Manifest, other: Manifest, order: PositionOrder) -> bool:
    """Return whether both are versions of one archive."""
    if len({one.archive_id, other.archive_id} - {None}) > 1:
        return False
    if one.commit_id and other.commit_id:
        return one.commit_number != other.commit_number or one.commit_id == other.commit_id
    older, newer = sorted((one, other), key=lambda manifest: age(manifest, order))
    return _continues(older, newer, order)


def _continues(older: Manifest, newer: Manifest, order: PositionOrder) -> bool:
    """Return whether `newer` has all artifacts of `older` that it could not have pruned."""
    kept = {_identity(artifact) for artifact in newer.artifacts}
    first = newer.artifacts[0]
    begins = order.rank(first.to_position)
    return all(
        _identity(a) in kept or (a.epoch <= first.epoch and order.rank(a.to_position) < begins)
        for a in older.artifacts
    )


def _identity(artifact: Artifact) -> tuple[object, ...]:
    """Return what two artifacts share only if one is a copy of the other."""
    return (
        artifact.kind,
        artifact.epoch,
        artifact.from_position,
        artifact.to_position,
        artifact.created_at,
        artifact.row_count or artifact.change_count or 0,
        tuple(sorted((name, files.size_bytes) for name, files in artifact.formats.items())),
    )
