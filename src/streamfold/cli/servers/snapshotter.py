"""`streamfold snapshotter`: publishes tables of change streams as archives."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from streamfold.archive.events import SINKS
from streamfold.archive.formats import FORMATS
from streamfold.blob import DESTINATIONS
from streamfold.cli.exit_status import ExitStatus, VerbFailedError
from streamfold.cli.menu import VerbGroup
from streamfold.cli.terminal import stop_signals
from streamfold.extensions import Registry
from streamfold.extras import needing_extra
from streamfold.snapshotter.config.files import load_configuration
from streamfold.snapshotter.config.model import SnapshotterConfiguration, describe
from streamfold.snapshotter.decoding import DECODERS
from streamfold.snapshotter.errors import ConfigurationError
from streamfold.snapshotter.status.http_server import StatusServer
from streamfold.snapshotter.status.table_status import State, TableStatus
from streamfold.tracing import tracing
from streamfold.wording import noun

_CONFIG = click.option(
    "--config",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="Configuration file: HOCON if it ends in .conf, otherwise TOML.",
)
_SET = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="PATH=VALUE",
    help="Set one value, as in diff.interval=5s; may be repeated.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_JOB = Path(__file__).with_name("snapshotter_job.py")
#: Seconds between checks of whether Spark is still running.
_LOOK = 2.0
#: Seconds between checks of whether Spark has started.
_START_LOOK = 0.1
#: Addresses that mean every interface of this machine, which a browser cannot open.
_ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - it is recognized, not listened at

T = TypeVar("T")


class ConfiguredCommand(click.Command):
    """A command whose help lists the extensions that its configuration may name."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        kinds: tuple[Registry[Any], ...] = (DECODERS, FORMATS, DESTINATIONS, SINKS)
        with formatter.section("A configuration may name"):
            formatter.write_dl([(f"{kind.noun}s", ", ".join(kind.ids())) for kind in kinds])
        super().format_epilog(ctx, formatter)


@click.group(cls=VerbGroup)
def snapshotter() -> None:
    """Publish tables of change streams as archives."""


@snapshotter.command(cls=ConfiguredCommand)
@_CONFIG
@_SET
@_JSON
def validate(file: Path, settings: tuple[str, ...], as_json: bool) -> None:
    """Check a configuration and show what is in effect, without contacting anything."""
    configuration = _load(file, settings, as_json)
    if as_json:
        tables = [table.name for table in configuration.tables]
        click.echo(json.dumps({"valid": True, "tables": tables}))
    else:
        click.echo(describe(configuration))


@snapshotter.command(cls=ConfiguredCommand)
@_CONFIG
@_SET
@click.option(
    "--master",
    help="Spark's master, such as spark://host:7077; all cores of this machine if not given.",
)
@click.option(
    "--conf", "confs", multiple=True, metavar="KEY=VALUE", help="A setting of Spark; repeatable."
)
@click.option(
    "--scratch",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for Spark's temporary files, created if missing; nothing in it is needed afterwards.",
)
@click.option("--verbose", is_flag=True, help="Also show what Spark and other libraries print.")
@_JSON
def run(
    file: Path,
    settings: tuple[str, ...],
    master: str | None,
    confs: tuple[str, ...],
    scratch: Path | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Publish the tables until SIGTERM, SIGINT or SIGHUP, then flush the last diffs.

    Exits with status 1 when a table could not be flushed, or when none is left to publish.
    """
    configuration = _load(file, settings, as_json)
    spark_settings = dict(_pair(text) for text in confs)
    if master is not None:
        spark_settings["spark.master"] = master
    _log(verbose)
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="streamfold-", dir=scratch) as folder:
        _publish(configuration, spark_settings, Path(folder), as_json=as_json, verbose=verbose)


@snapshotter.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@_JSON
def pack(folder: Path, as_json: bool) -> None:
    """Write to FOLDER what spark-submit needs: this package as a zip, and the script that runs it."""
    with needing_extra("spark"):
        from streamfold.spark.session import pack_package
    folder.mkdir(parents=True, exist_ok=True)
    package, script = pack_package(folder), folder / _JOB.name
    shutil.copyfile(_JOB, script)
    if as_json:
        click.echo(json.dumps({"package": str(package), "script": str(script)}))
    else:
        click.echo(f"spark-submit --py-files {package} {script} --config FILE")


def _load(file: Path, settings: tuple[str, ...], as_json: bool) -> SnapshotterConfiguration:
    """Load the configuration. If it is invalid, list its problems, one per line."""
    try:
        return load_configuration(file, settings=settings)
    except ConfigurationError as error:
        if as_json:
            raise
        for problem in error.problems:
            click.echo(problem, err=True)
        count = len(error.problems)
        problems = noun(count, "problem, which is", "problems, which are")
        raise VerbFailedError(
            error.code, f"{file} has {count} {problems} listed above: correct it"
        ) from None


def _log(verbose: bool) -> None:
    """Log this package's messages, and with `verbose` those of others."""
    shape = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format=shape)
    logging.getLogger("streamfold").setLevel(logging.INFO)
    # py4j logs every connection that a query ends.
    logging.getLogger("py4j").setLevel(logging.WARNING if verbose else logging.CRITICAL)


def _publish(
    configuration: SnapshotterConfiguration,
    settings: dict[str, str],
    scratch: Path,
    *,
    as_json: bool,
    verbose: bool,
) -> None:
    with needing_extra("spark"):
        from streamfold.snapshotter.spark import Snapshotter, snapshotter_session, table_jobs
        from streamfold.spark.session import (
            is_local,
            is_running,
            is_submitted,
            needing_java,
            with_package,
        )
    jobs = table_jobs(configuration, os.environ)
    stop = threading.Event()
    for number in stop_signals():
        signal.signal(number, lambda *_: stop.set())
    if not (is_submitted() or is_local(settings.get("spark.master", "local"))):
        settings = with_package(settings, scratch)
    http = configuration.http
    # Opens the port and destinations before Spark, which takes seconds to start.
    with (
        tracing(),
        Snapshotter(jobs, scratch=scratch) as writer,
        StatusServer(writer, http.host, http.port) as served,
    ):
        _announce(len(jobs), http.host, served.port, as_json)
        writer.check()
        spark = _unless(stop, partial(snapshotter_session, settings, verbose=verbose))
        if spark is None:
            return  # nothing has started, and Java ends with this process
        with needing_java(spark):
            with writer.publishing(spark):
                _stop_without(partial(is_running, spark), stop)
                writer.wait(stop)
            spark.stop()
    if not writer.is_whole:
        raise VerbFailedError("table_stopped", _what_stopped(writer.statuses()), ExitStatus.FAILURE)


def _unless(stop: threading.Event, work: Callable[[], T]) -> T | None:
    """Return the result of `work`, or None as soon as `stop` is set, without waiting for `work`.

    Raises the error of `work`.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="start of Spark", daemon=True).start()
    while not outcome.done():
        if stop.wait(_START_LOOK):
            return None
    return outcome.result()


def _stop_without(is_running: Callable[[], bool], stop: threading.Event) -> None:
    """Set `stop` when Spark is gone, because every table would otherwise retry without end."""

    def watch() -> None:
        while not stop.wait(_LOOK):
            if not is_running():
                stop.set()

    threading.Thread(target=watch, name="watch over Spark", daemon=True).start()


def _announce(tables: int, host: str, port: int, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"tables": tables, "port": port}))
    else:
        count = f"{tables} {noun(tables, 'table')}"
        shown = "localhost" if host in _ANY_ADDRESS else host
        click.echo(f"Publishing {count}; status at http://{shown}:{port}/status", err=True)


def _what_stopped(statuses: Mapping[str, TableStatus]) -> str:
    lines = [
        f"table {name} is {status.state}: {status.last_error.message if status.last_error else ''}"
        for name, status in statuses.items()
        if status.state is not State.CLOSED
    ]
    return "; ".join(lines)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise click.BadParameter(f"{text!r} is not a setting: write KEY=VALUE", param_hint="--conf")
    return name, value
