"""A notice that an artifact was committed: where to find it, never its data.

The same artifact always gives the same event, byte for byte, in any process and however often:
`event_id` distinguishes a repetition from a new event.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from streamfold.archive.manifest.model import Artifact, Manifest
from streamfold.errors import MalformedError
from streamfold.undecodable import UNDECODABLE

#: Hex digits of an event id: 128 bits, and within every service's limit for deduplication ids.
ID_DIGITS = 32


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One committed artifact. `formats` has a URI for each format in which it is written."""

    event_id: str
    table: str
    kind: Literal["snapshot", "diff"]
    epoch: int
    from_position: str | None
    to_position: str
    #: The table's head after the commit.
    head_position: str
    manifest_uri: str
    formats: dict[str, str]
    created_at: str
    #: Whether no diff leads from the previously announced artifact to this base, so followers must
    #: load it.
    gap: bool = False


def describe(
    manifest: Manifest, artifact: Artifact, manifest_uri: str, *, gap: bool = False
) -> Event:
    """Return the event for one artifact in the manifest."""
    return Event(
        event_id=_event_id(manifest.table, artifact, gap),
        table=manifest.table,
        kind=artifact.kind,
        epoch=artifact.epoch,
        from_position=artifact.from_position,
        to_position=artifact.to_position,
        head_position=_head_after(manifest, artifact),
        manifest_uri=manifest_uri,
        formats={name: files.uri for name, files in artifact.formats.items()},
        created_at=artifact.created_at,
        gap=gap,
    )


def encode_event(event: Event) -> bytes:
    """Return the event as every sink sends it: one JSON object, with fields in a fixed order."""
    return msgspec.json.encode(event)


def decode_event(data: bytes | str) -> Event:
    """Decode an event that a sink sent. Ignores unknown fields."""
    try:
        return msgspec.json.decode(data, type=Event)
    except UNDECODABLE as error:
        raise MalformedError(f"this is not an event of an archive: {error}") from None


def _event_id(table: str, artifact: Artifact, gap: bool) -> str:
    # A gap notice says more than the plain event of the same base, so it is not a repetition.
    parts = [
        table,
        artifact.commit_id,
        artifact.kind,
        artifact.epoch,
        artifact.from_position,
        artifact.to_position,
        gap,
    ]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:ID_DIGITS]


def _head_after(manifest: Manifest, artifact: Artifact) -> str:
    """Return the end of the artifact's commit. The current head would differ between attempts."""
    if artifact.commit_id is None:
        return artifact.to_position
    return next(
        other.to_position
        for other in reversed(manifest.artifacts)
        if other.commit_id == artifact.commit_id
    )
