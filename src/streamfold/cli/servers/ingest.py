"""`streamfold ingest`: copies database tables into streams."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import msgspec

from streamfold.cli.connection import open_basin, open_client
from streamfold.cli.exit_status import VerbFailedError
from streamfold.cli.menu import VerbGroup
from streamfold.cli.output import confirm, yes_option
from streamfold.cli.parameters import FiniteFloat
from streamfold.cli.target import FILE, Target, find_target
from streamfold.cli.terminal import stop_signals
from streamfold.extras import needing_extra
from streamfold.wording import reason_of

with needing_extra("postgres"):
    from streamfold.ingest.postgres.catalog import describe_tables
    from streamfold.ingest.postgres.connection import Database
    from streamfold.ingest.postgres.ingester import IngestOptions, PostgresIngest
    from streamfold.ingest.postgres.pgoutput import lsn_text
    from streamfold.ingest.postgres.publication import drop_publication
    from streamfold.ingest.postgres.slot import drop_slot, find_slot, flush_lag, has_slots
    from streamfold.ingest.progress import IngestProgress, IngestTableProgress, serve_metrics
    from streamfold.ingest.table_stream import BasinStreams

logger = logging.getLogger(__name__)

#: Seconds between lines about a copy.
_COPY_NOTE = 5.0
_BEGIN = "`streamfold ingest postgres` makes it, and --slot names another"
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
_PUBLICATION = click.option(
    "--publication", default="streamfold", show_default=True, help="Name of the publication."
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
_CONTEXT = click.option(
    "--context", metavar="NAME", help="Server and token of `streamfold config`, by name."
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
@_PUBLICATION
@_PREFIX
@click.option(
    "--stream",
    "one_stream",
    default="",
    metavar="NAME",
    help="One stream for all tables, in the order of commits, instead of a stream for each.",
)
@click.option("--recopy", is_flag=True, help="Copy all tables again, with a new slot.")
@click.option(
    "--heartbeat",
    type=FiniteFloat(min=0.1),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to confirm the position while no table changes.",
)
@click.option(
    "--trim-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON object with the first seq_num to keep, by stream, read with each heartbeat. Records "
    "before it are trimmed, but not the last one of a stream.",
)
@click.option(
    "--metrics-port", type=click.IntRange(1, 65535), help="Serve Prometheus metrics at this port."
)
@_ENDPOINT
@_TOKEN
@_CONTEXT
@_JSON
def postgres(
    dsn: str,
    password_file: Path | None,
    tables: tuple[str, ...],
    basin: str,
    slot: str,
    publication: str,
    prefix: str,
    one_stream: str,
    recopy: bool,
    heartbeat: float,
    trim_file: Path | None,
    metrics_port: int | None,
    endpoint: str | None,
    token_file: Path | None,
    context: str | None,
    as_json: bool,
) -> None:
    """Copy tables of PostgreSQL into streams, then follow their changes, until a signal stops it.

    Each table has a stream of its own, unless --stream names one for all. After a stop or a crash, the
    same command continues where the streams end: each change is in them once, in the order of commits.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    options = IngestOptions(
        tables, slot, publication, prefix, recopy, heartbeat, one_stream=one_stream
    )
    database = Database(dsn, password_file=password_file)
    progress = IngestProgress()
    if metrics_port is not None:
        serve_metrics(progress, metrics_port)
    report = partial(_Printed(as_json), progress)
    target = find_target(endpoint, token_file, context)
    asyncio.run(_run(database, options, basin, target, progress, report, trim_file))


@ingest.command("tables")
@_DSN
@_PASSWORD
@_JSON
def list_tables(dsn: str, password_file: Path | None, as_json: bool) -> None:
    """List the tables of a database, with their keys, or why they cannot be followed."""
    with Database(dsn, password_file=password_file).query() as cursor:
        for name, table in describe_tables(cursor):
            shown: dict[str, object] = {"table": name}
            if isinstance(table, str):
                line = table
                shown["refused"] = table
            else:
                line = f"key {', '.join(table.key)}"
                shown |= {"key": table.key, "bytes": table.size_bytes, "rows": table.rows}
            click.echo(json.dumps(shown) if as_json else f"{name}: {line}")


@ingest.command()
@_DSN
@_PASSWORD
@_SLOT
@_JSON
def status(dsn: str, password_file: Path | None, slot: str, as_json: bool) -> None:
    """Show whether an ingester runs, how far it is behind, and the log that PostgreSQL keeps for it."""
    with Database(dsn, password_file=password_file).query() as cursor:
        replication_slot = find_slot(cursor, slot)
        lag = None if replication_slot is None else flush_lag(cursor, replication_slot)
    if replication_slot is None:
        raise VerbFailedError("slot_missing", f"there is no replication slot {slot!r}: {_BEGIN}")
    shown = {
        "slot": slot,
        "running": replication_slot.active_pid is not None,
        "lost": replication_slot.lost,
        "confirmed": lsn_text(replication_slot.confirmed),
        "lag_bytes": replication_slot.lag_bytes,
        "lag_seconds": lag,
        "retained_bytes": replication_slot.retained_bytes,
    }
    if as_json:
        click.echo(json.dumps(shown))
        return
    for name, value in shown.items():
        click.echo(f"{name:<15} {'unknown' if value is None else value}")


@ingest.command()
@_DSN
@_PASSWORD
@_SLOT
@_PUBLICATION
@yes_option
@_JSON
def drop(
    dsn: str, password_file: Path | None, slot: str, publication: str, yes: bool, as_json: bool
) -> None:
    """Remove slot and publication from the database, for good; the streams stay as they are.

    The publication stays while the database has other slots, which may send its changes. Asks
    first, unless --yes is given.
    """
    confirm(f"drop replication slot {slot!r} and publication {publication!r}", yes=yes)
    with Database(dsn, password_file=password_file).query() as cursor:
        replication_slot = find_slot(cursor, slot)
        if replication_slot is not None:
            drop_slot(cursor, slot)
        shared = has_slots(cursor)
        if not shared:
            drop_publication(cursor, publication)
    removed = replication_slot is not None
    if as_json:
        shown = {"slot": slot, "dropped": removed, "publication_dropped": not shared}
        click.echo(json.dumps(shown))
        return
    click.echo(f"{slot}  {'dropped' if removed else 'there was no such slot'}")
    click.echo(f"{publication}  {'kept: other slots exist' if shared else 'dropped'}")


class _Printed:
    """Prints a line when a table's state changes, and periodically during a copy."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._shown: dict[str, tuple[str, float]] = {}

    def __call__(self, progress: IngestProgress) -> None:
        now = time.time()
        for name, table in progress.tables.items():
            state, shown_at = self._shown.get(name, ("", 0.0))
            copying = table.state == "copying" and now - shown_at >= _COPY_NOTE
            if table.state != state or copying:
                self._shown[name] = (table.state, now)
                click.echo(self._line(name, table, now))

    def _line(self, name: str, table: IngestTableProgress, now: float) -> str:
        shown: dict[str, object] = {"table": name, "state": table.state}
        if table.rows_copied:
            shown |= {"rows": table.rows_copied, "bytes": table.bytes_copied}
        left = table.seconds_left(now)
        if table.state == "copying" and table.rows_copied:
            shown["rows_per_second"] = round(table.rows_per_second(now))
            shown["seconds_left"] = None if left is None else round(left)
        if self._as_json:
            return json.dumps(shown)
        details = "".join(f", {value} {key}" for key, value in list(shown.items())[2:])
        return f"{name}: {table.state}{details}"


async def _run(
    database: Database,
    options: IngestOptions,
    basin: str,
    target: Target,
    progress: IngestProgress,
    report: Callable[[], None],
    trim_file: Path | None,
) -> None:
    async with open_client(target) as client:
        streams = BasinStreams(open_basin(client, basin))
        ingest = PostgresIngest(
            database,
            streams,
            options,
            progress=progress,
            on_progress=report,
            trim_points=partial(trim_points, trim_file),
        )
        ingesting = asyncio.create_task(ingest.run())
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, _stop, ingesting, number)
        try:
            await ingesting
        except asyncio.CancelledError:
            if not ingesting.cancelled():
                raise


def _stop(ingesting: asyncio.Task[None], number: signal.Signals) -> None:
    # When a terminal closes, its shell and the kernel each send SIGHUP, so the second is not a
    # request to hurry.
    if number is not signal.SIGHUP or not ingesting.cancelling():
        ingesting.cancel()


def trim_points(file: Path | None) -> dict[str, int]:
    """Return the first record to keep, by stream. Empty without a readable file."""
    if file is None:
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, int])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        # The file may be half written. The next heartbeat reads it again.
        logger.warning(
            'nothing is trimmed, --trim-file %s is not readable as {"public.orders": 1000}: %s',
            file, reason_of(error),
        )  # fmt: skip
        return {}
