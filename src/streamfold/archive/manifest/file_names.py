"""Names of an archive's files.

    epoch=<N>/snapshot-<to>-<attempt>[-b<bucket>]<extension>
    epoch=<N>/diff-<from>-<to>-<attempt>[-b<bucket>]<extension>

Positions are padded, so that a listing is in their order. The attempt is new for every try to
write an artifact: no two writers, and no two tries of one, ever write to the same name.
"""

from __future__ import annotations

import re

from streamfold.archive.manifest.positions import PositionOrder
from streamfold.errors import InvalidError

#: What the published format appends for its two formats.
PUBLISHED_EXTENSIONS = {"jsonl": ".jsonl", "protobuf": ".pb"}


def artifact_path(
    order: PositionOrder,
    *,
    epoch: int,
    from_position: str | None,
    to_position: str,
    attempt: str,
    extension: str,
    bucket: int | None = None,
) -> str:
    """Return the path of one file, relative to the manifest's folder."""
    if not re.fullmatch(r"[A-Za-z0-9]{8,64}", attempt):
        raise InvalidError(f"attempt {attempt!r} must be 8 to 64 letters and digits")
    names = [] if from_position is None else [order.sortable(from_position)]
    names += [order.sortable(to_position), attempt]
    names += [] if bucket is None else [f"b{bucket:05d}"]
    kind = "snapshot" if from_position is None else "diff"
    return f"epoch={epoch}/{kind}-{'-'.join(map(sanitised, names))}{extension}"


def published_path(
    format_id: str, *, epoch: int, from_position: str | None, to_position: str
) -> str:
    """Return the path that writers without `path` fields use, as the published format says."""
    if format_id not in PUBLISHED_EXTENSIONS:
        raise InvalidError(
            f"format {format_id!r} has no path in the manifest, and no published one"
        )
    positions = [to_position] if from_position is None else [from_position, to_position]
    names = [re.sub(r"[/: ]", "_", position) or "0" for position in positions]
    kind = "snapshot" if from_position is None else "diff"
    return f"epoch={epoch}/{kind}-{'-'.join(names)}{PUBLISHED_EXTENSIONS[format_id]}"


def sanitised(text: str) -> str:
    """Return `text` with only what every kind of storage and every URI takes as it is."""
    return re.sub(r"[^A-Za-z0-9._+-]", "_", text)
