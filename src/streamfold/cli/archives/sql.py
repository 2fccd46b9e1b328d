"""`streamfold archive sql`: one statement of SQL over the table of an archive."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import click
import msgspec

from streamfold.cli.archives.options import (
    at_option,
    at_source_option,
    open_archive,
    reading_options,
    table_at,
    uri_argument,
    verb,
)
from streamfold.cli.output import Output, ProgressBar
from streamfold.cli.parameters import ByteSize
from streamfold.errors import InvalidError
from streamfold.wording import noun

if TYPE_CHECKING:
    import pyarrow as pa

#: Characters that would move the cursor of a terminal or end a line of the table.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@verb("sql")
@uri_argument
@click.argument("statement")
@at_option
@at_source_option
@click.option(
    "--column", "columns", multiple=True, metavar="NAME", help="Fetch only these columns."
)
@click.option(
    "--memory",
    type=ByteSize(),
    default="1GiB",
    show_default=True,
    help="Memory of DuckDB, which spills to temporary files beyond it.",
)
@reading_options
async def sql(
    output: Output,
    uri: str,
    statement: str,
    at: str | None,
    at_source: str | None,
    columns: tuple[str, ...],
    memory: int,
    **reading: Any,
) -> None:
    """Run a SELECT over the table at the head, or at any position or time, with DuckDB.

    The table has its name from the manifest, with or without its schema. The statement can read
    nothing else: no files, no network, no extensions; and it cannot write.
    """
    from streamfold.archive.engines.sql import open_sql

    archive = await open_archive(uri, **reading)
    point = table_at(archive, at, at_source)
    expected = archive.plan(**point).base.row_count or 0
    async with AsyncExitStack() as stack:
        with ProgressBar("fetching", expected, "rows") as bar:
            fetching = open_sql(
                archive, **point, columns=columns or None, memory=memory, on_rows=bar.update
            )
            session = await stack.enter_async_context(fetching)
        printer, rows = ResultPrinter(output), 0
        async for batch in session.run(statement):
            printer.print(batch)
            rows += len(batch)
        printer.end(batch.schema)
        output.note(f"{rows:,} {noun(rows, 'row')} of the table at {session.position}")


class ResultPrinter:
    """Prints a result: JSON lines with --json, otherwise a table whose widths fit the first rows."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._widths: list[int] | None = None

    def print(self, batch: pa.RecordBatch) -> None:
        """Print some rows. The first batch with rows determines the column widths."""
        lines = _json_lines(batch)
        if self._output.as_json:
            self._output.write(*(line + b"\n" for line in lines))
        elif lines:
            self._print_table(batch.schema, list(_cells(lines)))

    def end(self, schema: pa.Schema) -> None:
        """Print the header if there was no row."""
        if not self._output.as_json and self._widths is None:
            self._print_table(schema, [])

    def _print_table(self, schema: pa.Schema, rows: list[list[str]]) -> None:
        texts = rows
        if self._widths is None:
            names = [_escaped(name) for name in schema.names]
            self._widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
            texts = [names, ["-" * width for width in self._widths], *rows]
        right = [_is_number(field.type) for field in schema]
        for cells in texts:
            fitted = [
                cell.rjust(width) if number else cell.ljust(width)
                for cell, width, number in zip(cells, self._widths, right, strict=True)
            ]
            self._output.write("  ".join(fitted).rstrip().encode(), b"\n")


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def _json_lines(batch: pa.RecordBatch) -> list[bytes]:
    """Return the rows in the archives' own JSON, in which every value is exact."""
    from streamfold.archive.formats import JsonlFormat
    from streamfold.archive.schema import TableSchema

    sink = io.BytesIO()
    try:
        JsonlFormat().write_rows(sink, TableSchema.of(batch.schema), [batch])
    except InvalidError as error:
        raise InvalidError(f"the result cannot be printed: {error.message}") from None
    return sink.getvalue().splitlines()


def _cells(lines: Sequence[bytes]) -> Iterator[list[str]]:
    decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
    for line in lines:
        yield [_cell(value) for value in decoder.decode(line).values()]


def _cell(value: msgspec.Raw) -> str:
    data = bytes(value)
    if data == b"null":
        return "NULL"
    return _escaped(msgspec.json.decode(data) if data.startswith(b'"') else data.decode())


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda control: repr(control[0])[1:-1], text)
