"""The seam between the store and the key-value engine below it.

`SlateEngine` is the implementation. `streamfold.testing.FaultyEngine` wraps an engine and makes it
fail.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from streamfold.errors import DataCorruptError

#: A put (key, value) or a delete (key, None).
Op: TypeAlias = tuple[bytes, bytes | None]
#: A key and its value.
Row: TypeAlias = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class KeySpan:
    """The keys with `start` <= key < `end`."""

    start: bytes
    end: bytes

    def overlaps(self, other: KeySpan) -> bool:
        return self.start < other.end and other.start < self.end


class TableDamagedError(DataCorruptError):
    """Raised when the rows of `span` cannot be read because the table in `file` is damaged.

    Other rows can be read.
    """

    code = "table_damaged"

    def __init__(self, file: str, start: str, end: str) -> None:
        super().__init__(
            f"the file {file!r} is damaged: stop the server, put the same file back from a backup, and "
            "start it again",
            public_message="this needs rows that cannot be read, because storage is damaged: the "
            "operator finds the file to restore in the server's log",
        )
        self.file = file
        #: The span's keys in hexadecimal.
        self.start, self.end = start, end

    @classmethod
    def in_file(cls, file: str, span: KeySpan) -> TableDamagedError:
        return cls(file, span.start.hex(), span.end.hex())

    @property
    def span(self) -> KeySpan:
        return KeySpan(bytes.fromhex(self.start), bytes.fromhex(self.end))


@dataclass(frozen=True, slots=True)
class TableRun:
    """Tables with disjoint ranges of keys, merged as one."""

    id: int
    size: int


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables that hold the engine's rows, with their sizes in bytes."""

    #: Sizes of tables not yet merged with others.
    young: tuple[int, ...]
    #: From newest to oldest.
    runs: tuple[TableRun, ...]
    #: Committed bytes that are not in a table yet.
    pending: int = 0
    #: Bytes committed since the engine was opened.
    written: int = 0

    @property
    def total(self) -> int:
        """Bytes of all rows, including deleted rows that no merge has dropped yet."""
        return sum(self.young) + sum(run.size for run in self.runs) + self.pending


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes of storage that the engine's files take."""

    total: int
    #: Bytes of tables that a merge has replaced but that are not deleted yet. Included in the
    #: total.
    replaced: int


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """Rows that are ready to be committed."""

    ops: Sequence[Op]
    #: Bytes of keys and values.
    size: int
    #: The rows in the engine's own memory.
    native: Any = None


class Engine(Protocol):
    """An ordered map of bytes on durable storage, with this process as its only writer."""

    @property
    def epoch(self) -> int:
        """The number of this opening by a writer. Each opening increases it by one."""
        ...

    def prepare(self, ops: list[Op]) -> WriteBatch:
        """Prepare `ops` for `commit`.

        Copies all bytes, 3 ms per MiB. May be called in any thread.
        """
        ...

    async def commit(self, batch: WriteBatch) -> None:
        """Apply the batch atomically. Once this returns, it survives a crash and a power cut.

        Several commits may be in flight. They take effect in call order, and if one survives, so do
        all before it. Only the committer calls this. An exception, or a cancellation due to a
        timeout, means that the outcome is unknown, even StorageFullError: close the engine and open
        another. Raises WriterFencedError once another process has opened the same store.
        """
        ...

    async def get(self, key: bytes) -> bytes | None:
        """Return the durable value of `key`. Raises TableDamagedError if it cannot be read."""
        ...

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the durable values of `keys`, in order, read concurrently."""
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
        """Yield durable rows with `start` <= key < `end`, in order, as pages of about 1 MiB.

        The first page has at most `first` rows, so that a caller that needs one row reads one. Rows
        committed during the scan may or may not be included. Close a scan that is not read to its
        end. Raises TableDamagedError where rows cannot be read, after yielding all rows before
        them. A scan from the end of the error's span continues after them. An `eager` scan
        prefetches pages and takes more memory.
        """
        ...

    @property
    def damaged_files(self) -> Sequence[str]:
        """Files in which reads have found damage, relative to the store's location."""
        ...

    async def check(self) -> None:
        """Check on storage for another writer. Raises WriterFencedError if there is one.

        Also works after `close`: the supervisor checks a failed engine before it opens the next, so
        that a replaced process does not take the store back.
        """
        ...

    async def frozen(self) -> bool:
        """Return whether another process, a check or a backup, may need files not needed here.

        Ask after the commit that makes a file unnecessary is durable, and before deleting the file.
        """
        ...

    async def tables(self) -> Tables:
        """Return the tables that currently hold the rows."""
        ...

    async def flush(self) -> None:
        """Write committed rows that are only in memory and the WAL to a table."""
        ...

    async def merge(self, runs: Sequence[int], *, young: bool) -> bool:
        """Merge these adjacent runs, by id, into one. With `young`, include all young tables.

        `young` requires the newest run. Drops rows that other sources delete or replace, and also
        the deletions if the oldest run is a source. Returns True when the merge is done, or False
        if it is not possible now.
        """
        ...

    async def collect(self) -> DiskUse:
        """Delete files that are no longer needed, and measure the rest."""
        ...

    async def close(self, *, flush: bool = True) -> None:
        """Close the storage. Safe to call twice. After a failure, call it without `flush`."""
        ...


class EngineOpener(Protocol):
    """Opens an engine as its only writer. Called again after a failure."""

    async def __call__(self) -> Engine: ...


async def commit_rows(engine: Engine, ops: Sequence[Op]) -> None:
    """Commit a few rows."""
    await engine.commit(engine.prepare(list(ops)))


def size_of(ops: Sequence[Op]) -> int:
    """Return the bytes of keys and values."""
    return sum([len(key) + len(value or b"") for key, value in ops])


async def readable_pages(
    engine: Engine, start: bytes, end: bytes, first: int
) -> AsyncGenerator[list[Row]]:
    """Scan, skipping unreadable rows. Only for work that handles each row independently."""
    while start < end:
        try:
            async with aclosing(engine.scan(start, end, first=first)) as pages:
                async for page in pages:
                    yield page
            return
        except TableDamagedError as damage:
            start = damage.span.end


async def first_row(
    engine: Engine, start: bytes, end: bytes, *, descending: bool = False
) -> Row | None:
    """Return the first row of a scan, or the last if `descending`."""
    async with aclosing(engine.scan(start, end, first=1, descending=descending)) as pages:
        async for page in pages:
            return page[0]
    return None
