"""The notice that an artifact was committed: where to find it, never its data.

The same artifact always gives the same event, byte for byte, in any process and however often:
`event_id` distinguishes a repetition from something new.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from streamfold.archive.manifest.model import Artifact, Manifest
from streamfold.errors import MalformedError
from streamfold.undecodable import UNDECODABLE

#: Hex digits of an event id: 128 bits, and within what every service takes for deduplication.
ID_DIGITS = 32


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One committed artifact; `formats` has a URI for each format that it is written in."""

    event_id: str
    table: str
    kind: Literal["snapshot", "diff"]
    epoch: int
    from_position: str | None
    to_position: str
    #: The head of the table once the artifact was committed.
    head_position: str
    manifest_uri: str
    formats: dict[str, str]
    created_at: str
    #: No diff leads from the artifact announced before to this base: followers have to load it.
    gap: bool = False


def describe(
    manifest: Manifest, artifact: Artifact, manifest_uri: str, *, gap: bool = False
) -> Event:
    """Return the event of one artifact of the manifest."""
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
    """Return the event as every sink sends it: one JSON object, fields in a fixed order."""
    return msgspec.json.encode(event)


def decode_event(data: bytes | str) -> Event:
    """Return the event that a sink sent; unknown fields are ignored."""
    try:
        return msgspec.json.decode(data, type=Event)
    except UNDECODABLE as error:
        raise MalformedError(f"this is not an event of an archive: {error}") from None


def _event_id(table: str, artifact: Artifact, gap: bool) -> str:
    # A notice of a gap says more than the plain event of the same base, so it is not a repetition.
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
    """Return where the commit of the artifact ended: the current head would change between attempts."""
    if artifact.commit_id is None:
        return artifact.to_position
    return next(
        other.to_position
        for other in reversed(manifest.artifacts)
        if other.commit_id == artifact.commit_id
    )
