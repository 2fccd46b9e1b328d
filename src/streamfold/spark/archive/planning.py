"""A table cut into parts that tasks rebuild on their own: one per key bucket, no rows on the driver.

Where not all files have a bucket, changes may be about any row, and one task rebuilds the table.
Without changes every file is a part, and a large one on a disk is several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from streamfold.archive.destinations.destination import local_folder
from streamfold.archive.manifest.model import Artifact, Part
from streamfold.archive.read.decoding import ChosenFiles, Decoding
from streamfold.archive.read.part_files import PartFiles
from streamfold.archive.read.plan import TablePlan
from streamfold.archive.read.rebuild import truncates
from streamfold.spark.archive.pruning import WHOLE, Share, is_hashed
from streamfold.spark.buckets import TRUNCATES

#: Bytes of a Parquet file of which a task reads its own row groups: seconds of work.
SHARE_BYTES = 128 << 20
#: The most tasks that share a file: each of them checks the hash of the whole file.
SHARES_MAX = 8


@dataclass(frozen=True, slots=True)
class TablePart:
    """What one task reads; pickled with it, so it names only the task's own files."""

    base: ChosenFiles
    diffs: tuple[ChosenFiles, ...]
    keys: tuple[str, ...]
    bucket: int | None = None
    #: Whether the first diff empties the table, even if its own files do not say so.
    clears: bool = False
    share: Share = WHOLE


def choose_all(decoding: Decoding, plan: TablePlan) -> tuple[ChosenFiles, tuple[ChosenFiles, ...]]:
    """Return the base and the diffs of a plan, each in the best format."""
    found = [slim(decoding.choose(plan.manifest, artifact)) for artifact in plan.artifacts]
    return found[0], tuple(found[1:])


def slim(chosen: ChosenFiles) -> ChosenFiles:
    """Return the same without the files of other formats, which tasks do not need."""
    bare: Artifact = msgspec.structs.replace(chosen.artifact, formats={})
    return replace(chosen, artifact=bare)


async def table_parts(
    base: ChosenFiles, diffs: tuple[ChosenFiles, ...], keys: tuple[str, ...], files: PartFiles
) -> list[TablePart]:
    """Cut a table into parts; `files` are opened only for diffs that do not say if they truncate."""
    if not diffs:
        return [
            TablePart(_only(base, [part]), (), keys, part.bucket, share=share)
            for part in base.parts
            for share in _shares(base, part, files)
        ]
    buckets = [part.bucket for chosen in (base, *diffs) for part in chosen.parts]
    if None in buckets:
        return [TablePart(base, diffs, keys)]
    clears = False
    # Nothing before the last diff that empties the table matters.
    for number in reversed(range(len(diffs))):
        if await empties(diffs[number], files, keys):
            base, diffs, clears = _only(base, []), diffs[number:], True
            break
    own = [_by_bucket(chosen) for chosen in (base, *diffs)]
    return [
        TablePart(
            own[0].get(bucket, _only(base, [])),
            tuple(diff[bucket] for diff in own[1:] if bucket in diff),
            keys,
            bucket,
            clears,
        )
        for bucket in sorted({b for b in buckets if b is not None})
    ]


async def empties(diff: ChosenFiles, files: PartFiles, keys: Sequence[str]) -> bool:
    """Return whether a diff starts with a TRUNCATE, which may be in any of its parts."""
    if any(part.extra.get(TRUNCATES) for part in diff.parts):
        return True
    return not is_hashed(diff) and await truncates(diff, files, keys)


def _by_bucket(chosen: ChosenFiles) -> dict[int | None, ChosenFiles]:
    """Split the artifact by bucket."""
    found: dict[int | None, list[Part]] = {}
    for part in chosen.parts:
        found.setdefault(part.bucket, []).append(part)
    return {bucket: _only(chosen, parts) for bucket, parts in found.items()}


def _only(chosen: ChosenFiles, parts: Sequence[Part]) -> ChosenFiles:
    return replace(chosen, parts=tuple(parts))


def _shares(base: ChosenFiles, part: Part, files: PartFiles) -> Iterator[Share]:
    """Yield shares of a file on disk; on remote storage every share would fetch the whole file."""
    local = local_folder(files.destination.uri) is not None
    large = local and base.form.reads_row_groups and part.bucket is None
    count = min(SHARES_MAX, -(-part.size_bytes // SHARE_BYTES)) if large else 1
    return (Share(number, count) for number in range(max(1, count)))
