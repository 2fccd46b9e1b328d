"""Bases held against the epochs before them: what a re-base wrote is what the old epoch leads to.

A follower that comes by the closing diff and a reader that begins with the new base must see the same
table. Only rows tell, so both are read whole, piece by piece, and held against each other by their
fingerprints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.maintenance.fingerprint import Fingerprint
from streamfold.archive.manifest.model import Manifest
from streamfold.archive.read.decoding import Decoding
from streamfold.archive.read.folding import fitted
from streamfold.archive.read.part_files import PartFiles
from streamfold.archive.read.plan import TablePlan
from streamfold.archive.read.rebuild import Rebuild
from streamfold.blob.local.files import finish


@dataclass(frozen=True, slots=True)
class Rebase:
    """The same table twice: by the chain of one epoch, and as the base of the next."""

    old: TablePlan
    new: TablePlan

    @property
    def path(self) -> str:
        """The first file of the new base."""
        return next(self.new.base.parts()).path

    def paths(self) -> set[str]:
        """Every file of both."""
        artifacts = (*self.old.artifacts, self.new.base)
        return {part.path for artifact in artifacts for part in artifact.parts()}


def rebases_of(manifest: Manifest) -> Iterator[Rebase]:
    """Yield every base that the epoch before it leads to; after a gap it leads elsewhere."""
    bases = [artifact for artifact in manifest.artifacts if artifact.is_base]
    for before, base in pairwise(bases):
        diffs = tuple(a for a in manifest.artifacts if a.epoch == before.epoch and not a.is_base)
        old = TablePlan(manifest, before, diffs)
        if old.position == base.to_position:
            yield Rebase(old, TablePlan(manifest, base, ()))


async def check_rebase(rebase: Rebase, files: PartFiles, decoding: Decoding) -> bool:
    """Read both tables; False when their columns cannot be compared, for lack of a schema.

    Raises `ArtifactCorruptError` when they differ. Only columns that all artifacts have are
    compared: a source may fill a new column without telling of every row.
    """
    manifest, artifacts = rebase.new.manifest, (rebase.new.base, *rebase.old.artifacts)
    schemas = [decoding.schema_of(manifest, artifact) for artifact in artifacts]
    known = [schema.arrow for schema in schemas if schema]
    if len(known) < len(schemas):
        return False
    shared = pa.schema([f for f in known[0] if all(f.name in names.names for names in known)])
    folded, written = [
        await _fingerprint(Rebuild(plan, files, decoding, tuple(shared.names)), shared)
        for plan in (rebase.old, rebase.new)
    ]
    if folded != written:
        raise ArtifactCorruptError(
            f"the base of epoch {rebase.new.base.epoch} at {rebase.new.position!r} has "
            f"{written.rows} rows and is not the table that epoch {rebase.old.base.epoch} leads to, "
            f"which has {folded.rows}: one of them is wrong; write a new base from the source"
        )
    return True


async def _fingerprint(rebuild: Rebuild, columns: pa.Schema) -> Fingerprint:
    found = Fingerprint()
    async with aclosing(rebuild.pieces()) as pieces:
        async for piece in pieces:
            await finish(asyncio.to_thread(_add, found, piece, columns))
    return found


def _add(found: Fingerprint, piece: pa.Table, columns: pa.Schema) -> None:
    for batch in piece.to_batches():
        found.add(fitted(batch, columns))
