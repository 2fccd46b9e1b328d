"""The seam between the store and the key-value engine below it.

`SlateEngine` is the implementation; `streamfold.testing.FaultyEngine` wraps one and makes it fail.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeAlias

#: A put (key, value), or a delete (key, None).
Op: TypeAlias = tuple[bytes, bytes | None]
#: Key and value.
Row: TypeAlias = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Run:
    """Tables with disjoint ranges of keys, which are merged as one."""

    id: int
    size: int


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables that hold the engine's rows, with their sizes in bytes."""

    #: Tables that were not merged with others yet.
    young: tuple[int, ...]
    #: From the newest to the oldest.
    runs: tuple[Run, ...]
    #: Bytes committed that no table has yet.
    pending: int = 0
    #: Bytes committed since the engine was opened.
    written: int = 0

    @property
    def total(self) -> int:
        """Bytes of all rows, deleted ones included that no merge has dropped yet."""
        return sum(self.young) + sum(run.size for run in self.runs) + self.pending


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes that the engine's files take on its storage."""

    total: int
    #: Of these, tables that a merge has replaced and that are not deleted yet.
    replaced: int


class Engine(Protocol):
    """An ordered map of bytes on durable storage, with this process as its only writer."""

    async def commit(self, ops: Sequence[Op]) -> None:
        """Apply `ops` as one; when this returns, they survive a crash and a power cut.

        Several commits may be under way: they take effect in the order of the calls, and if one
        survives, so do all before it. Called by the committer alone, never cancelled. An exception
        means that the outcome is unknown: close the engine and open another before going on.
        Raises StorageFullError when there was no room, which is no more certain of the outcome.
        Raises WriterFencedError once another process has opened the same store.
        """
        ...

    async def get(self, key: bytes) -> bytes | None:
        """The value of `key` as far as it is durable."""
        ...

    def scan(
        self,
        start: bytes,
        end: bytes,
        *,
        first: int = 2,
        descending: bool = False,
        eager: bool = False,
    ) -> AsyncGenerator[list[Row]]:
        """Durable rows with `start` <= key < `end`, in order, as pages of about 1 MiB.

        The first page has at most `first` rows, so that who wants one row reads one. Rows that are
        committed while the scan runs may or may not be in it. Close it when done with it early. An
        `eager` scan fetches what follows before it is asked for, and takes more memory.
        """
        ...

    async def check(self) -> None:
        """Raise WriterFencedError if another process has become the writer; asks the storage.

        Also works after `close`: a failed engine is asked before another is opened in its place, so
        that a process that was replaced does not take the store back.
        """
        ...

    async def tables(self) -> Tables:
        """The tables that hold the rows now."""
        ...

    async def flush(self) -> None:
        """Write what was committed and is only in memory and in the log as a table."""
        ...

    async def merge(self, runs: Sequence[int], *, young: bool) -> bool:
        """Merge these neighbouring runs, by id, into one, and with `young` all young tables too.

        `young` needs the newest run among them. Rows that others among the sources delete or replace
        are dropped, and deletions as well if the oldest run is a source. Returns when it is done;
        False if it cannot be done now.
        """
        ...

    async def collect(self) -> DiskUse:
        """Delete files that storage no longer needs, and tell what is left."""
        ...

    async def close(self, *, flush: bool = True) -> None:
        """Let go of the storage; safe to call twice. After a failure, without flushing."""
        ...


class EngineOpener(Protocol):
    """Opens an engine, and takes over as its only writer; called again after a failure."""

    async def __call__(self) -> Engine: ...


async def first_row(
    engine: Engine, start: bytes, end: bytes, *, descending: bool = False
) -> Row | None:
    """The first row of a scan, or the last one if `descending`."""
    async with aclosing(engine.scan(start, end, first=1, descending=descending)) as pages:
        async for page in pages:
            return page[0]
    return None
