"""Archives on disk for reader tests, and their contents as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa

import streamfold.archive
from streamfold.archive import Archive, Changes, Rows, SourceRange
from streamfold.archive.destinations.destination import Destination
from streamfold.archive.write.writer import ArchiveWriter
from tests.archive.tables import Clock, changes, open_writer, rows
from tests.s3 import S3Server


def folder_at(path: Path) -> Destination:
    """Return the destination of an archive in a local folder."""
    return Destination.open(path.as_uri())


def bucket_at(url: str, server: S3Server) -> Destination:
    """Return the destination of an archive in a bucket."""
    return Destination.open(url, credential_provider=None, **server.options())


def names_by_id(table: pa.Table | pa.RecordBatch) -> dict[int, str]:
    """Return the state of the small table; no id may be there twice."""
    found = dict(zip(table["id"].to_pylist(), table["name"].to_pylist(), strict=True))
    assert len(found) == len(table)
    return found


async def state_at(archive: Archive, position: str | None = None) -> dict[int, str]:
    return names_by_id(await archive.table(position=position))


async def reopened(path: Path) -> Archive:
    return await streamfold.archive.open(path)


class Consumer:
    """A table kept up to date by what a follower gives, as an application would do it.

    Most changes may be applied twice without a trace in the table, so it checks that none are.
    """

    def __init__(self, state: Mapping[int, str] | None = None) -> None:
        self.state: dict[int, str] = dict(state or {})
        self.reloads: list[str] = []
        #: The end of the last whole diff or table; None before the first.
        self.position: str | None = None

    def take(self, news: Rows | Changes) -> None:
        if isinstance(news, Rows):
            if news.first:
                self.state.clear()
                self.reloads.append(news.reason)
            self.state.update(names_by_id(news.batch))
            self.position = news.position if news.last else None
            return
        assert self.position in (None, news.from_position), (
            f"changes from {news.from_position} came to a table at {self.position}"
        )
        self.apply([news.batch])
        self.position = news.to_position if news.last else news.from_position

    def apply(self, batches: Iterable[pa.RecordBatch]) -> None:
        for change in (change for batch in batches for change in batch.to_pylist()):
            match change["action"]:
                case "TRUNCATE":
                    self.state.clear()
                case "DELETE":
                    self.state.pop(change["key"]["id"], None)
                case _:
                    self.state[change["key"]["id"]] = change["after"]["name"]


async def write_history(path: Path, clock: Clock | None = None) -> ArchiveWriter:
    """Write two epochs with a closing diff between them; `HISTORY` says what is where."""
    clock = clock or Clock()
    writer = await open_writer(folder_at(path), clock=clock)
    await writer.write_base(rows({1: "a", 2: "b"}), "9", reason="first")
    clock.advance(minutes=1)
    await writer.write_diff(changes(("UPDATE", 1, "A"), ("INSERT", 3, "c")), "9", "14")
    clock.advance(minutes=1)
    await writer.write_diff(changes(("DELETE", 2, None)), "14", "20")
    clock.advance(minutes=1)
    closing = changes(("INSERT", 4, "d"))
    await writer.rebase(rows({1: "A", 3: "c", 4: "d"}), closing, "25", reason="forced")
    clock.advance(minutes=1)
    await writer.write_diff(changes(("UPDATE", 4, "D")), "25", "31")
    return writer


#: The table at the end of every artifact of `write_history`, which are a minute apart.
HISTORY: dict[str, dict[int, str]] = {
    "9": {1: "a", 2: "b"},
    "14": {1: "A", 2: "b", 3: "c"},
    "20": {1: "A", 3: "c"},
    "25": {1: "A", 3: "c", 4: "d"},
    "31": {1: "A", 3: "c", 4: "D"},
}


def commits(first: str | None, last: str, *, copying: bool = False) -> SourceRange:
    return SourceRange(first=first, last=last, copying=copying)


async def write_commits(path: Path) -> None:
    """The table of `HISTORY`, with a first copy at 0/10 of which the first base has one row."""
    writer = await open_writer(folder_at(path))
    copying = commits(None, "0/10", copying=True)
    await writer.write_base(rows({1: "a"}), "8", reason="first", source_range=copying)
    last = commits("0/10", "0/10")
    await writer.write_diff(changes(("INSERT", 2, "b")), "8", "9", source_range=last)
    some = commits("0/20", "0/2F")
    two = changes(("UPDATE", 1, "A"), ("INSERT", 3, "c"))
    await writer.write_diff(two, "9", "14", source_range=some)
    one = commits("0/FFFFFFFF", "0/FFFFFFFF")
    await writer.write_diff(changes(("DELETE", 2, None)), "14", "20", source_range=one)
    closing, later = changes(("INSERT", 4, "d")), commits("1/0", "1/8")
    state = {1: "A", 3: "c", 4: "d"}
    await writer.rebase(rows(state), closing, "25", reason="forced", source_range=later)
    end = commits("A/1", "A/2")
    await writer.write_diff(changes(("UPDATE", 4, "D")), "25", "31", source_range=end)
