"""`streamfold ingest`: tables of databases as streams."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from pathlib import Path

import click

from streamfold.cli.connection import FILE, open_basin, open_client
from streamfold.cli.menu import VerbGroup
from streamfold.extras import needing_extra

with needing_extra("postgres"):
    from streamfold.ingest.postgres.catalog import describe_tables
    from streamfold.ingest.postgres.connection import Database
    from streamfold.ingest.postgres.ingester import IngestOptions, PostgresIngest
    from streamfold.ingest.progress import IngestProgress
    from streamfold.ingest.streams import BasinStreams

_DSN = click.option(
    "--dsn",
    required=True,
    envvar="STREAMFOLD_POSTGRES_DSN",
    metavar="URL",
    help="The database, as in postgresql://user@host:5432/name?sslmode=verify-full. The password "
    "comes from PGPASSWORD, ~/.pgpass or --password-file. Or set STREAMFOLD_POSTGRES_DSN.",
)
_PASSWORD = click.option("--password-file", type=FILE, help="File with the database password.")
_SLOT = click.option(
    "--slot", default="streamfold", show_default=True, help="Name of the replication slot."
)
_PREFIX = click.option(
    "--prefix", default="", help="Before the names of streams; the rest is schema.table."
)
_BASIN = click.option("--basin", required=True, help="Basin of the streams.")
_ENDPOINT = click.option(
    "--endpoint", metavar="URL", help="The server's address, instead of S2_*_ENDPOINT."
)
_TOKEN = click.option(
    "--token-file", type=FILE, help="File with the token, instead of S2_ACCESS_TOKEN."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON lines.")


@click.group(cls=VerbGroup)
def ingest() -> None:
    """Fill streams from tables of a database."""


@ingest.command()
@_DSN
@_PASSWORD
@click.option(
    "--table",
    "tables",
    multiple=True,
    required=True,
    metavar="NAME",
    help="A table, as in public.orders or 'sales.*'; may be repeated.",
)
@_BASIN
@_SLOT
@click.option(
    "--publication", default="streamfold", show_default=True, help="Name of the publication."
)
@_PREFIX
@click.option("--recopy", is_flag=True, help="Copy all tables again, with a new slot.")
@_ENDPOINT
@_TOKEN
@_JSON
def postgres(
    dsn: str,
    password_file: Path | None,
    tables: tuple[str, ...],
    basin: str,
    slot: str,
    publication: str,
    prefix: str,
    recopy: bool,
    endpoint: str | None,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """Copy tables of PostgreSQL into streams, then follow their changes, until SIGTERM or SIGINT.

    Each table has a stream of its own. After a stop or a crash, the same command continues where the
    streams end: each change is in them once, in the order of commits.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    options = IngestOptions(tables, slot, publication, prefix, recopy)
    database = Database(dsn, password_file=password_file)
    asyncio.run(_run(database, options, basin, endpoint, token_file, _Printed(as_json)))


@ingest.command("tables")
@_DSN
@_PASSWORD
@_JSON
def list_tables(dsn: str, password_file: Path | None, as_json: bool) -> None:
    """List the tables of a database, with their keys, or why they cannot be followed."""
    with Database(dsn, password_file=password_file).query() as cursor:
        for name, found in describe_tables(cursor):
            shown: dict[str, object] = {"table": name}
            if isinstance(found, str):
                line = found
                shown["refused"] = found
            else:
                line = f"key {', '.join(found.key)}"
                shown |= {"key": found.key, "bytes": found.size_bytes, "rows": found.rows}
            click.echo(json.dumps(shown) if as_json else f"{name}: {line}")


class _Printed:
    """Prints a line when a table or the whole enters another state."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._shown: dict[str, str] = {}

    def __call__(self, progress: IngestProgress) -> None:
        for name, table in progress.tables.items():
            detail = {"rows": table.rows_copied} if table.rows_copied else {}
            self._print(name, table.state, detail)

    def _print(self, name: str, state: str, detail: dict[str, int]) -> None:
        if self._shown.get(name) == state:
            return
        self._shown[name] = state
        if self._as_json:
            click.echo(json.dumps({"table": name, "state": state, **detail}))
        else:
            rows = f", {detail['rows']} rows copied" if detail else ""
            click.echo(f"{name}: {state}{rows}")


async def _run(
    database: Database,
    options: IngestOptions,
    basin: str,
    endpoint: str | None,
    token_file: Path | None,
    printed: _Printed,
) -> None:
    async with open_client(endpoint, token_file, at_least_once=False) as client:
        streams = BasinStreams(open_basin(client, basin))
        ingesting = asyncio.create_task(
            PostgresIngest(database, streams, options, on_progress=printed).run()
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ingesting.cancel)
        try:
            await ingesting
        except asyncio.CancelledError:
            if not ingesting.cancelled():
                raise
