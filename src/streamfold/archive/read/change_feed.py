"""Changes as they were published, diff by diff, across re-bases.

A diff comes as one or more batches. A consumer that applies them has the table at `to_position` after
the batch that is `last`; changes are keyed, so applying some of them again is harmless.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.read.decoding import ChosenFiles, Decoding
from streamfold.archive.read.folding import fitted
from streamfold.archive.read.part_files import PartFiles
from streamfold.archive.read.plan import ChangesPlan
from streamfold.archive.read.rebuild import in_thread, truncates
from streamfold.archive.schema import TableSchema


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of one diff, `(from_position, to_position]`.

    `batch` has the columns action, key, before and after; a TRUNCATE is the first change of its
    diff. An empty diff is one empty batch.
    """

    from_position: str
    to_position: str
    epoch: int
    batch: pa.RecordBatch
    last: bool


@dataclass(frozen=True, slots=True)
class ChangeFeed:
    """The changes of one plan, under the newest schema of its diffs."""

    plan: ChangesPlan
    files: PartFiles
    decoding: Decoding

    async def read(self) -> AsyncGenerator[Changes]:
        """Yield the changes in order."""
        schema = self._schema()
        for artifact in self.plan.diffs:
            diff = self.decoding.choose(self.plan.manifest, artifact)
            held: pa.RecordBatch | None = None
            async with aclosing(self._batches(diff, schema)) as batches:
                async for batch in batches:
                    if held is not None:
                        yield _changes(diff, held, last=False)
                    held = batch
            yield _changes(diff, _empty(schema) if held is None else held, last=True)

    def _schema(self) -> TableSchema | None:
        if not self.plan.diffs:
            return None
        return self.decoding.schema_of(self.plan.manifest, self.plan.diffs[-1])

    async def _batches(
        self, diff: ChosenFiles, schema: TableSchema | None
    ) -> AsyncGenerator[pa.RecordBatch]:
        keys = self.decoding.keys(self.plan.manifest)
        # Any part may hold the TRUNCATE, which has to come before all other changes.
        several = len(diff.parts) > 1
        if several and schema and await truncates(diff, self.files, keys):
            yield _truncate(schema)
        async with aclosing(self.files.open_all(diff.parts)) as opened:
            async for part, source in opened:
                async for batch in in_thread(diff.changes(part, source, keys)):
                    fitting = fitted(batch, schema.changes) if schema else batch
                    yield _without_truncate(fitting) if several else fitting


def _changes(diff: ChosenFiles, batch: pa.RecordBatch, *, last: bool) -> Changes:
    artifact = diff.artifact
    return Changes(str(artifact.from_position), artifact.to_position, artifact.epoch, batch, last)


def _empty(schema: TableSchema | None) -> pa.RecordBatch:
    columns = schema.changes if schema else pa.schema([("action", pa.string())])
    return pa.RecordBatch.from_pylist([], schema=columns)


def _truncate(schema: TableSchema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"action": "TRUNCATE"}], schema=schema.changes)


def _without_truncate(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.filter(pc.not_equal(batch["action"], "TRUNCATE"))
