"""The manifest: what is live in one table's archive, as frozen data.

Version 1 is a published contract: the fields `manifest_version, table, epoch, updated_at,
head_position, artifacts` and those of an artifact never change their meaning. All others are
additions that a reader may ignore. Unknown fields stay in `extra` and are written back as they were
read.

`path` is relative to the folder of the manifest, so an archive may be moved or copied; `uri` says
where the file is in this destination.

Our writers number their commits and give each an id, which shows whether two manifests are
versions of one archive. Manifests of other writers have neither; one of them is a version of
another if the artifacts that both could hold are the same.

`check_manifest` has the rules: they are checked before a manifest is written, and whenever one is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, Literal

import msgspec

from streamfold.archive.errors import ManifestInvalidError
from streamfold.archive.manifest.positions import KNOWN_ORDERS, LSN, PositionOrder, parse_time
from streamfold.blob.blob_store import check_key
from streamfold.errors import InvalidError

MANIFEST_VERSION = 1
#: Name of the manifest in the folder of its table.
MANIFEST_KEY = "manifest.json"
#: `layout` of archives whose names follow from positions alone; absent in all others.
PUBLISHED_LAYOUT = "laredo"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """An object of the manifest; `extra` holds unknown fields."""

    extra: dict[str, Any] = {}


class Part(Entry, frozen=True, kw_only=True):
    """One file, of one key bucket where the artifact is bucketed."""

    path: str
    uri: str
    size_bytes: int
    #: Hexadecimal; None in archives of writers that record no hash.
    sha256: str | None = None
    rows: int | None = None
    bucket: int | None = None


class FormatFiles(Entry, frozen=True, kw_only=True):
    """An artifact in one format; with several parts `uri` ends in a slash and is not a file."""

    uri: str
    size_bytes: int
    compression: str | None = None
    parts: tuple[Part, ...] = ()


class SourceRange(Entry, frozen=True, kw_only=True):
    """The commits of the source that an artifact holds, as LSNs of PostgreSQL."""

    #: The first commit with a change in a diff; None for a base.
    first: str | None = None
    #: The table at the end of the artifact holds no change that was committed after this.
    last: str
    #: When it was committed.
    time: str | None = None
    #: The artifact ends in the middle of the first copy: the table was never like this.
    copying: bool = False

    def of_base(self) -> SourceRange:
        """Return the range of a base that ends here."""
        return msgspec.structs.replace(self, first=None)

    def of_no_change(self) -> SourceRange:
        """Return the range of a diff without changes that begins here."""
        return msgspec.structs.replace(self, first=self.last)


class Artifact(Entry, frozen=True, kw_only=True):
    """A base (`snapshot`) of all rows at `to_position`, or the net changes of `(from, to]`."""

    kind: Literal["snapshot", "diff"]
    epoch: int
    from_position: str | None
    to_position: str
    created_at: str
    row_count: int | None = None
    change_count: int | None = None
    #: Records that were folded into the changes.
    record_count: int | None = None
    formats: dict[str, FormatFiles]
    schema_id: str | None = None
    #: The commit that published it.
    commit_id: str | None = None
    rebase_reason: str | None = None
    #: None where the records had no positions of a source.
    source_range: SourceRange | None = None
    #: Changes before this position are missing, so rows may be; None for a table known to be whole.
    incomplete_before: str | None = None

    @property
    def is_base(self) -> bool:
        return self.kind == "snapshot"

    def parts(self) -> Iterator[Part]:
        """Yield every file, of every format."""
        for files in self.formats.values():
            yield from files.parts


class Writer(Entry, frozen=True, kw_only=True):
    """The writer that may commit: the token grows with each claim, `claim_id` is unique to one."""

    id: str
    fencing_token: int
    claim_id: str


class Source(Entry, frozen=True, kw_only=True):
    """Where the records came from, and how far it was read."""

    name: str
    offsets: dict[str, str] = {}
    #: Milliseconds since 1970 of the last record that was read, by which its stream is recognized.
    timestamp: int | None = None
    #: Records that could not be decoded, since the table began; None without any.
    dead_letters: int | None = None


class Pin(Entry, frozen=True, kw_only=True):
    """Keeps one epoch from being pruned until it expires."""

    id: str
    epoch: int
    created_at: str
    expires_at: str
    reason: str | None = None


class Retired(Entry, frozen=True, kw_only=True):
    """A file that was live until `at`; readers that planned before then may still read it."""

    path: str
    at: str


class Manifest(Entry, frozen=True, kw_only=True):
    """One version of the archive of one table; `artifacts` are in order, newest last."""

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
    #: That of the last artifact.
    incomplete_before: str | None = None
    key_fields: list[str] | None = None
    schema_id: str | None = None
    schemas: dict[str, Any] = {}
    columns: list[Any] | None = None
    pins: tuple[Pin, ...] = ()
    retired: tuple[Retired, ...] = ()

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
        """Yield every live file; a part that a later base reuses is repeated."""
        for artifact in self.artifacts:
            yield from artifact.parts()

    def paths(self) -> set[str]:
        """Return the path of every live file."""
        return {part.path for part in self.parts()}


def order_of(manifest: Manifest, given: PositionOrder | None = None) -> PositionOrder:
    """Return the order of the manifest's positions; a custom order has to be given.

    Manifests of other writers do not name it: LSNs are the published default.
    """
    name = manifest.position_order
    if given is not None and name in (None, given.name):
        return given
    if given is None and name in KNOWN_ORDERS:
        return KNOWN_ORDERS[name]
    if given is None and name is None:
        head = manifest.head_position
        return KNOWN_ORDERS["lsn" if "/" in head or not head else "seq_num"]
    expected = f"{given.name!r} was given" if given else "none was given"
    raise ManifestInvalidError(
        f"positions of table {manifest.table!r} are in the order {name!r}, and {expected}: "
        "give the order of that name"
    )


def with_uris(manifest: Manifest, folder: str) -> Manifest:
    """Return the manifest with the URIs of another folder; `folder` ends in a slash."""
    artifacts = tuple(_locate_artifact(artifact, folder) for artifact in manifest.artifacts)
    return msgspec.structs.replace(manifest, artifacts=artifacts)


def _locate_artifact(artifact: Artifact, folder: str) -> Artifact:
    formats = {name: _locate_files(files, folder) for name, files in artifact.formats.items()}
    return msgspec.structs.replace(artifact, formats=formats)


def _locate_files(files: FormatFiles, folder: str) -> FormatFiles:
    parts = tuple(msgspec.structs.replace(p, uri=folder + p.path) for p in files.parts)
    return msgspec.structs.replace(files, uri=_common_uri(parts, folder), parts=parts)


def _common_uri(parts: tuple[Part, ...], folder: str) -> str:
    # One of several parts must not look like the whole, so this is the folder.
    return parts[0].uri if len(parts) == 1 else folder


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
        if artifact.incomplete_before is not None:
            order.rank(artifact.incomplete_before)
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
