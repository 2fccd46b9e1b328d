"""Reads rows of the frozen state by kind, and notes what cannot be read."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from streamfold.errors import DataCorruptError
from streamfold.store import rows
from streamfold.store.engine.engine import Engine, KeySpan, Row, TableDamagedError
from streamfold.store.inspection.report import CheckFinding, CheckReport

#: Rows of the first page of a scan.
_FIRST = 100


class RowScan:
    """Scans one engine; counts rows, and reports those that cannot be read."""

    def __init__(self, engine: Engine, report: CheckReport, advance: Callable[[int], None]) -> None:
        self.engine = engine
        self._report = report
        self._advance = advance
        #: Spans of keys that cannot be read, with the damaged file.
        self.damage: list[TableDamagedError] = []

    async def pages(self, start: bytes, end: bytes, kind: str) -> AsyncGenerator[list[Row]]:
        """The rows with `start` <= key < `end` that can be read; `kind` names them in findings."""
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
        """The damaged file that should have the rows of `span`; None if none is known."""
        return next((error.file for error in self.damage if error.span.overlaps(span)), None)

    def decode(self, value: bytes, kind: type[rows.Row], subject: str) -> rows.Row | None:
        """A row; None, and a finding, if it cannot be read."""
        try:
            return rows.decode(value, kind)
        except DataCorruptError as error:
            self.bad_row(subject, str(error))
            return None

    def bad_row(self, subject: str, fault: str) -> None:
        """Report a row that says something impossible."""
        message = f"{subject} is wrong: {fault}"
        self._report.add(CheckFinding(code="row_damaged", message=message))
