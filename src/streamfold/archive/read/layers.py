"""The files that make up one bucket of a table: a base, and the diffs after it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import BinaryIO

import msgspec

from streamfold.archive.buckets import BUCKETING, SPLITMIX64, TRUNCATES
from streamfold.archive.destinations.destination import finish_all
from streamfold.archive.errors import ManifestInvalidError
from streamfold.archive.formats.format import Format
from streamfold.archive.manifest.model import Artifact, Manifest, Part
from streamfold.archive.read.decoding import Decoding
from streamfold.archive.read.part_files import PartFiles
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.artifacts import PartPlan, WrittenPart


class OpenFiles:
    """Opens verified files, several at a time. Entered on the loop, used in another thread.

    On exit, the event loop closes files that are still open, however the thread ended.
    """

    def __init__(self, files: PartFiles) -> None:
        self._files = files
        self._open_files = AsyncExitStack()

    async def __aenter__(self) -> OpenFiles:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._open_files.aclose()

    def open(self, parts: Sequence[Part]) -> list[BinaryIO]:
        """Open files concurrently, closing those of the previous call. Never called on the loop."""
        return asyncio.run_coroutine_threadsafe(self._open(parts), self._loop).result()

    async def _open(self, parts: Sequence[Part]) -> list[BinaryIO]:
        await self._open_files.aclose()
        self._open_files = stack = AsyncExitStack()
        return await finish_all(stack.enter_async_context(self._files.open(part)) for part in parts)


@dataclass(frozen=True, slots=True)
class Layer:
    """One artifact's parts by bucket. Parts that may hold any key are under None."""

    form: Format
    schema: TableSchema
    parts: Mapping[int | None, tuple[Part, ...]]
    clears: bool = False

    @classmethod
    def of(cls, manifest: Manifest, artifact: Artifact) -> Layer:
        """Make the layer of a committed artifact, in its fastest format."""
        chosen = Decoding().choose(manifest, artifact)
        if chosen.schema is None:
            raise ManifestInvalidError(
                f"the {artifact.kind} of table {manifest.table!r} at {artifact.to_position!r} has no "
                "schema, so it cannot be folded: give this table an empty folder"
            )
        return cls._of_parts(chosen.form, chosen.schema, [_of_our_hash(p) for p in chosen.parts])

    @classmethod
    def pending(cls, plan: PartPlan, written: Sequence[WrittenPart]) -> Layer:
        """Make the layer of an artifact that is written but not yet committed."""
        form = plan.formats[0]
        return cls._of_parts(form, plan.schema, [part.files[form.id] for part in written])

    @classmethod
    def _of_parts(cls, form: Format, schema: TableSchema, parts: Sequence[Part]) -> Layer:
        by_bucket: dict[int | None, tuple[Part, ...]] = {}
        for part in parts:
            by_bucket[part.bucket] = (*by_bucket.get(part.bucket, ()), part)
        return cls(form, schema, by_bucket, any(part.extra.get(TRUNCATES) for part in parts))

    def of_bucket(self, bucket: int) -> tuple[Part, ...]:
        """Return the parts that may hold the bucket's keys."""
        return self.parts.get(bucket, ()) + self.parts.get(None, ())

    @property
    def is_bucketed(self) -> bool:
        return None not in self.parts

    @property
    def buckets(self) -> int:
        return len(self.parts) if self.is_bucketed else 1

    def whole(self) -> Layer:
        """Return the same files, where each may hold any key."""
        files = [part for parts in self.parts.values() for part in parts]
        return replace(self, parts={None: tuple(_without_bucket(part) for part in files)})


def _of_our_hash(part: Part) -> Part:
    """Return the part, without its bucket unless our hash chose it: otherwise it may hold any key."""
    if part.bucket is None or part.extra.get(BUCKETING) == SPLITMIX64:
        return part
    return _without_bucket(part)


def _without_bucket(part: Part) -> Part:
    return msgspec.structs.replace(part, bucket=None)


@dataclass(frozen=True, slots=True)
class Stack:
    """A table as files: each bucket folds independently."""

    base: Layer | None
    diffs: tuple[Layer, ...]
    #: Number of buckets in the base. Every diff after it has the same number.
    buckets: int

    @classmethod
    def of(cls, manifest: Manifest) -> Stack:
        """Make the stack of the table at its archive's head."""
        base = Layer.of(manifest, manifest.base)
        diffs = tuple(Layer.of(manifest, diff) for diff in manifest.chain)
        if base.is_bucketed:
            return cls(base, diffs, base.buckets)
        # Treat everything as one bucket, because a part with another number would never be read.
        return cls(base.whole(), tuple(diff.whole() for diff in diffs), base.buckets)

    @property
    def is_bucketed(self) -> bool:
        """Return whether the base has a separate part for each bucket."""
        return self.base is not None and self.base.is_bucketed

    def with_diff(self, diff: Layer) -> Stack:
        return Stack(self.base, (*self.diffs, diff), self.buckets)

    def touched(self) -> set[int]:
        """Return the buckets in which a row may have changed since the base."""
        everything = set(range(self.buckets))
        if any(diff.clears or not diff.is_bucketed for diff in self.diffs):
            return everything
        return {bucket for diff in self.diffs for bucket in diff.parts if bucket is not None}
