"""Checks everything that an archive states about itself against its files, including re-bases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.buckets import BUCKETING, SPLITMIX64, bucket_numbers
from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.admission import PieceLimits, pieces
from streamfold.archive.formats.conforming import values_of
from streamfold.archive.formats.format import FORMATS
from streamfold.archive.formats.jsonl.json_text import object_text
from streamfold.archive.manifest.model import Artifact, Manifest, Part
from streamfold.archive.read.decoding import ChosenFiles, Decoding
from streamfold.archive.read.folding import fitted
from streamfold.archive.read.part_files import PartFiles
from streamfold.archive.read.plan import TablePlan
from streamfold.archive.read.rebuild import Rebuild
from streamfold.blob.local_files import finish
from streamfold.errors import RetryLaterError, StorageError, StreamfoldError
from streamfold.wording import noun

Words = npt.NDArray[np.uint64]

#: Maximum rows and bytes to hash at once. Hashing a byte of text takes about 30 bytes of memory.
AT_ONCE = PieceLimits(rows=16 << 10, size=2 << 20)


class Fingerprint:
    """Fingerprint of the rows added so far: their count, and the sum of their hashes."""

    def __init__(self) -> None:
        self.rows = 0
        self._sum = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows. All rows to compare must have the same columns in the same order."""
        for piece in pieces([batch], AT_ONCE):
            text = object_text(list(piece.schema), piece.columns)
            self._sum = (self._sum + int(_row_hashes(text).sum(dtype=np.uint64))) % (1 << 64)
            self.rows += len(piece)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    @property
    def _value(self) -> tuple[int, int]:
        return self.rows, self._sum


def _row_hashes(text: pa.Array) -> Words:
    """Return a hash of each text: the sum of its bytes, each multiplied by a number for its offset."""
    data, lengths = values_of(text)
    starts = np.cumsum(lengths) - lengths
    offsets = (np.arange(len(data)) - np.repeat(starts, lengths)).astype(np.uint64)
    weighed = (data.astype(np.uint64) + np.uint64(1)) * _mixed(offsets)
    return _mixed(np.add.reduceat(weighed, starts))


def _mixed(words: Words) -> Words:
    """Return mixed words, where every bit depends on all input bits (SplitMix64)."""
    words = words + np.uint64(0x9E37_79B9_7F4A_7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed


@dataclass(frozen=True, slots=True)
class Rebase:
    """The same table twice: from the chain of one epoch, and as the next epoch's base."""

    old: TablePlan
    new: TablePlan

    @property
    def path(self) -> str:
        """The first file of the new base."""
        return next(self.new.base.parts()).path

    def paths(self) -> set[str]:
        """Return the paths of all files on both sides."""
        artifacts = (*self.old.artifacts, self.new.base)
        return {part.path for artifact in artifacts for part in artifact.parts()}


def rebases_of(manifest: Manifest) -> Iterator[Rebase]:
    """Yield every base that the previous epoch leads to. Omits a base after a gap."""
    bases = [artifact for artifact in manifest.artifacts if artifact.is_base]
    for before, base in pairwise(bases):
        diffs = tuple(a for a in manifest.artifacts if a.epoch == before.epoch and not a.is_base)
        old = TablePlan(manifest, before, diffs)
        if old.position == base.to_position:
            yield Rebase(old, TablePlan(manifest, base, ()))


async def check_rebase(rebase: Rebase, files: PartFiles, decoding: Decoding) -> bool:
    """Read and compare both tables. Returns False if they cannot be compared for lack of a schema.

    Raises `ArtifactCorruptError` if they differ. Compares only columns that all artifacts have,
    because a source may fill a new column without sending every row.
    """
    manifest, artifacts = rebase.new.manifest, (rebase.new.base, *rebase.old.artifacts)
    schemas = [decoding.schema_of(manifest, artifact) for artifact in artifacts]
    arrows = [schema.arrow for schema in schemas if schema]
    if len(arrows) < len(schemas):
        return False
    shared = pa.schema([f for f in arrows[0] if all(f.name in names.names for names in arrows)])
    folded, written = [
        await _fingerprint(Rebuild(plan, files, decoding, tuple(shared.names)), shared)
        for plan in (rebase.old, rebase.new)
    ]
    if folded != written:
        raise ArtifactCorruptError(
            f"the base of epoch {rebase.new.base.epoch} at {rebase.new.position!r} has "
            f"{written.rows} {noun(written.rows, 'row')} and is not the table that epoch "
            f"{rebase.old.base.epoch} leads to, "
            f"which has {folded.rows}: one of them is wrong; write a new base from the source"
        )
    return True


async def _fingerprint(rebuild: Rebuild, columns: pa.Schema) -> Fingerprint:
    fingerprint = Fingerprint()
    async with aclosing(rebuild.pieces()) as pieces:
        async for piece in pieces:
            await finish(asyncio.to_thread(_add, fingerprint, piece, columns))
    return fingerprint


def _add(fingerprint: Fingerprint, piece: pa.Table, columns: pa.Schema) -> None:
    for batch in piece.to_batches():
        fingerprint.add(fitted(batch, columns))


@dataclass(frozen=True, slots=True)
class Checked:
    """One file, its number of rows, and its problem, if any."""

    path: str
    size_bytes: int
    rows: int
    problem: StreamfoldError | None


@dataclass(frozen=True, slots=True)
class Verification:
    """The extent of a verification, and all problems."""

    table: str
    head_position: str
    artifacts: int
    files: int
    size_bytes: int
    #: Rows and changes decoded, in all formats.
    rows: int
    #: Files without a hash in the manifest. Only their sizes and counts were compared.
    unhashed: int
    problems: tuple[Checked, ...]
    #: Bases whose rows were compared with those that the previous epoch leads to, and re-bases that
    #: could not be compared: after a gap, without a schema, or with an unreadable file.
    compared: int = 0
    incomparable: int = 0

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class Verifier:
    """Verifies every live file of one manifest, in every format, one file at a time."""

    manifest: Manifest
    files: PartFiles
    decoding: Decoding
    deep: bool = False

    async def run(self, on_file: Callable[[Checked], None] | None = None) -> Verification:
        """Return the verification. `on_file` is called with each checked file."""
        checked: list[Checked] = []
        parts = self.parts()
        for part, chosen in parts.values():
            checked.append(await self._check(part, chosen))
            if on_file:
                on_file(checked[-1])
        verification = Verification(
            self.manifest.table,
            self.manifest.head_position,
            artifacts=len(self.manifest.artifacts),
            files=len(checked),
            size_bytes=sum(file.size_bytes for file in checked),
            rows=sum(file.rows for file in checked),
            unhashed=sum(part.sha256 is None for part, _ in parts.values()),
            problems=tuple(file for file in checked if file.problem),
        )
        return await self._compare_bases(verification) if self.deep else verification

    async def _compare_bases(self, verification: Verification) -> Verification:
        """Return the verification, adding re-bases whose two tables differ to the problems."""
        problems = {file.path: file for file in verification.problems}
        compared = 0
        for rebase in rebases_of(self.manifest):
            if rebase.paths() & problems.keys():
                continue  # one of them is unreadable, which is already reported
            try:
                compared += await check_rebase(rebase, self.files, self.decoding)
            except ArtifactCorruptError as error:
                compared += 1
                problems[rebase.path] = Checked(rebase.path, 0, 0, error)
            except RetryLaterError as error:
                problems[rebase.path] = Checked(rebase.path, 0, 0, error)
        bases = sum(artifact.is_base for artifact in self.manifest.artifacts)
        return replace(
            verification,
            problems=tuple(problems.values()),
            compared=compared,
            incomparable=bases - 1 - compared,
        )

    def parts(self) -> dict[str, tuple[Part, ChosenFiles | None]]:
        """Return every live file once, by path, with the means to read it, if known."""
        parts: dict[str, tuple[Part, ChosenFiles | None]] = {}
        for artifact in self.manifest.artifacts:
            for part, chosen in self._parts_of(artifact):
                parts.setdefault(part.path, (part, chosen))
        return parts

    def _parts_of(self, artifact: Artifact) -> Iterator[tuple[Part, ChosenFiles | None]]:
        for name, files in artifact.formats.items():
            chosen = None
            if name in FORMATS:
                chosen = self.decoding.only(name).choose(self.manifest, artifact)
            yield from ((part, chosen) for part in files.parts)

    async def _check(self, part: Part, chosen: ChosenFiles | None) -> Checked:
        rows = 0
        try:
            async with self.files.open(part) as source:
                if chosen:
                    check = self._check_of_buckets(part, chosen)
                    rows = await finish(asyncio.to_thread(check.count, part, source))
        except (StorageError, RetryLaterError) as error:
            return Checked(part.path, part.size_bytes, rows, error)
        return Checked(part.path, part.size_bytes, rows, None)

    def _check_of_buckets(self, part: Part, chosen: ChosenFiles) -> BucketCheck:
        keys = chosen.schema.key_fields if chosen.schema else ()
        if not keys or part.bucket is None or not _is_of_our_hash(part):
            return BucketCheck(chosen, self.decoding.keys(self.manifest))
        [base] = [
            a for a in self.manifest.artifacts if a.is_base and a.epoch == chosen.artifact.epoch
        ]
        return BucketCheck(chosen, keys, _bucket_count(base))


@dataclass(frozen=True, slots=True)
class BucketCheck:
    """Counts a file's rows, and compares the bucket of each with the file's."""

    chosen: ChosenFiles
    keys: tuple[str, ...]
    #: None if it is unknown which keys a bucket holds.
    buckets: int | None = None

    def count(self, part: Part, source: BinaryIO) -> int:
        """Return the rows or changes. Raises ArtifactCorruptError if one belongs to another bucket."""
        rows = 0
        for batch in self._batches(part, source):
            rows += len(batch)
            if self.buckets is not None:
                self._check(part, self._keys(batch), self.buckets)
        return rows

    def _batches(self, part: Part, source: BinaryIO) -> Iterator[pa.RecordBatch]:
        if self.chosen.artifact.is_base:
            return self.chosen.rows(part, source)
        return self.chosen.changes(part, source, self.keys)

    def _keys(self, batch: pa.RecordBatch) -> list[pa.Array]:
        if self.chosen.artifact.is_base:
            return [batch.column(name) for name in self.keys]
        keys = batch.filter(pc.not_equal(batch.column("action"), "TRUNCATE")).column("key")
        return [pc.struct_field(keys, name) for name in self.keys]

    def _check(self, part: Part, keys: list[pa.Array], buckets: int) -> None:
        # A count that is not a power of two is itself wrong, because no key then has a bucket.
        possible = buckets & (buckets - 1) == 0
        wrong = bucket_numbers(keys, buckets) != part.bucket if possible else np.ones(len(keys[0]))
        if count := int(np.count_nonzero(wrong)):
            raise ArtifactCorruptError(
                f"file {part.path!r} of bucket {part.bucket} of {buckets} holds {count} "
                f"{noun(count, 'row')} of other buckets, which appear twice once they change: "
                "begin a new archive from the source"
            )


def _is_of_our_hash(part: Part) -> bool:
    return part.extra.get(BUCKETING) == SPLITMIX64


def _bucket_count(base: Artifact) -> int:
    """Return the number of buckets for the keys of a base and of the diffs after it."""
    parts = next(iter(base.formats.values())).parts
    if any(part.bucket is None or not _is_of_our_hash(part) for part in parts):
        return 1
    return len({part.bucket for part in parts})
