"""Everything that an archive says about itself, held against its files.

Links, order and head are rules of the manifest, and are checked whenever one is read. Here every file
is fetched once: it is there, has its size and its SHA-256, and decodes to as many rows as it should.
A deep verification also compares the rows of each base with what the epoch before leads to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.registry import FORMAT_IDS
from streamfold.archive.maintenance.rebase_check import check_rebase, rebases_of
from streamfold.archive.manifest.model import Artifact, Manifest, Part
from streamfold.archive.read.decoding import Chosen, Decoding
from streamfold.archive.read.part_files import PartFiles
from streamfold.blob.local.files import finish
from streamfold.errors import RetryLaterError, StorageError, StreamfoldError


@dataclass(frozen=True, slots=True)
class Checked:
    """One file, how many rows it holds, and what is wrong with it if anything is."""

    path: str
    size_bytes: int
    rows: int
    problem: StreamfoldError | None


@dataclass(frozen=True, slots=True)
class Verification:
    """What was looked at, and all that is wrong."""

    table: str
    head_position: str
    artifacts: int
    files: int
    size_bytes: int
    #: Rows and changes that were decoded, in all formats.
    rows: int
    #: Files of which the manifest states no hash: only their sizes and counts were compared.
    unhashed: int
    problems: tuple[Checked, ...]
    #: Bases whose rows were compared with what the epoch before leads to, and other re-bases: after
    #: a gap, without a schema, or with a file that cannot be read.
    compared: int = 0
    incomparable: int = 0

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class Verifier:
    """Looks at every live file of one manifest, in every format, one file at a time."""

    manifest: Manifest
    files: PartFiles
    decoding: Decoding
    deep: bool = False

    async def run(self, on_file: Callable[[Checked], None] | None = None) -> Verification:
        """Return what was found; `on_file` hears of each file when it is done with."""
        checked: list[Checked] = []
        parts = self.parts()
        for part, chosen in parts.values():
            checked.append(await self._check(part, chosen))
            if on_file:
                on_file(checked[-1])
        found = Verification(
            self.manifest.table,
            self.manifest.head_position,
            artifacts=len(self.manifest.artifacts),
            files=len(checked),
            size_bytes=sum(file.size_bytes for file in checked),
            rows=sum(file.rows for file in checked),
            unhashed=sum(part.sha256 is None for part, _ in parts.values()),
            problems=tuple(file for file in checked if file.problem),
        )
        return await self._compare_bases(found) if self.deep else found

    async def _compare_bases(self, found: Verification) -> Verification:
        """Return what was found, and which bases are not what the epochs before them lead to."""
        problems = {file.path: file for file in found.problems}
        compared = 0
        for rebase in rebases_of(self.manifest):
            if rebase.paths() & problems.keys():
                continue  # it is known that one of them cannot be read
            try:
                compared += await check_rebase(rebase, self.files, self.decoding)
            except ArtifactCorruptError as error:
                compared += 1
                problems[rebase.path] = Checked(rebase.path, 0, 0, error)
            except RetryLaterError as error:
                problems[rebase.path] = Checked(rebase.path, 0, 0, error)
        bases = sum(artifact.is_base for artifact in self.manifest.artifacts)
        return replace(
            found,
            problems=tuple(problems.values()),
            compared=compared,
            incomparable=bases - 1 - compared,
        )

    def parts(self) -> dict[str, tuple[Part, Chosen | None]]:
        """Return every live file once, by path, with the way to read it if there is one."""
        found: dict[str, tuple[Part, Chosen | None]] = {}
        for artifact in self.manifest.artifacts:
            for part, chosen in self._parts_of(artifact):
                found.setdefault(part.path, (part, chosen))
        return found

    def _parts_of(self, artifact: Artifact) -> Iterator[tuple[Part, Chosen | None]]:
        for name, files in artifact.formats.items():
            chosen = None
            if name in FORMAT_IDS:
                chosen = self.decoding.only(name).choose(self.manifest, artifact)
            yield from ((part, chosen) for part in files.parts)

    async def _check(self, part: Part, chosen: Chosen | None) -> Checked:
        rows = 0
        try:
            async with self.files.open(part) as source:
                if chosen:
                    keys = self.decoding.keys(self.manifest)
                    rows = await finish(asyncio.to_thread(_count, chosen, part, source, keys))
        except (StorageError, RetryLaterError) as error:
            return Checked(part.path, part.size_bytes, rows, error)
        return Checked(part.path, part.size_bytes, rows, None)


def _count(chosen: Chosen, part: Part, source: BinaryIO, keys: tuple[str, ...]) -> int:
    if chosen.artifact.is_base:
        return sum(len(batch) for batch in chosen.rows(part, source))
    return sum(len(batch) for batch in chosen.changes(part, source, keys))
