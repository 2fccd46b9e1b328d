"""The seam between the store and the key-value engine below it.

`SlateEngine` is the implementation; `streamfold.testing.FaultyEngine` wraps one and makes it fail.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from streamfold.errors import DataCorruptError

#: A put (key, value), or a delete (key, None).
Op: TypeAlias = tuple[bytes, bytes | None]
#: Key and value.
Row: TypeAlias = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class KeySpan:
    """The keys with `start` <= key < `end`."""

    start: bytes
    end: bytes

    def overlaps(self, other: KeySpan) -> bool:
        return self.start < other.end and other.start < self.end


class TableDamagedError(DataCorruptError):
    """The rows of `span` cannot be read, because the table in `file` is damaged; others can."""

    code = "table_damaged"

    def __init__(self, file: str, start: str, end: str) -> None:
        super().__init__(
            f"the file {file!r} is damaged: stop the server, put the same file back from a backup, and "
            "start it again",
            public_message="this needs rows that cannot be read, because storage is damaged: the "
            "operator finds the file to restore in the server's log",
        )
        self.file = file
        #: Hexadecimal.
        self.start, self.end = start, end

    @classmethod
    def in_file(cls, file: str, span: KeySpan) -> TableDamagedError:
        return cls(file, span.start.hex(), span.end.hex())

    @property
    def span(self) -> KeySpan:
        return KeySpan(bytes.fromhex(self.start), bytes.fromhex(self.end))


@dataclass(frozen=True, slots=True)
class Run:
    """Tables with disjoint ranges of keys, merged as one."""

    id: int
    size: int


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables that hold the engine's rows, with their sizes in bytes."""

    #: Tables that were not merged with others yet.
    young: tuple[int, ...]
    #: From the newest to the oldest.
    runs: tuple[Run, ...]
    #: Bytes committed that are not in a table yet.
    pending: int = 0
    #: Bytes committed since the engine was opened.
    written: int = 0

    @property
    def total(self) -> int:
        """Bytes of all rows, including deleted ones that no merge has dropped yet."""
        return sum(self.young) + sum(run.size for run in self.runs) + self.pending


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes that the engine's files take on its storage."""

    total: int
    #: Of these, tables that a merge has replaced and that are not deleted yet.
    replaced: int


@dataclass(frozen=True, slots=True)
class Batch:
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
        """Which opening of the store as its writer this is: each has the number after the last."""
        ...

    def prepare(self, ops: list[Op]) -> Batch:
        """`ops` as `commit` takes them. Copies all bytes, 3 ms per MiB; may be called in any thread."""
        ...

    async def commit(self, batch: Batch) -> None:
        """Apply the batch atomically; when this returns, it survives a crash and a power cut.

        Several commits may be in flight: they take effect in the order of the calls, and if one
        survives, so do all before it. Only the committer calls this. An exception, or a cancellation
        because of a timeout, means that the outcome is unknown, even StorageFullError: close the engine
        and open another.
        Raises WriterFencedError once another process has opened the same store.
        """
        ...

    async def get(self, key: bytes) -> bytes | None:
        """The durable value of `key`; TableDamagedError if that cannot be read."""
        ...

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The durable values of `keys`, in order, read at the same time."""
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

        The first page has at most `first` rows, so that a caller that needs one row reads one. Rows
        committed while the scan runs may or may not be in it. Close a scan that is not read to its end.
        Raises TableDamagedError where rows cannot be read, after all rows before them; a scan from the
        end of its span continues after them.
        An `eager` scan fetches pages in advance, and takes more memory.
        """
        ...

    @property
    def damaged_files(self) -> Sequence[str]:
        """Files in which reads have met damage, below the location of the store."""
        ...

    async def check(self) -> None:
        """Read from storage whether another process is the writer now; WriterFencedError if so.

        Also works after `close`: the supervisor checks a failed engine before it opens the next, so
        that a replaced process does not take the store back.
        """
        ...

    async def frozen(self) -> bool:
        """Whether another process, a check or a backup, may need files that are no longer needed here.

        Ask after the commit that makes a file unnecessary is durable, and before deleting the file.
        """
        ...

    async def tables(self) -> Tables:
        """The tables that hold the rows now."""
        ...

    async def flush(self) -> None:
        """Write committed rows that are only in memory and in the WAL as a table."""
        ...

    async def merge(self, runs: Sequence[int], *, young: bool) -> bool:
        """Merge these neighbouring runs, by id, into one, and all young tables with `young`.

        `young` requires the newest run. Drops rows that other sources delete or replace, and the
        deletions, too, if the oldest run is a source. Returns when the merge is done, or False if it
        is not possible now.
        """
        ...

    async def collect(self) -> DiskUse:
        """Delete files that are no longer needed, and measure the rest."""
        ...

    async def close(self, *, flush: bool = True) -> None:
        """Close the storage; safe to call twice. After a failure, call it without `flush`."""
        ...


class EngineOpener(Protocol):
    """Opens an engine as its only writer; called again after a failure."""

    async def __call__(self) -> Engine: ...


async def commit_rows(engine: Engine, ops: Sequence[Op]) -> None:
    """Commit a few rows."""
    await engine.commit(engine.prepare(list(ops)))


def size_of(ops: Sequence[Op]) -> int:
    """Bytes of keys and values."""
    return sum([len(key) + len(value or b"") for key, value in ops])


async def readable_pages(
    engine: Engine, start: bytes, end: bytes, first: int
) -> AsyncGenerator[list[Row]]:
    """A scan that leaves out rows that cannot be read: only for work on each row by itself."""
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
    """The first row of a scan, or the last one if `descending`."""
    async with aclosing(engine.scan(start, end, first=1, descending=descending)) as pages:
        async for page in pages:
            return page[0]
    return None
