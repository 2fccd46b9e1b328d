"""A small table for tests: rows by id, changes, and writers with ids and times of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import pyarrow as pa

from streamfold.archive.destinations.destination import Destination
from streamfold.archive.formats import Format, JsonlFormat
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.writer import ArchiveWriter
from streamfold.blob import BlobStore

SCHEMA = TableSchema.of(pa.schema([("id", pa.int64()), ("name", pa.string())]), ["id"])
START = datetime(2026, 6, 3, 12, 0, tzinfo=UTC)

#: The state of the table: names by id.
State = Mapping[int, str]
#: An action, an id, and the name after it.
Change = tuple[str, int | None, str | None]


class Clock:
    """A clock that tests move by hand."""

    def __init__(self) -> None:
        self.time = START

    def now(self) -> datetime:
        return self.time

    def advance(self, **parts: float) -> None:
        self.time += timedelta(**parts)


def new_ids(prefix: str = "id") -> Callable[[], str]:
    """Return a source of ids that are the same in every run."""
    numbers = itertools.count()
    return lambda: f"{prefix}{next(numbers):08d}"


def rows(state: State) -> list[pa.RecordBatch]:
    """Return the rows of a base."""
    plain = [{"id": key, "name": name} for key, name in sorted(state.items())]
    return [pa.RecordBatch.from_pylist(plain, schema=SCHEMA.arrow)]


def changes(*given: Change) -> list[pa.RecordBatch]:
    """Return the changes of a diff, as they are given."""
    plain = [
        {
            "action": action,
            "key": None if key is None else {"id": key},
            "before": None,
            "after": None if name is None else {"id": key, "name": name},
        }
        for action, key, name in given
    ]
    return [pa.RecordBatch.from_pylist(plain, schema=SCHEMA.changes)]


def net_changes(before: State, after: State) -> list[pa.RecordBatch]:
    """Return what turns one state into another."""
    found: list[Change] = []
    for key in sorted({*before, *after}):
        if key not in after:
            found.append(("DELETE", key, None))
        elif before.get(key) != after[key]:
            found.append(("UPDATE" if key in before else "INSERT", key, after[key]))
    return changes(*found)


def at(blobs: BlobStore, uri: str = "memory:table/") -> Destination:
    """Return the destination in a store that the test holds itself."""
    return Destination(blobs, uri)


async def open_writer(
    *destinations: Destination,
    writer_id: str = "writer-1",
    ids: str = "id",
    clock: Clock | None = None,
    formats: Sequence[Format] = (JsonlFormat(),),
    schema: TableSchema = SCHEMA,
) -> ArchiveWriter:
    """Return a writer of the table."""
    return await ArchiveWriter.open(
        "public.users",
        schema,
        destinations,
        formats=formats,
        writer_id=writer_id,
        now=(clock or Clock()).now,
        new_id=new_ids(ids),
    )
