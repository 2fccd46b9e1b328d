"""SQL over one archived table, by DuckDB, without access to anything else.

    async with open_sql(archive, position="1041") as session:
        async for batch in session.run("select count(*) from users"):
            print(batch)

The rebuilt table goes to a temporary Arrow file. DuckDB scans that file through a memory map, so
the rows are copied once, and memory stays within DuckDB's limit however large the table is. Before
the first statement, DuckDB's access to files, network, extensions and Python variables is disabled,
and its configuration is locked.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from streamfold.blob.local_files import finish
from streamfold.errors import InvalidError
from streamfold.extras import needing_extra

with needing_extra("archive"):
    import pyarrow as pa

    from streamfold.archive.engines.column_types import DUCKDB, EngineColumns
    from streamfold.archive.read.reader import Archive
    from streamfold.archive.read.rebuild import in_batches

if TYPE_CHECKING:
    import duckdb

T = TypeVar("T")

#: Error code for a statement that is not allowed or that DuckDB could not run.
_STATEMENT_FAILED = "statement_failed"
#: Bytes that DuckDB may hold before it spills to disk. Enough for millions of groups, and little
#: compared with any machine's memory.
MEMORY = 1 << 30
#: Rows of a result to fetch at once.
RESULT_ROWS = 8192
#: View of the spooled rows, to which the table's own name refers.
_ROWS = "_streamfold_rows"
#: Settings that isolate statements. The last one locks them.
_LOCKS = (
    "SET python_enable_replacements = false",
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


class SqlSession:
    """Runs statements over the table, one at a time."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, position: str) -> None:
        self._connection = connection
        #: End position of the last artifact that the table includes.
        self.position = position

    async def run(self, statement: str) -> AsyncGenerator[pa.RecordBatch]:
        """Yield the result in batches. The first one may be empty but always has the columns.

        Accepts only a single SELECT or EXPLAIN. Cancellation interrupts DuckDB.
        """
        reader = await self._call(lambda: self._start(statement))
        yield pa.RecordBatch.from_pylist([], schema=reader.schema)
        while (batch := await self._call(lambda: next(reader, None))) is not None:
            yield batch

    def _start(self, statement: str) -> pa.RecordBatchReader:
        import duckdb

        allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
        statements = self._connection.extract_statements(statement)
        if len(statements) != 1 or statements[0].type not in allowed:
            kinds = ", ".join(item.type.name for item in statements) or "nothing"
            raise InvalidError(
                f"the SQL holds {kinds}, but one SELECT is all that can run: the archive is read-only",
                code=_STATEMENT_FAILED,
            )
        return self._connection.sql(statements[0].query).to_arrow_reader(RESULT_ROWS)

    async def _call(self, work: Callable[[], T]) -> T:
        """Run a DuckDB call in a thread. The call has ended when this returns or raises."""
        import duckdb

        task = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._connection.interrupt()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # marks it as retrieved
            raise
        except (duckdb.Error, pa.ArrowException) as error:
            raise InvalidError(
                f"DuckDB refused the statement: {error}", code=_STATEMENT_FAILED
            ) from None


@asynccontextmanager
async def open_sql(
    archive: Archive,
    *,
    position: str | None = None,
    time: datetime | None = None,
    columns: Sequence[str] | None = None,
    memory: int = MEMORY,
    spilled: int | None = None,
    spool: Path | None = None,
    on_rows: Callable[[int], None] | None = None,
) -> AsyncIterator[SqlSession]:
    """Fetch the table at the head, at a position or at a time, and open DuckDB over it.

    The table has the name given in the manifest, with and without its schema. `memory` limits
    DuckDB, which spills at most `spilled` bytes to temporary files in `spool`, by default as much
    as the disk holds. The table itself is spooled there, too. `on_rows` is called with the number
    of rows as they arrive.
    """
    with needing_extra("duckdb"):
        import duckdb

    with tempfile.TemporaryDirectory(prefix="streamfold-sql-", dir=spool) as folder:
        file = Path(folder) / "rows.arrow"

        async def fetch() -> str:
            # One plan for both, so that the session names the position of exactly these rows.
            plan = archive.plan(position=position, time=time)
            table_rows = in_batches(archive.read(plan, columns=columns))
            async with aclosing(table_rows) as batches:
                await _spool(batches, file, on_rows or (lambda rows: None))
            return plan.position

        reached = await archive.with_plans(fetch)
        with duckdb.connect() as connection, pa.memory_map(str(file)) as mapped:
            table = pa.ipc.open_file(mapped).read_all()
            connection.execute(f"SET memory_limit = '{memory}B'")
            if spilled is not None:
                connection.execute(f"SET max_temp_directory_size = '{spilled}B'")
            _prepare(connection, archive.manifest.table, table, Path(folder))
            yield SqlSession(connection, reached)


async def _spool(
    batches: AsyncGenerator[pa.RecordBatch], file: Path, on_rows: Callable[[int], None]
) -> None:
    first = await anext(batches)
    columns = EngineColumns.of(first.schema, DUCKDB)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, columns.target) as stored:
        batch: pa.RecordBatch | None = first
        while batch is not None:
            await finish(asyncio.to_thread(stored.write_batch, columns.cast(batch)))
            on_rows(len(batch))
            batch = await anext(batches, None)


def _prepare(
    connection: duckdb.DuckDBPyConnection, name: str, table: pa.Table, folder: Path
) -> None:
    """Register the table under its name, and lock everything else."""
    connection.execute(f"SET temp_directory = {text_literal(str(folder / 'spill'))}")
    connection.register(_ROWS, table)
    # DuckDB has these schemas itself and allows no tables in them, so only the plain name remains.
    own = name.lower().startswith(("information_schema.", "pg_catalog."))
    schema, qualified = make_schema(connection, name.rpartition(".")[2] if own else name)
    connection.execute(f"SET search_path = {text_literal(schema)}")
    connection.execute(f"CREATE VIEW {qualified} AS FROM {_ROWS}")
    for setting in _LOCKS:
        connection.execute(setting)


def make_schema(connection: duckdb.DuckDBPyConnection, table: str) -> tuple[str, str]:
    """Create a table's schema. Returns the SQL names of the schema and of the table.

    Both begin with the database, because a schema may be named like another database, such as
    `temp`.
    """
    row = connection.execute("SELECT current_database()").fetchone()
    namespace, _, plain = table.rpartition(".")
    schema = ".".join(map(quoted, (row[0] if row else "", namespace or "main")))
    connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    return schema, f"{schema}.{quoted(plain or namespace)}"


def quoted(name: str) -> str:
    """Return a quoted SQL name."""
    return '"' + name.replace('"', '""') + '"'


def text_literal(text: str) -> str:
    """Return an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"
