"""The manifest: the live artifacts of one table's archive, as frozen data.

Version 1 is a published contract: the fields `manifest_version, table, epoch, updated_at,
head_position, artifacts` and those of an artifact never change their meaning. All others are
additions that a reader may ignore. Unknown fields are stored in `extra` and written back unchanged.

`path` is relative to the manifest's folder, so an archive may be moved or copied. `uri` locates the
file in this destination.

Our writers number their commits and give each an id, which shows whether two manifests are versions
of one archive. Manifests by other writers have neither. Two of them are versions of one archive if
they agree on the artifacts that both could hold.

`check_manifest` enforces the rules, before a manifest is written and whenever one is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Any, Literal

import msgspec

from streamfold.archive.errors import ManifestInvalidError
from streamfold.archive.manifest.positions import KNOWN_ORDERS, LSN, PositionOrder, parse_time
from streamfold.blob.blob_store import check_key
from streamfold.errors import InvalidError

MANIFEST_VERSION = 1
#: Name of the manifest in its table's folder.
MANIFEST_KEY = "manifest.json"
#: The `layout` of archives whose file names derive from positions alone. Others have none.
PUBLISHED_LAYOUT = "laredo"


class ManifestObject(msgspec.Struct, frozen=True, kw_only=True):
    """An object in the manifest. `extra` holds unknown fields."""

    extra: dict[str, Any] = {}


class Part(ManifestObject, frozen=True, kw_only=True):
    """One file. In a bucketed artifact, it holds one key bucket."""

    path: str
    uri: str
    size_bytes: int
    #: Hexadecimal, or None in archives by writers that record no hash.
    sha256: str | None = None
    rows: int | None = None
    bucket: int | None = None


class FormatFiles(ManifestObject, frozen=True, kw_only=True):
    """An artifact in one format. With several parts, `uri` is a folder and ends in a slash."""

    uri: str
    size_bytes: int
    compression: str | None = None
    parts: tuple[Part, ...] = ()


class SourceRange(ManifestObject, frozen=True, kw_only=True):
    """The source commits that an artifact contains, as PostgreSQL LSNs."""

    #: The commit of the first change in a diff. None for a base.
    first: str | None = None
    #: At the end of the artifact, the table contains no change committed after this one.
    last: str
    #: Commit time of `last`.
    time: str | None = None
    #: Whether the artifact ends in the middle of the initial copy: the source table never looked
    #: like this.
    copying: bool = False

    def of_base(self) -> SourceRange:
        """Return the range of a base that ends here."""
        return msgspec.structs.replace(self, first=None)

    def of_no_change(self) -> SourceRange:
        """Return the range of a diff without changes that begins here."""
        return msgspec.structs.replace(self, first=self.last)


class Artifact(ManifestObject, frozen=True, kw_only=True, weakref=True):
    """A base (`snapshot`) of all rows at `to_position`, or the net changes of `(from, to]`."""

    kind: Literal["snapshot", "diff"]
    epoch: int
    from_position: str | None
    to_position: str
    created_at: str
    row_count: int | None = None
    change_count: int | None = None
    #: Records folded into the changes.
    record_count: int | None = None
    formats: dict[str, FormatFiles]
    schema_id: str | None = None
    #: Id of the commit that published it.
    commit_id: str | None = None
    rebase_reason: str | None = None
    #: None if the records carried no source positions.
    source_range: SourceRange | None = None
    #: Changes before this position are missing, so rows may be too. None for a table known to be
    #: complete.
    incomplete_before: str | None = None

    @property
    def is_base(self) -> bool:
        return self.kind == "snapshot"

    def parts(self) -> Iterator[Part]:
        """Yield every file, of every format."""
        for files in self.formats.values():
            yield from files.parts


class Writer(ManifestObject, frozen=True, kw_only=True):
    """The writer that may commit.

    The token grows with each claim. `claim_id` is unique to one claim.
    """

    id: str
    fencing_token: int
    claim_id: str


class Source(ManifestObject, frozen=True, kw_only=True):
    """The source of the records, and the position up to which it was read."""

    name: str
    offsets: dict[str, str] = {}
    #: Timestamp of the last record read, in milliseconds since 1970. It identifies the record's
    #: stream.
    timestamp: int | None = None
    #: Undecodable records since the table began, or None if there were none.
    dead_letters: int | None = None


class Pin(ManifestObject, frozen=True, kw_only=True):
    """Protects one epoch from pruning until the pin expires."""

    id: str
    epoch: int
    created_at: str
    expires_at: str
    reason: str | None = None


class RetiredFile(ManifestObject, frozen=True, kw_only=True):
    """A file that was live until `at`. Readers that planned before then may still read it."""

    path: str
    at: str


class Manifest(ManifestObject, frozen=True, kw_only=True):
    """One version of one table's archive. `artifacts` are in order, newest last."""

    manifest_version: int = MANIFEST_VERSION
    table: str
    epoch: int
    updated_at: str
    head_position: str
    artifacts: tuple[Artifact, ...]
    layout: str | None = None
    archive_id: str | None = None
    #: Grows by one with each commit.
    commit_number: int = 0
    commit_id: str | None = None
    previous_commit_id: str | None = None
    writer: Writer | None = None
    source: Source | None = None
    position_order: str | None = None
    oldest_readable_position: str | None = None
    #: The same as in the last artifact.
    incomplete_before: str | None = None
    key_fields: list[str] | None = None
    schema_id: str | None = None
    schemas: dict[str, Any] = {}
    columns: list[Any] | None = None
    pins: tuple[Pin, ...] = ()
    retired: tuple[RetiredFile, ...] = ()

    @property
    def base(self) -> Artifact:
        """The newest base."""
        return next(artifact for artifact in reversed(self.artifacts) if artifact.is_base)

    @property
    def chain(self) -> tuple[Artifact, ...]:
        """The diffs after the newest base."""
        return tuple(a for a in self.artifacts if a.epoch == self.epoch and not a.is_base)

    @property
    def fencing_token(self) -> int:
        return self.writer.fencing_token if self.writer else 0

    def parts(self) -> Iterator[Part]:
        """Yield every live file. Repeats a part that a later base reuses."""
        for artifact in self.artifacts:
            yield from artifact.parts()

    def paths(self) -> set[str]:
        """Return the path of every live file."""
        return {part.path for part in self.parts()}


def order_of(manifest: Manifest, order: PositionOrder | None = None) -> PositionOrder:
    """Return the order of the manifest's positions. A custom order must be passed in.

    Manifests by other writers do not name their order. They use LSNs, the published default, unless
    their head is a plain number.
    """
    name = manifest.position_order
    if order is not None and name in (None, order.name):
        return order
    if order is None and name in KNOWN_ORDERS:
        return KNOWN_ORDERS[name]
    if order is None and name is None:
        head = manifest.head_position
        return KNOWN_ORDERS["lsn" if "/" in head or not head else "seq_num"]
    expected = f"{order.name!r} was given" if order else "none was given"
    raise ManifestInvalidError(
        f"positions of table {manifest.table!r} are in the order {name!r}, and {expected}: "
        "give the order of that name"
    )


def with_uris(manifest: Manifest, folder: str) -> Manifest:
    """Return the manifest with URIs in another folder, given with a trailing slash.

    Artifacts that have these URIs already stay the same objects.
    """
    artifacts = tuple(_locate_artifact(artifact, folder) for artifact in manifest.artifacts)
    return msgspec.structs.replace(manifest, artifacts=artifacts)


def _locate_artifact(artifact: Artifact, folder: str) -> Artifact:
    formats = {name: _locate_files(files, folder) for name, files in artifact.formats.items()}
    if formats == artifact.formats:
        return artifact
    return msgspec.structs.replace(artifact, formats=formats)


def _locate_files(files: FormatFiles, folder: str) -> FormatFiles:
    parts = tuple(msgspec.structs.replace(p, uri=folder + p.path) for p in files.parts)
    return msgspec.structs.replace(files, uri=_common_uri(parts, folder), parts=parts)


def _common_uri(parts: tuple[Part, ...], folder: str) -> str:
    # A single part must not look like the whole artifact, so several parts share the folder's URI.
    return parts[0].uri if len(parts) == 1 else folder


def age(manifest: Manifest, order: PositionOrder) -> tuple[int, object]:
    """Return a value that grows with the version. Without commit numbers, the head decides."""
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
    """Return whether `newer` has every artifact of `older` that it cannot have pruned."""
    identities = {_identity(artifact) for artifact in newer.artifacts}
    first = newer.artifacts[0]
    begins = order.rank(first.to_position)
    return all(
        _identity(a) in identities
        or (a.epoch <= first.epoch and order.rank(a.to_position) < begins)
        for a in older.artifacts
    )


def _identity(artifact: Artifact) -> tuple[object, ...]:
    """Return values that two artifacts share only if one is a copy of the other."""
    return (
        artifact.kind,
        artifact.epoch,
        artifact.from_position,
        artifact.to_position,
        artifact.created_at,
        artifact.row_count or artifact.change_count or 0,
        tuple(sorted((name, files.size_bytes) for name, files in artifact.formats.items())),
    )


def check_manifest(
    manifest: Manifest, order: PositionOrder | None = None, checked: Sequence[Artifact] = ()
) -> None:
    """Raise ManifestInvalidError if a reader could rebuild a wrong table from the manifest.

    `checked` are the artifacts of an earlier version. Leading artifacts that are still the same
    objects are not checked again.
    """
    same = takewhile(
        lambda pair: pair[0] is pair[1], zip(manifest.artifacts, checked, strict=False)
    )
    try:
        _check(manifest, order_of(manifest, order), sum(1 for _ in same))
    except InvalidError as error:
        raise _broken(manifest, error.message) from None


def _check(manifest: Manifest, order: PositionOrder, checked: int) -> None:
    artifacts = manifest.artifacts
    if not artifacts or not artifacts[0].is_base:
        raise _broken(manifest, "its first artifact must be a base")
    for artifact in artifacts:
        if artifact.schema_id is not None and artifact.schema_id not in manifest.schemas:
            name, schema = _name(artifact), artifact.schema_id
            raise _broken(manifest, f"{name} names schema {schema}, which does not exist")
    for artifact in artifacts[checked:]:
        _check_artifact(manifest, artifact)
        if artifact.incomplete_before is not None:
            order.rank(artifact.incomplete_before)
    for before, after in pairwise(artifacts[max(0, checked - 1) :]):
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
    _check_unique(manifest, f"path in {name}", (part.path for part in artifact.parts()))
    if (source := artifact.source_range) is not None:
        LSN.rank(source.last)
        if source.first is not None:
            LSN.rank(source.first)


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
