"""The status of every table that `publish` shows, and its display."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from streamfold.cli.output import Output
from streamfold.cli.terminal import inert
from streamfold.ingest.postgres.connection import Database, named_failures
from streamfold.ingest.postgres.pgoutput import Lsn, lsn_text
from streamfold.ingest.postgres.slot import ReplicationSlot, find_slot, flush_lag
from streamfold.model.units import approximate_size
from streamfold.snapshotter.status.table_status import (
    ArtifactStatus,
    SparkCounts,
    State,
    TableStatus,
)
from streamfold.wording import noun

#: Seconds between lines about a table when each is a new line, unless its state changes.
_LINE_INTERVAL: Final = 10.0
#: Clears from the cursor to the end of the screen; moves the cursor up.
_CLEAR, _UP = "\x1b[J", "\x1b[{}F"


class PublishedArtifact(msgspec.Struct, frozen=True):
    """The last diff or base. Part of the output with --json."""

    at: str
    position: str
    #: Rows of a base, or changes of a diff.
    rows: int
    bytes: int

    @classmethod
    def of(cls, artifact: ArtifactStatus | None) -> PublishedArtifact | None:
        if artifact is None:
            return None
        return cls(artifact.at, artifact.position, artifact.rows, artifact.size_bytes)

    def __str__(self) -> str:
        rows = noun(self.rows, "row")
        return f"{self.at[11:19]}Z ({self.rows} {rows}, {approximate_size(self.bytes)})"


class TableSummary(msgspec.Struct, frozen=True):
    """The status of one table. Part of the output with --json."""

    table: str
    #: starting, waiting, copying, following, publishing, retrying, stopped or fenced.
    state: str
    #: The position in the database up to which the stream has all changes.
    position: str | None = None
    #: How far the stream lags behind the database; None if unknown.
    lag_bytes: int | None = None
    lag_seconds: float | None = None
    #: Records in the stream that the archive lacks.
    lag_records: int | None = None
    rows_copied: int | None = None
    last_diff: PublishedArtifact | None = None
    last_base: PublishedArtifact | None = None
    error: str | None = None
    #: The newest database commit in the archive.
    archive_position: str | None = None
    #: Number of undecodable records since the table began, and where they are.
    dead_letters: int = 0
    dead_letters_at: str | None = None
    #: Work that Spark did for the table since the snapshotter started.
    spark: SparkCounts = SparkCounts()

    def __str__(self) -> str:
        return "  ".join(self._parts())

    def lines(self, width: int) -> list[str]:
        """Return the text in lines of at most `width` characters, broken between its parts."""
        first, *rest = (inert(part) for part in self._parts())
        lines = [first]
        for part in rest:
            if len(lines[-1]) + 2 + len(part) <= width:
                lines[-1] += f"  {part}"
            else:
                lines.append(f"  {part}")
        return [line[:width] for line in lines]

    def _parts(self) -> list[str]:
        parts = [f"{self.table}  {self.state}"]
        if self.state == "copying" and self.rows_copied is not None:
            parts.append(f"{self.rows_copied} {noun(self.rows_copied, 'row')}")
        if self.position is not None:
            parts.append(f"at {self.position}")
        if self.lag_bytes is not None:
            lag = f"lag {approximate_size(self.lag_bytes)}"
            if self.lag_records is not None:
                lag += f", {self.lag_records} {noun(self.lag_records, 'record')}"
            parts.append(lag)
        parts += [
            f"{kind} {artifact}"
            for kind, artifact in (("diff", self.last_diff), ("base", self.last_base))
            if artifact is not None
        ]
        if self.spark.jobs:
            jobs = noun(self.spark.jobs, "job")
            parts.append(f"Spark {self.spark.jobs} {jobs}, {self.spark.rows} rows")
        if self.dead_letters:
            letters = noun(self.dead_letters, "dead letter")
            parts.append(f"{self.dead_letters} {letters} in {self.dead_letters_at}")
        if self.error is not None:
            parts.append(" ".join(self.error.split()))
        return parts


class SlotWatch:
    """Reads the replication slot through one connection, which it reopens after a failure."""

    def __init__(self, database: Database, slot: str) -> None:
        self._database = database
        self._slot = slot
        self._connection: Any = None

    def read(self) -> tuple[ReplicationSlot, float | None] | None:
        """Return the slot and its lag in seconds, or None if there is no slot."""
        if self._connection is None:
            self._connection = self._database.connect()
        try:
            with named_failures(self._database.shown), self._connection.cursor() as cursor:
                slot = find_slot(cursor, self._slot)
                return None if slot is None else (slot, flush_lag(cursor, slot))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class StatusBoard:
    """Merges the parts' reports into one status per table."""

    def __init__(self, tables: Iterable[str]) -> None:
        self._ingest: dict[str, dict[str, Any]] = {name: {} for name in tables}
        self._snapshotter: dict[str, TableStatus] = {}
        self._slot: tuple[ReplicationSlot, float | None] | None = None
        #: The current problem with the database, if any.
        self.database_error: str | None = None

    def on_ingest(self, line: dict[str, Any]) -> None:
        """Process a line from the ingester."""
        if line.get("table") in self._ingest:
            self._ingest[line["table"]] = line

    def on_slot(self, slot: tuple[ReplicationSlot, float | None] | None) -> None:
        self._slot, self.database_error = slot, None

    def on_snapshotter(self, statuses: dict[str, TableStatus]) -> None:
        self._snapshotter = statuses

    def forget(self, part: str) -> None:
        """Drop the reports of a part that has ended."""
        if part == "ingest":
            self._ingest = {name: {} for name in self._ingest}
        elif part == "snapshotter":
            self._snapshotter = {}

    @property
    def all_copied(self) -> bool:
        """Whether the ingester follows every table."""
        return all(line.get("state") == "following" for line in self._ingest.values())

    @property
    def confirmed(self) -> Lsn:
        return self._slot[0].confirmed if self._slot is not None else Lsn(0)

    def statuses(self) -> dict[str, TableStatus]:
        return self._snapshotter

    def tables(self) -> list[TableSummary]:
        return [self._table(name, line) for name, line in self._ingest.items()]

    def _table(self, name: str, line: dict[str, Any]) -> TableSummary:
        published, slot = self._snapshotter.get(name), self._slot
        letters = None if published is None else published.dead_letters
        state = line.get("state", "starting")
        error = self.database_error
        if published is not None and state == "following":
            if published.state is State.RUNNING and published.last_base is not None:
                state = "publishing"
            elif published.state not in (State.STARTING, State.RUNNING):
                state = str(published.state)
                error = published.last_error.message if published.last_error else error
        return TableSummary(
            name,
            state,
            lsn_text(slot[0].confirmed) if slot is not None and slot[0].confirmed else None,
            None if slot is None else max(0, slot[0].lag_bytes),
            None if slot is None else slot[1],
            None if published is None else published.lag_records,
            line.get("rows"),
            None if published is None else PublishedArtifact.of(published.last_diff),
            None if published is None else PublishedArtifact.of(published.last_base),
            error,
            None if published is None else published.source_head,
            letters.total if letters else 0,
            letters.location if letters else None,
            SparkCounts() if published is None else published.spark,
        )


def _screen(tables: list[TableSummary]) -> list[str]:
    """Return the lines that fit the terminal. Lines beyond the screen could not be redrawn."""
    size = shutil.get_terminal_size()
    width, fitting = size.columns - 1, max(1, size.lines - 2)
    lines = [line for table in tables for line in table.lines(width)]
    if len(lines) <= fitting:
        return lines
    lines = [inert(str(table))[:width] for table in tables]
    if len(lines) > fitting:
        lines[fitting:] = [f"and {len(lines) - fitting} more tables"]
    return lines


def _urgent(table: TableSummary) -> tuple[object, ...]:
    """Return the values whose changes are shown immediately."""
    return table.state, table.error, table.dead_letters > 0


class Screen:
    """Shows the tables: redrawn at a terminal, otherwise as a line per change, or as JSON lines."""

    def __init__(self, *, as_json: bool) -> None:
        self._output = Output(as_json=as_json)
        self._live = not as_json and sys.stdout.isatty()
        self._at_terminal = sys.stdout.isatty() or sys.stderr.isatty()
        self._closed = False
        self._lines: list[str] = []
        self._shown: dict[str, tuple[TableSummary, float]] = {}

    def announce(self, shape: dict[str, object], *lines: str) -> None:
        """Show the publication at its start."""
        self._output.show(shape, "\n".join(lines))

    def show(self, tables: Iterable[TableSummary]) -> None:
        """Show the status of all tables."""
        if self._closed:
            return
        if self._live:
            self._draw(_screen(list(tables)))
            return
        now = time.monotonic()
        for table in tables:
            last, at = self._shown.get(table.table, (None, 0.0))
            changed = last is None or _urgent(table) != _urgent(last)
            due = table != last and (self._output.as_json or now - at >= _LINE_INTERVAL)
            if changed or due:
                self._shown[table.table] = (table, now)
                self._output.show(msgspec.to_builtins(table), str(table))

    def note(self, text: str) -> None:
        """Show a sentence in addition to the tables."""
        if self._closed:
            return
        lines = self._lines
        if self._live:
            self._draw([])
        self._output.note(text)
        if self._live:
            self._draw(lines)

    def hang_up(self) -> None:
        """Stop showing anything if the terminal is gone, because writing to it would fail."""
        self._closed = self._at_terminal

    def _draw(self, lines: list[str]) -> None:
        up = _UP.format(len(self._lines)) if self._lines else ""
        text = "".join(f"{line}\n" for line in lines)
        self._output.write(f"{up}{_CLEAR}{text}".encode())
        self._lines = lines
