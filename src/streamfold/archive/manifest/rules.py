"""The rules that a manifest keeps: checked before one is written, and whenever one is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import pairwise

from streamfold.archive.errors import ManifestInvalidError
from streamfold.archive.manifest.model import Artifact, FormatFiles, Manifest, order_of
from streamfold.archive.manifest.positions import PositionOrder, parse_time
from streamfold.blob.blob_store import check_key
from streamfold.errors import InvalidError


def check_manifest(manifest: Manifest, order: PositionOrder | None = None) -> None:
    """Refuse a manifest from which a reader could rebuild a wrong table."""
    try:
        _check(manifest, order_of(manifest, order))
    except InvalidError as error:
        raise _broken(manifest, error.message) from None


def _check(manifest: Manifest, order: PositionOrder) -> None:
    artifacts = manifest.artifacts
    if not artifacts or not artifacts[0].is_base:
        raise _broken(manifest, "its first artifact must be a base")
    for artifact in artifacts:
        _check_artifact(manifest, artifact)
    for before, after in pairwise(artifacts):
        _check_link(manifest, before, after, order.rank)
    order.rank(artifacts[0].to_position)
    _check_head(manifest)
    _check_additions(manifest)
    parse_time(manifest.updated_at)


def _check_artifact(manifest: Manifest, artifact: Artifact) -> None:
    name = _name(artifact)
    parse_time(artifact.created_at)
    if artifact.is_base != (artifact.from_position is None):
        raise _broken(manifest, f"{name}: from_position is null for a base and only for a base")
    if artifact.epoch < 1:
        raise _broken(manifest, f"{name}: epochs count from 1")
    if not artifact.formats:
        raise _broken(manifest, f"{name} has no format: it cannot be read")
    for files in artifact.formats.values():
        _check_files(manifest, name, files)
    if artifact.schema_id is not None and artifact.schema_id not in manifest.schemas:
        raise _broken(manifest, f"{name} names schema {artifact.schema_id}, which does not exist")
    _check_unique(manifest, f"path in {name}", (part.path for part in artifact.parts()))


def _check_files(manifest: Manifest, name: str, files: FormatFiles) -> None:
    if files.size_bytes != sum(part.size_bytes for part in files.parts):
        raise _broken(manifest, f"{name}: size_bytes must be the sum of its parts")
    for part in files.parts:
        check_key(part.path)
        if part.size_bytes < 0:
            raise _broken(manifest, f"{name}: {part.path!r} has a negative size")
        if part.sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", part.sha256):
            raise _broken(manifest, f"{name}: sha256 of {part.path!r} is not 64 hex digits")


def _check_link(
    manifest: Manifest, before: Artifact, after: Artifact, rank: Callable[[str], int]
) -> None:
    name = _name(after)
    step = rank(after.to_position) - rank(before.to_position)
    if after.is_base:
        if after.epoch <= before.epoch:
            raise _broken(manifest, f"{name} must open an epoch after {before.epoch}")
        if step < 0:
            raise _broken(manifest, f"{name} goes back behind {before.to_position!r}")
        return
    if after.epoch != before.epoch:
        raise _broken(manifest, f"{name} must be of epoch {before.epoch}, as the one before it")
    if after.from_position != before.to_position:
        raise _broken(manifest, f"{name} must begin at {before.to_position!r}")
    if step <= 0:
        raise _broken(manifest, f"{name} must end after it begins")


def _check_head(manifest: Manifest) -> None:
    last, first = manifest.artifacts[-1], manifest.artifacts[0]
    if (manifest.epoch, manifest.head_position) != (last.epoch, last.to_position):
        raise _broken(
            manifest,
            f"its head is epoch {manifest.epoch} at {manifest.head_position!r}, but the last "
            f"artifact is of epoch {last.epoch} and ends at {last.to_position!r}",
        )
    if manifest.oldest_readable_position not in (None, first.to_position):
        raise _broken(manifest, f"its oldest readable position must be {first.to_position!r}")


def _check_additions(manifest: Manifest) -> None:
    _check_unique(manifest, "pin", (pin.id for pin in manifest.pins))
    for pin in manifest.pins:
        parse_time(pin.created_at)
        parse_time(pin.expires_at)
    for retired in manifest.retired:
        parse_time(retired.at)
    if manifest.schema_id is not None and manifest.schema_id not in manifest.schemas:
        raise _broken(manifest, f"its schema {manifest.schema_id} is not under schemas")


def _check_unique(manifest: Manifest, what: str, names: Iterable[str]) -> None:
    seen = set()
    for name in names:
        if name in seen:
            raise _broken(manifest, f"{what} {name!r} occurs twice")
        seen.add(name)


def _name(artifact: Artifact) -> str:
    return f"{artifact.kind} ({artifact.from_position}, {artifact.to_position}]"


def _broken(manifest: Manifest, rule: str) -> ManifestInvalidError:
    return ManifestInvalidError(
        f"manifest of table {manifest.table!r} cannot be used: {rule}; nothing is read from it"
    )
