"""Plans for rebuilding a table, or for reading its changes. Planning reads no files.

A plan is made from one manifest and holds its artifacts. It is exact at the end of each artifact.
Between two ends it gives the state at the earlier one, which is `position`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from streamfold.archive.errors import ChainGapError, PositionInvalidError, PositionPrunedError
from streamfold.archive.manifest.model import Artifact, Manifest
from streamfold.archive.manifest.positions import LSN, PositionOrder, format_time, parse_time
from streamfold.errors import InvalidError, StreamfoldError
from streamfold.notebook import html_table


@dataclass(frozen=True, slots=True)
class TablePlan:
    """A base and the diffs after it, which make up the table at `position`. Prints as a table."""

    manifest: Manifest
    base: Artifact
    diffs: tuple[Artifact, ...]

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        return (self.base, *self.diffs)

    @property
    def last(self) -> Artifact:
        return self.artifacts[-1]

    @property
    def position(self) -> str:
        """The last position whose record is in the table."""
        return self.last.to_position

    @property
    def source_position(self) -> str | None:
        """The last source commit in the table, or None if it is unknown."""
        source_range = self.last.source_range
        return source_range.last if source_range else None

    @property
    def incomplete_before(self) -> str | None:
        """The position before which changes, and so perhaps rows, are missing, or None."""
        return self.last.incomplete_before

    def __str__(self) -> str:
        title = f"table {self.manifest.table} at {self.position} of {self.manifest.head_position}"
        return "\n".join([title + self._missing, *map(describe, self.artifacts)])

    def _repr_html_(self) -> str:
        title = f"{self.manifest.table} at {self.position} of {self.manifest.head_position}"
        return artifact_table(title + self._missing, self.artifacts)

    @property
    def _missing(self) -> str:
        return missing_changes(self.incomplete_before)


@dataclass(frozen=True, slots=True)
class ChangesPlan:
    """The diffs that lead from `since` to `position`, across re-bases. Empty if nothing changed."""

    manifest: Manifest
    since: str
    diffs: tuple[Artifact, ...]

    @property
    def position(self) -> str:
        return self.diffs[-1].to_position if self.diffs else self.since

    def __str__(self) -> str:
        title = f"changes of {self.manifest.table} after {self.since} to {self.position}"
        return "\n".join([title, *map(describe, self.diffs)])

    def _repr_html_(self) -> str:
        title = f"Changes of {self.manifest.table} after {self.since}, to {self.position}"
        return artifact_table(title, self.diffs)


def missing_changes(incomplete_before: str | None) -> str:
    """Return a title's note about missing changes, or "" for a complete table."""
    return (
        f", incomplete: changes before {incomplete_before} are missing" if incomplete_before else ""
    )


def plan_table(
    manifest: Manifest,
    order: PositionOrder,
    *,
    position: str | None = None,
    time: datetime | None = None,
    at_source: str | None = None,
) -> TablePlan:
    """Return the artifacts that make up the table at the head, a position or a publication time.

    `at_source` is a database LSN: plans the newest table without a change committed after it.
    Raises `PositionInvalidError` if a diff holds commits both up to that LSN and after it.
    """
    if position is not None and time is not None:
        raise InvalidError("both a position and a time are given: give one of them")
    if at_source is not None:
        if position is not None or time is not None:
            raise InvalidError("at_source is given with a position or a time: give one of them")
        position = _position_at_source(manifest, at_source)
    if time is not None:
        position = _position_at(manifest, time)
    if position is None:
        return TablePlan(manifest, manifest.base, manifest.chain)
    rank = order.rank(position)
    _check_reachable(manifest, order, position)
    artifacts = [a for a in manifest.artifacts if order.rank(a.to_position) <= rank]
    base = next(artifact for artifact in reversed(artifacts) if artifact.is_base)
    diffs = tuple(a for a in artifacts if a.epoch == base.epoch and not a.is_base)
    return TablePlan(manifest, base, diffs)


def plan_changes(
    manifest: Manifest, order: PositionOrder, since: str, *, until: str | None = None
) -> ChangesPlan:
    """Return the diffs of `(since, until]`, where `until` defaults to the head.

    Both must be ends of artifacts. Raises `PositionPrunedError` if the diffs after `since` are
    gone, and `ChainGapError` if no diff begins there or a later one is missing. Then only a base
    leads to the head.
    """
    end = manifest.head_position if until is None else until
    for position in (since, end):
        _check_reachable(manifest, order, position)
    # Compared by rank, because an LSN may have lower-case digits or leading zeros.
    following = {
        order.rank(a.from_position): a for a in manifest.artifacts if a.from_position is not None
    }
    diffs = tuple(_links(following, order, since, end))
    reached = diffs[-1].to_position if diffs else since
    if order.rank(reached) != order.rank(end):
        raise ChainGapError(
            f"no diff of table {manifest.table!r} goes from {reached!r} towards {end!r}: begin and "
            f"end where artifacts do, or load the table at {manifest.head_position!r}"
        )
    return ChangesPlan(manifest, since, diffs)


def _links(
    following: dict[int, Artifact], order: PositionOrder, since: str, end: str
) -> Iterator[Artifact]:
    position, limit = order.rank(since), order.rank(end)
    # Every diff ends after it begins, so this terminates.
    while (diff := following.get(position)) and order.rank(diff.to_position) <= limit:
        yield diff
        position = order.rank(diff.to_position)


def _position_at(manifest: Manifest, time: datetime) -> str:
    moment = parse_time(format_time(time))
    published = [a for a in manifest.artifacts if parse_time(a.created_at) <= moment]
    if not published:
        first = manifest.artifacts[0]
        raise PositionPrunedError(
            f"the archive of table {manifest.table!r} begins at {first.created_at}, after "
            f"{format_time(time)}: ask for a later time"
        )
    return published[-1].to_position


def _position_at_source(manifest: Manifest, lsn: str) -> str:
    rank, artifacts = LSN.rank(lsn), manifest.artifacts
    ends = [
        (number, LSN.rank(source_range.last))
        for number, artifact in enumerate(artifacts)
        if (source_range := artifact.source_range) is not None and not source_range.copying
    ]
    reached = max((number for number, last in ends if last <= rank), default=None)
    if reached is None:
        raise _no_source_position(manifest, lsn, [last for _, last in ends])
    for following in artifacts[reached + 1 : reached + 2]:
        after = following.source_range
        if after is None or after.first is None or LSN.rank(after.first) <= rank:
            before = artifacts[reached].source_range
            nearest = [before.last] if before else []
            nearest += [LSN.position(last) for number, last in ends if number > reached][:1]
            raise PositionInvalidError(
                f"LSN {lsn} is among the commits of {describe(following).strip()}, which cannot be "
                f"split: ask for table {manifest.table!r} at {' or '.join(nearest)}"
            )
    return artifacts[reached].to_position


def _no_source_position(manifest: Manifest, lsn: str, ends: list[int]) -> StreamfoldError:
    if ends:
        return PositionPrunedError(
            f"LSN {lsn} of table {manifest.table!r} is out of reach: the archive goes back to "
            f"{LSN.position(min(ends))}; begin there or later"
        )
    if any(artifact.source_range for artifact in manifest.artifacts):
        return PositionInvalidError(
            f"the first copy of table {manifest.table!r} is not complete: wait for its end"
        )
    return PositionInvalidError(
        f"the archive of table {manifest.table!r} has no positions of its source, because its records "
        "had none: ask for a position or a time"
    )


def _check_reachable(manifest: Manifest, order: PositionOrder, position: str) -> None:
    rank, first = order.rank(position), manifest.artifacts[0].to_position
    if rank < order.rank(first):
        raise PositionPrunedError(
            f"position {position!r} of table {manifest.table!r} is out of reach: the archive goes "
            f"back to {first!r}; begin there or later"
        )
    if rank > order.rank(manifest.head_position):
        raise PositionInvalidError(
            f"position {position!r} is after the head {manifest.head_position!r} of table "
            f"{manifest.table!r}: ask for one up to there, or wait"
        )


def describe(artifact: Artifact) -> str:
    """Return a one-line description of an artifact."""
    count = artifact.row_count if artifact.is_base else artifact.change_count
    things = "rows" if artifact.is_base else "changes"
    sizes = (f"{name} {files.size_bytes:,} B" for name, files in sorted(artifact.formats.items()))
    span = artifact.to_position if artifact.is_base else _span(artifact)
    kind = "base" if artifact.is_base else "diff"
    line = f"  epoch {artifact.epoch}  {kind}  {span}  {count or 0:,} {things}  {', '.join(sizes)}"
    return line + _source(artifact)


def artifact_table(title: str, artifacts: Iterable[Artifact]) -> str:
    """Return an HTML table of artifacts for notebooks."""
    columns = ("artifact", "epoch", "positions", "rows or changes", "bytes by format", "created")
    return html_table(title, columns, map(_cells, artifacts))


def _cells(artifact: Artifact) -> tuple[object, ...]:
    sizes = (f"{name} {files.size_bytes:,}" for name, files in sorted(artifact.formats.items()))
    return (
        "base" if artifact.is_base else "diff",
        artifact.epoch,
        artifact.to_position if artifact.is_base else _span(artifact),
        artifact.row_count if artifact.is_base else artifact.change_count,
        ", ".join(sizes),
        artifact.created_at,
    )


def _source(artifact: Artifact) -> str:
    source_range = artifact.source_range
    if source_range is None:
        return ""
    commits = (
        source_range.last
        if source_range.first is None
        else f"{source_range.first} to {source_range.last}"
    )
    return f"  source {commits}{' (copying)' if source_range.copying else ''}"


def _span(diff: Artifact) -> str:
    return f"({diff.from_position}, {diff.to_position}]"
