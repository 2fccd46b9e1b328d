"""`streamfold publish`: publishes database tables as archives with one command."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

import click

from streamfold.cli.target import FILE
from streamfold.extras import check_installed, needing_extra
from streamfold.model.units import parse_duration

#: The extras that the parts need, as for `pip install`.
EXTRAS: Final = "server,postgres,spark"
_PACKAGES: Final = ("uvloop", "psycopg2", "pyspark", "s2_sdk")
with needing_extra(EXTRAS):
    from streamfold.archive.write.layout import LAYOUTS, STREAMFOLD
    from streamfold.cli.publishing.plan import (
        ArchiveFolder,
        PublicationPlan,
        skipped_records,
        write_configuration,
    )
    from streamfold.cli.publishing.run import PublishRun, locked_state
    from streamfold.cli.publishing.status import Screen
    from streamfold.ingest.postgres.catalog import Table, check_server, find_tables
    from streamfold.ingest.postgres.connection import Database
    from streamfold.ingest.postgres.pgoutput import Lsn
    from streamfold.ingest.postgres.slot import current_lsn
    from streamfold.snapshotter.config.model import PUBLISH, REFUSE

#: Seconds between two notes of the ingester's position while no table changes. The status shows the
#: lag, and --once waits for a note.
_HEARTBEAT: Final = 2.0
_HEARTBEAT_ONCE: Final = 0.5
_DSN_VARIABLE: Final = "STREAMFOLD_POSTGRES_DSN"


def _duration(_: click.Context, __: click.Parameter, value: str) -> str:
    try:
        parse_duration(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a duration: write it like 5s") from None
    return value


@click.command()
@click.argument("dsn", metavar="[DATABASE]", envvar=_DSN_VARIABLE, required=False)
@click.option(
    "--table",
    "patterns",
    multiple=True,
    required=True,
    metavar="NAME",
    help="A table, as in public.orders or 'sales.*'; may be repeated.",
)
@click.option(
    "--to",
    "target",
    required=True,
    metavar="FOLDER|URL",
    help="Where archives go: a folder, s3://bucket/prefix, gs:// or az://; each table has a folder "
    "below it.",
)
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the streams and logs; the same one resumes.  [default: beside --to, with .state]",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of the server and its console.  [default: a free one]",
)
@click.option(
    "--endpoint", metavar="URL", help="Use this server for the streams, instead of running one."
)
@click.option("--token-file", type=FILE, help="File with the token of that server.")
@click.option(
    "--basin", default="published-tables", show_default=True, help="Basin of the streams."
)
@click.option("--password-file", type=FILE, help="File with the database password.")
@click.option("--slot", default="streamfold", show_default=True, help="Replication slot.")
@click.option("--publication", default="streamfold", show_default=True, help="Publication.")
@click.option("--recopy", is_flag=True, help="Copy all tables again, with a new slot.")
@click.option(
    "--keep-streams",
    is_flag=True,
    help="Keep all changes in the streams, also those that the archives have.",
)
@click.option(
    "--diff-interval",
    default="5s",
    show_default=True,
    callback=_duration,
    metavar="DURATION",
    help="How often changes are written.",
)
@click.option(
    "--on-trimmed",
    type=click.Choice((REFUSE, PUBLISH)),
    default=REFUSE,
    show_default=True,
    help="A table without an archive whose stream has lost its beginning is refused, or published "
    "as incomplete from what is left.",
)
@click.option(
    "--mismatch",
    type=click.Choice(("stop", "dead_letter")),
    default="stop",
    show_default=True,
    help="A value that its column cannot hold stops the table, or makes its record a dead letter "
    "beside the archive.",
)
@click.option(
    "--skip",
    multiple=True,
    metavar="TABLE:RECORD",
    help="Make a dead letter of this record of a table's stream, as in public.orders:17; may be "
    "repeated.",
)
@click.option(
    "--layout",
    type=click.Choice(tuple(LAYOUTS)),
    default=STREAMFOLD.name,
    show_default=True,
    help="Names and positions of the archives' files; laredo is for Laredo's reader.",
)
@click.option(
    "--keep-epochs",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Delete the files of all but the newest N epochs, a day after they were replaced.  "
    "[default: keep all]",
)
@click.option(
    "--once",
    is_flag=True,
    help="Stop when everything that the tables had at the start is in the archives.",
)
@click.option(
    "--config",
    "config_folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the configurations of server, ingest and snapshotter to this folder, and the commands "
    "that run them, instead of running them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines.")
def publish(
    dsn: str | None,
    patterns: tuple[str, ...],
    target: str,
    state: Path | None,
    port: int,
    endpoint: str | None,
    token_file: Path | None,
    basin: str,
    password_file: Path | None,
    slot: str,
    publication: str,
    recopy: bool,
    keep_streams: bool,
    diff_interval: str,
    on_trimmed: str,
    mismatch: str,
    skip: tuple[str, ...],
    layout: str,
    keep_epochs: int,
    once: bool,
    config_folder: Path | None,
    as_json: bool,
) -> None:
    """Publish tables of the PostgreSQL DATABASE as archives, until a signal stops it.

    DATABASE is a URL, as in postgresql://user@host:5432/name, or STREAMFOLD_POSTGRES_DSN. The command
    runs a server, `ingest` and `snapshotter`, starts those again that die, and shows each table's
    state. After a stop or a crash, the same command resumes.
    """
    if not dsn:
        raise click.UsageError(
            f"name the database as the first argument, or in {_DSN_VARIABLE}: postgresql://user@host/name"
        )
    for package in _PACKAGES:
        check_installed(package, EXTRAS)
    archives = ArchiveFolder.parse(target)
    database = Database(dsn, password_file=password_file)
    tables, now = _look_up(database, patterns)
    plan = PublicationPlan(
        dsn,
        tables,
        archives,
        state=(state or archives.state_folder).absolute(),
        endpoint=endpoint,
        token_file=token_file and token_file.absolute(),
        password_file=password_file and password_file.absolute(),
        basin=basin,
        slot=slot,
        publication=publication,
        diff_interval=diff_interval,
        on_trimmed=on_trimmed,
        mismatch=mismatch,
        skipped=skipped_records(skip, tables),
        layout=layout,
        keep_epochs=keep_epochs,
        port=port,
        recopy=recopy,
        keep_streams=keep_streams,
        heartbeat=_HEARTBEAT_ONCE if once else _HEARTBEAT,
    )
    screen = Screen(as_json=as_json)
    if config_folder is not None:
        scripts = [str(file) for file in write_configuration(plan, config_folder.absolute())]
        screen.announce({"scripts": scripts}, "Run these, each in a terminal of its own:", *scripts)
        return
    _check_java()
    environment = {_DSN_VARIABLE: dsn}
    with locked_state(plan.state):
        asyncio.run(_run(plan, database, screen, environment, now if once else None))


async def _run(
    plan: PublicationPlan,
    database: Database,
    screen: Screen,
    environment: dict[str, str],
    until: Lsn | None,
) -> None:
    await PublishRun(plan, database, screen, environment).run(until=until)


def _look_up(database: Database, patterns: tuple[str, ...]) -> tuple[list[Table], Lsn]:
    """Return the tables and the database's current position. Raises if a table cannot be followed."""
    with database.query() as cursor:
        check_server(cursor)
        return find_tables(cursor, patterns), current_lsn(cursor)


def _check_java() -> None:
    """Raise JavaMissingError before anything starts, because Spark would start last."""
    from streamfold.spark.java import find_java

    find_java(os.environ)
