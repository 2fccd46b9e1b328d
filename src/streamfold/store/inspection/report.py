"""The findings of a check, and a scan of the store's rows that records unreadable ones."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

import msgspec

from streamfold.errors import DataCorruptError
from streamfold.store import rows
from streamfold.store.engine.engine import Engine, KeySpan, Row, TableDamagedError

#: Findings listed individually. Further ones are only counted.
_LISTED_MAX: Final = 1000


class Severity(enum.StrEnum):
    """The severity of a finding."""

    #: Something acknowledged is unreadable, or will be.
    DAMAGE = "damage"
    #: Something is not as it should be, but no data is lost.
    WARNING = "warning"


class CheckFinding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One problem in a store."""

    #: Stable. `docs/operations/checking.md` lists the codes.
    code: str
    #: A sentence for operators.
    message: str
    severity: Severity = Severity.DAMAGE
    basin: str | None = None
    stream: str | None = None
    stream_id: int | None = None
    #: The affected records: the first, and the one after the last.
    first_seq_num: int | None = None
    next_seq_num: int | None = None
    #: The affected file, relative to the store's location.
    file: str | None = None


class CheckCounts(msgspec.Struct):
    """Counts of what a check read."""

    rows: int = 0
    basins: int = 0
    streams: int = 0
    forks: int = 0
    producers: int = 0
    access_tokens: int = 0
    documents: int = 0
    chunks: int = 0
    #: Chunks with encrypted records, of which only position, size and checksum were checked.
    sealed_chunks: int = 0
    records: int = 0
    chunk_files: int = 0
    chunk_file_bytes: int = 0
    snapshots: int = 0
    snapshot_bytes: int = 0
    tables: int = 0
    table_bytes: int = 0
    log_files: int = 0
    #: Files that no row names, and their bytes. Upkeep deletes them after a grace period of days.
    unnamed_files: int = 0
    unnamed_bytes: int = 0
    #: Unpublished snapshot parts.
    staged_parts: int = 0


class CheckReport(msgspec.Struct):
    """The result of a check."""

    store: str
    #: The store's format; None if it is unreadable.
    format: int | None = None
    counts: CheckCounts = msgspec.field(default_factory=CheckCounts)
    findings: list[CheckFinding] = []
    #: Findings that are not listed because the list is full.
    unlisted: int = 0
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether no damage was found and every finding is listed."""
        return not self.unlisted and not any(
            finding.severity is Severity.DAMAGE for finding in self.findings
        )

    def add(self, finding: CheckFinding) -> None:
        if len(self.findings) < _LISTED_MAX:
            self.findings.append(finding)
        else:
            self.unlisted += 1


#: Rows in the first page of a scan.
_FIRST = 100


class RowScan:
    """Scans one engine, counts its rows and reports unreadable ones."""

    def __init__(self, engine: Engine, report: CheckReport, advance: Callable[[int], None]) -> None:
        self.engine = engine
        self._report = report
        self._advance = advance
        #: Unreadable key spans, with the damaged file of each.
        self.damage: list[TableDamagedError] = []

    async def pages(self, start: bytes, end: bytes, kind: str) -> AsyncGenerator[list[Row]]:
        """Yield the readable rows with `start` <= key < `end`. `kind` names them in findings."""
        while start < end:
            try:
                async with aclosing(
                    self.engine.scan(start, end, first=_FIRST, eager=True)
                ) as pages:
                    async for page in pages:
                        self._report.counts.rows += len(page)
                        self._advance(sum([len(key) + len(value) for key, value in page]))
                        yield page
                return
            except TableDamagedError as error:
                self._note(error, kind)
                start = error.span.end

    def _note(self, error: TableDamagedError, kind: str) -> None:
        self.damage.append(error)
        self._report.add(
            CheckFinding(
                code="table_damaged",
                message=f"{kind} cannot all be read: the file {error.file!r} is damaged; stop the "
                "server, put the same file back from a backup, and start it again",
                file=error.file,
            )
        )

    def file_of(self, span: KeySpan) -> str | None:
        """Return the damaged file that should contain the rows of `span`; None if none is known."""
        return next((error.file for error in self.damage if error.span.overlaps(span)), None)

    def decode(self, value: bytes, kind: type[rows.Row], subject: str) -> rows.Row | None:
        """Decode a row. If it cannot be read, add a finding and return None."""
        try:
            return rows.decode(value, kind)
        except DataCorruptError as error:
            self.bad_row(subject, str(error))
            return None

    def bad_row(self, subject: str, fault: str) -> None:
        """Report a row with impossible content."""
        message = f"{subject} is wrong: {fault}"
        self._report.add(CheckFinding(code="row_damaged", message=message))
