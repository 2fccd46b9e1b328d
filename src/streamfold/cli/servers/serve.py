"""`streamfold serve` (or `lite`, S2's name for its own server): runs a server.

It reads some environment variables of S2's own server, and warns about those that have no effect.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import click

from streamfold.cli.option_sections import SectionedCommand
from streamfold.cli.parameters import ByteSize, FiniteFloat
from streamfold.cluster.lease import EXPIRY_MAX, EXPIRY_MIN
from streamfold.errors import InvalidError
from streamfold.model.access_tokens import Secret
from streamfold.model.units import parse_duration
from streamfold.server.config import PORT, TLS_PORT, Configuration, store_location
from streamfold.server.console import ConsoleSettings
from streamfold.server.http.cors import is_loopback, parse_origin
from streamfold.server.main import Server, TlsFiles, run
from streamfold.store.settings import StoreSettings

FLUSH_INTERVAL = "SL8_FLUSH_INTERVAL"
_PREFIXES = ("SL8_", "S2LITE_")
#: The variables that are read.
_FOLLOWED = frozenset((FLUSH_INTERVAL, "S2LITE_INIT_FILE"))
#: The closest options for SlateDB settings.
_OPTIONS = {
    "SL8_MAX_UNFLUSHED_BYTES": "--append-inflight-bytes",
    "SL8_OBJECT_STORE_MAX_RETRIES": "--commit-timeout",
}
_DEFAULTS = StoreSettings()
_ROOT_TOKEN = "STREAMFOLD_ROOT_TOKEN"  # noqa: S105 - the variable's name, not a secret
#: Minimum characters of a root token, because a shorter one could be guessed.
_ROOT_TOKEN_MIN = 16
#: Makes files readable for this user only: files 0600, folders 0700. SlateDB respects it too.
_UMASK = 0o077
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
#: Headings of the help, with the options below each.
_SECTIONS = {
    "Storage": (
        "--local-root", "--bucket", "--path", "--take-over", "--accept-loss", "--no-fsync",
        "--init-file",
    ),
    "Address": ("--host", "--port", "--public-url", "--tls-cert", "--tls-key", "--tls-self"),
    "Standby": ("--name", "--lease-expiry"),
    "Access": ("--auth", "--root-token-file", "--open-metrics", "--cors-origin", "--no-cors"),
    "Console": ("--no-console", "--console-read-only", "--tables", "--snapshotter", "--server"),
    "Durable Streams": ("--default-basin", "--long-poll", "--local-webhooks"),
    "Commits": (
        "--commit-interval", "--commit-timeout", "--append-inflight-bytes", "--disk-reserve",
    ),
    "Trims and clean-up": (
        "--trim-grace", "--trim-on-snapshot", "--leftover-grace", "--reclaim-after",
        "--reclaim-rate",
    ),
    "Output": ("--no-access-log", "--json"),
}  # fmt: skip


def flush_interval(environment: Mapping[str, str]) -> float | None:
    """Return the seconds between flushes that the variable sets, or None if it is not set."""
    text = environment.get(FLUSH_INTERVAL, "").strip()
    if not text:
        return None
    try:
        return parse_duration(text).total_seconds()
    except ValueError:
        raise InvalidError(
            f"{FLUSH_INTERVAL} {text!r} is not a duration: write it like 10ms, or unset it and "
            "give --commit-interval"
        ) from None


def unused(environment: Mapping[str, str], options: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each variable that has no effect. `options` are those of `serve`."""
    names = frozenset(options)
    for name in sorted(environment):
        if not name.startswith(_PREFIXES) or name in _FOLLOWED:
            continue
        option = _OPTIONS.get(name, f"--{name.partition('_')[2].lower().replace('_', '-')}")
        if option in names:
            yield f"{name} is not used: give {option} instead"
        else:
            yield f"{name} is not used, and no option replaces it: see 'streamfold serve --help'"


@click.command(cls=SectionedCommand, sections=_SECTIONS)
@click.option(
    "--local-root",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep records in this folder.",
)
@click.option(
    "--bucket",
    help="Keep records in this S3 bucket, with the configuration of AWS tools: AWS_*, ~/.aws, roles.",
)
@click.option("--path", default="", help="Prefix within the folder or bucket.")
@click.option(
    "--take-over",
    is_flag=True,
    help="Replace the process that has the store open: its appends fail, and it stops. Without this, "
    "a start on a folder in use is refused, and a server on a bucket in use stands by.",
)
@click.option(
    "--name",
    default="",
    envvar="STREAMFOLD_NAME",
    show_envvar=True,
    help="Name of this server, as a standby and its clients are told.  [default: the "
    "machine's name]",
)
@click.option(
    "--lease-expiry",
    type=FiniteFloat(min=0, max=300),
    default=Configuration().lease_expiry,
    show_default=True,
    envvar="STREAMFOLD_LEASE_EXPIRY",
    show_envvar=True,
    help="On a bucket: seconds without a heartbeat after which a server that stands by takes over; it "
    "costs four small writes in that time. 0: no lease, and each start takes the store over.",
)
@click.option(
    "--accept-loss",
    type=click.IntRange(1),
    metavar="NUMBER",
    help="Drop the damaged log file of this number and all after it, as the error of a refused start "
    "says; their records are lost. The files are moved to the folder set-aside.",
)
@click.option(
    "--host",
    help="Address to listen at.  [default: 127.0.0.1, this machine alone; 0.0.0.0 with --auth]",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help=f"Port to listen at; {PORT}, or {TLS_PORT} with TLS. 0 takes a free one.",
)
@click.option("--tls-cert", type=_FILE, help="Certificate chain (PEM).")
@click.option("--tls-key", type=_FILE, help="Key of the certificate (PEM).")
@click.option("--tls-self", is_flag=True, help="Use a self-signed certificate for localhost.")
@click.option(
    "--init-file",
    type=_FILE,
    envvar="S2LITE_INIT_FILE",
    help="JSON file of basins and streams to create unless they exist.",
)
@click.option(
    "--public-url",
    help="The server's URL for clients, for links in answers; otherwise the request's host.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    help="Let web pages of this origin use a server without --auth, as those of this machine may; "
    "* for all. May be given several times.",
)
@click.option("--no-cors", is_flag=True, help="Do not let pages of other origins use the server.")
@click.option(
    "--append-inflight-bytes",
    type=ByteSize(),
    default=_DEFAULTS.inflight_bytes,
    help="Bytes accepted but not yet durable; further appends wait.  [default: 64MiB]",
)
@click.option(
    "--commit-interval",
    type=FiniteFloat(min=0),
    envvar="STREAMFOLD_COMMIT_INTERVAL",
    show_envvar=True,
    help="Seconds between commits, at least: for buckets whose requests cost.  "
    "[default: SL8_FLUSH_INTERVAL, or 0]",
)
@click.option(
    "--commit-timeout",
    type=FiniteFloat(min=0.1),
    default=_DEFAULTS.commit_timeout,
    show_default=True,
    envvar="STREAMFOLD_COMMIT_TIMEOUT",
    show_envvar=True,
    help="Seconds that storage may be silent before an append fails with an unknown outcome.",
)
@click.option(
    "--disk-reserve",
    type=ByteSize(),
    envvar="STREAMFOLD_DISK_RESERVE",
    show_envvar=True,
    help="Bytes that must be free for appends to be accepted: of local disk, or of memory if the "
    "store is there.  [default: 256MiB of disk, 1GiB of memory, a quarter if that is less]",
)
@click.option(
    "--trim-grace",
    type=FiniteFloat(min=0, max=3600),
    default=_DEFAULTS.trim_grace,
    show_default=True,
    envvar="STREAMFOLD_TRIM_GRACE",
    show_envvar=True,
    help="Seconds after a trim command in which readers still get what it trims.",
)
@click.option(
    "--leftover-grace",
    type=FiniteFloat(min=0),
    default=_DEFAULTS.leftover_grace,
    show_default=True,
    envvar="STREAMFOLD_LEFTOVER_GRACE",
    show_envvar=True,
    help="Seconds to keep a file that no row names, from when that is found: failed commits leave such "
    "files, but so do damage and old backups.",
)
@click.option(
    "--reclaim-after",
    type=FiniteFloat(min=1),
    default=_DEFAULTS.reclaim_after,
    show_default=True,
    envvar="STREAMFOLD_RECLAIM_AFTER",
    show_envvar=True,
    help="Seconds after which trimmed, expired and deleted records are removed from storage.",
)
@click.option(
    "--reclaim-rate",
    type=ByteSize(),
    default=_DEFAULTS.reclaim_rate,
    envvar="STREAMFOLD_RECLAIM_RATE",
    show_envvar=True,
    help="Bytes per second, on average, to rewrite where that frees little space.  [default: 32MiB]",
)
@click.option(
    "--trim-on-snapshot",
    is_flag=True,
    envvar="STREAMFOLD_TRIM_ON_SNAPSHOT",
    show_envvar=True,
    help="Let snapshots trim the records they cover, unless a stream is configured otherwise.",
)
@click.option(
    "--no-fsync",
    is_flag=True,
    help="Acknowledge before data is on disk: a power cut may lose records.",
)
@click.option(
    "--auth",
    is_flag=True,
    help="Require access tokens; the root token is in STREAMFOLD_ROOT_TOKEN, or in a file.",
)
@click.option("--root-token-file", type=_FILE, help="File with the root token; implies --auth.")
@click.option(
    "--open-metrics", is_flag=True, help="Serve /metrics without a token even with --auth."
)
@click.option(
    "--default-basin",
    default=Configuration().default_basin,
    show_default=True,
    help="Basin of the Durable Streams below /v1/stream/.",
)
@click.option(
    "--long-poll",
    type=FiniteFloat(min=0.01, max=300),
    default=Configuration().long_poll,
    show_default=True,
    help="Seconds that a long-poll of a Durable Stream waits.",
)
@click.option(
    "--local-webhooks", is_flag=True, help="Let webhooks go to http://localhost: for development."
)
@click.option("--no-console", is_flag=True, help="Do not serve the web console at /console.")
@click.option(
    "--console-read-only",
    is_flag=True,
    help="Disable every action in the console that changes data. This does not restrict clients: "
    "access tokens do.",
)
@click.option(
    "--tables",
    multiple=True,
    metavar="LOCATION",
    help="Show the tables published below this folder or URL in the console; needs the extra "
    "archive. May be given several times.",
)
@click.option(
    "--snapshotter",
    "snapshotters",
    multiple=True,
    metavar="URL|@FILE",
    help="Show the status of the snapshotter at this address, or at the one in a file, in the console. "
    "May be given several times.",
)
@click.option(
    "--server",
    "servers",
    multiple=True,
    metavar="URL",
    help="Show in the console whether the server at this address is active or stands by. May be given "
    "several times.",
)
@click.option("--no-access-log", is_flag=True, help="Do not log requests to standard error.")
@click.option("--json", "as_json", is_flag=True, help="Announce the server as JSON.")
def serve(
    local_root: Path | None,
    bucket: str | None,
    path: str,
    take_over: bool,
    name: str,
    lease_expiry: float,
    accept_loss: int | None,
    host: str | None,
    port: int | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_self: bool,
    init_file: Path | None,
    public_url: str | None,
    cors_origins: tuple[str, ...],
    no_cors: bool,
    append_inflight_bytes: int,
    commit_interval: float | None,
    leftover_grace: float,
    reclaim_after: float,
    reclaim_rate: int,
    commit_timeout: float,
    disk_reserve: int | None,
    trim_grace: float,
    trim_on_snapshot: bool,
    no_fsync: bool,
    auth: bool,
    root_token_file: Path | None,
    open_metrics: bool,
    default_basin: str,
    long_poll: float,
    local_webhooks: bool,
    no_console: bool,
    console_read_only: bool,
    tables: tuple[str, ...],
    snapshotters: tuple[str, ...],
    servers: tuple[str, ...],
    no_access_log: bool,
    as_json: bool,
) -> None:
    """Run a server. It keeps records in memory unless you name a folder or a bucket."""
    if (tls_cert is None) != (tls_key is None):
        raise InvalidError("--tls-cert and --tls-key need each other: give both or neither")
    if accept_loss is not None and (local_root is None or no_fsync):
        raise InvalidError(
            f"--accept-loss {accept_loss} is for log files that are synced to local disk: give "
            "--local-root, without --no-fsync, or leave it out"
        )
    if take_over and local_root is None and bucket is None:
        raise InvalidError(
            "--take-over is for --local-root and --bucket: a server in memory has nothing to take "
            "over; leave it out"
        )
    if 0 < lease_expiry < EXPIRY_MIN:
        raise InvalidError(
            f"--lease-expiry {lease_expiry:g} is too short: give {EXPIRY_MIN:g} to {EXPIRY_MAX:g} "
            "seconds, or 0 for no lease"
        )
    tls = TlsFiles(tls_cert, tls_key) if tls_cert and tls_key else None
    configuration = Configuration(
        location=store_location(local_root, bucket, path),
        store=StoreSettings(
            inflight_bytes=append_inflight_bytes,
            commit_interval=_commit_interval(commit_interval),
            leftover_grace=leftover_grace,
            reclaim_after=reclaim_after,
            reclaim_rate=reclaim_rate,
            commit_timeout=commit_timeout,
            disk_reserve=disk_reserve,
            trim_grace=trim_grace,
            trim_on_snapshot=trim_on_snapshot,
            fsync=not no_fsync,
        ),
        take_over=take_over,
        name=name,
        lease_expiry=lease_expiry,
        accept_loss=accept_loss,
        host=host,
        port=port if port is not None else TLS_PORT if tls or tls_self else PORT,
        tls=tls,
        tls_self=tls_self,
        cors=not no_cors,
        cors_origins=tuple(map(parse_origin, cors_origins)),
        public_url=public_url,
        init_file=init_file,
        root_token=_root_token(root_token_file) if auth or root_token_file else None,
        open_metrics=open_metrics,
        access_log=not no_access_log,
        default_basin=default_basin,
        long_poll=long_poll,
        local_webhooks=local_webhooks,
        console=None
        if no_console
        else ConsoleSettings(console_read_only, tables, snapshotters, servers),
    )
    options = (
        option
        for parameter in click.get_current_context().command.params
        for option in parameter.opts
    )
    for sentence in unused(os.environ, options):
        _warn(sentence)
    for folder in tables:
        if "://" not in folder and not Path(folder).is_dir():
            _warn(f"--tables {folder}: there is no such folder yet; the console will look for it")
    os.umask(_UMASK)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("botocore").setLevel(logging.WARNING)  # it logs a line for each file it reads
    run(configuration, lambda server: _announce(server, configuration, as_json))


def _commit_interval(interval: float | None) -> float:
    """Return the seconds between commits, from the option or from S2's own server's variable."""
    variable = flush_interval(os.environ)
    if variable is None:
        return interval or 0.0
    name = FLUSH_INTERVAL
    if interval is not None:
        _warn(f"{name} is not used: --commit-interval {interval:g} is given")
        return interval
    _warn(
        f"{name} is taken as --commit-interval {variable:g}: storage is written as soon as there is "
        "something to write, and at most that often"
    )
    return variable


def _warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)


def _root_token(file: Path | None) -> Secret:
    """Read the root token from its file, or else from the environment."""
    # Bytes that are not UTF-8 become unprintable characters.
    text = file.read_text(errors="surrogateescape") if file else os.environ.get(_ROOT_TOKEN, "")
    token = text.strip()
    if not token.isprintable():
        raise InvalidError(
            f"the root token in {file or _ROOT_TOKEN} is not one line of text, so that no client can "
            "send it in a header: put one there, for example from `openssl rand -base64 32`"
        )
    if len(token) < _ROOT_TOKEN_MIN:
        raise InvalidError(
            f"the root token has {len(token)} characters: put one of at least {_ROOT_TOKEN_MIN} "
            f"into {file or _ROOT_TOKEN}, for example from `openssl rand -base64 32`"
        )
    return Secret(token)


def _reach(configuration: Configuration) -> str:
    """Describe which clients can reach the server, and what they may do."""
    host = configuration.listening_host
    if configuration.guarded:
        return f"It listens on {host} and requires access tokens."
    if is_loopback(host):
        return (
            f"It listens on {host}, for this machine only, and requires no tokens. To serve other "
            "machines, add --auth, which requires tokens, or --host 0.0.0.0, which does not."
        )
    return f"It listens on {host} and is open: any client that reaches it may read and write."


def _announce(server: Server, configuration: Configuration, as_json: bool) -> None:
    if as_json:
        where = {"url": server.url, "port": server.port, "location": configuration.location}
        click.echo(json.dumps(where))
        return
    click.echo(f"Streamfold serves {configuration.location} at {server.url}", err=True)
    click.echo(_reach(configuration), err=True)
    if configuration.console is not None:
        click.echo(f"Open {server.url}/console in a browser.", err=True)
    click.echo(server.exports(), nl=False)
