"""Manifest updates and their requirements: plain data, applied to copies.

Updates never look at storage. `apply_updates` returns a new manifest that follows every rule, or
raises and leaves the old one unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import msgspec

from streamfold.archive.errors import ChainGapError, CommitConflictError, WriterFencedOutError
from streamfold.archive.manifest.model import (
    Artifact,
    Manifest,
    Pin,
    RetiredFile,
    Source,
    Writer,
    check_manifest,
)
from streamfold.archive.manifest.positions import PositionOrder, format_time, parse_time
from streamfold.errors import InvalidError

replace = msgspec.structs.replace


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identity and time of a commit. All its attempts share one id."""

    commit_id: str
    now: datetime


class ManifestUpdate(Protocol):
    """One change to a manifest."""

    def apply(self, manifest: Manifest, stamp: Stamp) -> Manifest:
        """Return the changed copy. Applying an update twice has no further effect."""
        ...


class Requirement(Protocol):
    """A condition on the manifest that a commit replaces."""

    def check(self, manifest: Manifest | None) -> None:
        """Raise a `ConflictError` or `WriterFencedOutError` if the condition does not hold."""
        ...


@dataclass(frozen=True, slots=True)
class TableShape:
    """An artifact's schema, in the form that the manifest stores."""

    schema_id: str
    schema: dict[str, Any]
    key_fields: tuple[str, ...]
    columns: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ClaimTable:
    """Makes this writer the only one that may commit data. The last claim owns the table.

    A claim also renames the table to the name that this writer uses.
    """

    writer_id: str
    claim_id: str
    table: str
    layout: str | None = None

    def apply(self, manifest: Manifest, stamp: Stamp) -> Manifest:
        if manifest.writer and manifest.writer.claim_id == self.claim_id:
            return manifest
        token = manifest.fencing_token + 1
        writer = Writer(id=self.writer_id, fencing_token=token, claim_id=self.claim_id)
        # An archive by another writer has no id yet.
        archive_id = manifest.archive_id or self.claim_id
        return replace(
            manifest, writer=writer, archive_id=archive_id, table=self.table, layout=self.layout
        )


@dataclass(frozen=True, slots=True)
class AppendArtifacts:
    """Adds a diff, or a base with the diff that closes the previous epoch."""

    artifacts: tuple[Artifact, ...]
    shape: TableShape
    source: Source | None = None

    def apply(self, manifest: Manifest, stamp: Stamp) -> Manifest:
        last = self.artifacts[-1]
        shape = self.shape
        return replace(
            manifest,
            artifacts=manifest.artifacts
            + tuple(replace(artifact, commit_id=stamp.commit_id) for artifact in self.artifacts),
            epoch=last.epoch,
            head_position=last.to_position,
            source=self.source or manifest.source,
            schema_id=shape.schema_id,
            schemas=manifest.schemas | {shape.schema_id: shape.schema},
            key_fields=list(shape.key_fields),
            columns=list(shape.columns),
        )


@dataclass(frozen=True, slots=True)
class PruneEpochs:
    """Removes epochs from the manifest, except the newest and pinned ones, and retires their files.

    Also removes expired pins, and retired files whose grace period is over.
    """

    epochs: frozenset[int]
    forget_before: datetime

    def apply(self, manifest: Manifest, stamp: Stamp) -> Manifest:
        pins = tuple(pin for pin in manifest.pins if parse_time(pin.expires_at) > stamp.now)
        epochs = {pin.epoch for pin in pins} | {manifest.epoch}
        gone = self.epochs - epochs
        artifacts = tuple(a for a in manifest.artifacts if a.epoch not in gone)
        remaining = replace(manifest, artifacts=artifacts, pins=pins)
        waiting = tuple(r for r in manifest.retired if parse_time(r.at) > self.forget_before)
        at = format_time(stamp.now)
        left = sorted(manifest.paths() - remaining.paths())
        fresh = tuple(RetiredFile(path=path, at=at) for path in left)
        return replace(remaining, retired=waiting + fresh)


@dataclass(frozen=True, slots=True)
class AddPin:
    """Protects an epoch until the pin expires. Replaces a pin with the same id."""

    pin: Pin

    def apply(self, manifest: Manifest, stamp: Stamp) -> Manifest:
        if self.pin.epoch not in {artifact.epoch for artifact in manifest.artifacts}:
            raise InvalidError(
                f"epoch {self.pin.epoch} of table {manifest.table!r} does not exist: pin one that does"
            )
        others = tuple(pin for pin in manifest.pins if pin.id != self.pin.id)
        return replace(manifest, pins=(*others, self.pin))


@dataclass(frozen=True, slots=True)
class RemovePin:
    """Removes a pin, if it exists."""

    pin_id: str

    def apply(self, manifest: Manifest, stamp: Stamp) -> Manifest:
        return replace(manifest, pins=tuple(pin for pin in manifest.pins if pin.id != self.pin_id))


@dataclass(frozen=True, slots=True)
class RequireWriter:
    """Requires that this writer still owns the table."""

    writer: Writer

    def check(self, manifest: Manifest | None) -> None:
        writer = manifest.writer if manifest else None
        if manifest is None or writer is None:
            raise CommitConflictError(
                f"the manifest that writer {self.writer.id!r} claimed is gone: open the table again"
            )
        if writer != self.writer:
            raise WriterFencedOutError(
                manifest.table, self.writer.id, writer.id, writer.fencing_token
            )


@dataclass(frozen=True, slots=True)
class RequireNoArchive:
    """Requires that the first base has not been written yet."""

    writer: Writer

    def check(self, manifest: Manifest | None) -> None:
        if manifest is None:
            return
        if manifest.writer == self.writer:
            raise CommitConflictError(
                f"table {manifest.table!r} has its first base, at {manifest.head_position!r}, from "
                "an earlier attempt: continue from there"
            )
        other = manifest.writer.id if manifest.writer else "unknown"
        raise WriterFencedOutError(manifest.table, self.writer.id, other, manifest.fencing_token)


@dataclass(frozen=True, slots=True)
class RequireHead:
    """Requires that nothing was appended since the artifact was planned."""

    epoch: int
    position: str

    def check(self, manifest: Manifest | None) -> None:
        if manifest is None or (manifest.epoch, manifest.head_position) != (
            self.epoch,
            self.position,
        ):
            head = f"epoch {manifest.epoch} at {manifest.head_position!r}" if manifest else "gone"
            raise ChainGapError(
                f"the artifact follows epoch {self.epoch} at {self.position!r}, but the head is "
                f"{head}: continue from there"
            )


def apply_updates(
    manifest: Manifest, updates: Sequence[ManifestUpdate], stamp: Stamp, order: PositionOrder
) -> Manifest:
    """Return the manifest after all updates: numbered, linked to its predecessor, and checked."""
    changed = manifest
    for update in updates:
        changed = update.apply(changed, stamp)
    changed = replace(
        changed,
        commit_number=manifest.commit_number + 1,
        commit_id=stamp.commit_id,
        previous_commit_id=manifest.commit_id,
        updated_at=format_time(stamp.now),
        position_order=order.name,
        oldest_readable_position=changed.artifacts[0].to_position if changed.artifacts else None,
        incomplete_before=changed.artifacts[-1].incomplete_before if changed.artifacts else None,
        schemas=_live_schemas(changed),
    )
    check_manifest(changed, order, checked=manifest.artifacts)
    return changed


def _live_schemas(manifest: Manifest) -> dict[str, Any]:
    used = {artifact.schema_id for artifact in manifest.artifacts} | {manifest.schema_id}
    return {name: schema for name, schema in manifest.schemas.items() if name in used}
