"""How verbs find a server and talk to it: any S2 endpoint, through S2's Python SDK."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import click

from streamfold.cli.exit_status import ExitStatus, VerbFailedError
from streamfold.cli.output import Output
from streamfold.extras import needing_extra
from streamfold.model.names import StreamRef, is_bucket_name

if TYPE_CHECKING:
    from s2_sdk import S2, Endpoints, S2Basin, S2Stream

_ACCOUNT, _BASIN, _TOKEN = "S2_ACCOUNT_ENDPOINT", "S2_BASIN_ENDPOINT", "S2_ACCESS_TOKEN"
#: Sent when no token is given: the SDK needs one, and an open server accepts any.
_NO_TOKEN = "none"  # noqa: S105
#: Names of this machine.
_LOOPBACK = re.compile(r"localhost|.+\.localhost|127(\.\d+){3}|::1")
#: Seconds that one request may take, and one acknowledgement: remote storage may be slow.
_TIMEOUT = 30
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

Verb = Callable[..., Awaitable[None]]

_EVERY_VERB = (
    click.Option(
        ["--endpoint"], metavar="URL", help="The server's address, instead of S2_*_ENDPOINT."
    ),
    click.Option(
        ["--token-file"], type=FILE, help="File with the token, instead of S2_ACCESS_TOKEN."
    ),
    click.Option(["--json", "as_json"], is_flag=True, help="Print JSON lines."),
)
Function = TypeVar("Function", bound=Callable[..., Any])
encryption_option = click.option(
    "--encryption-key-file",
    type=FILE,
    help="File with the stream's encryption key, 32 bytes in base64.",
)


def verb(name: str, *, changes: bool = False) -> Callable[[Verb], click.Command]:
    """Make a command of a coroutine function; its first arguments are the client and the output.

    With `changes`, a failed attempt may still have taken effect: its outcome may be unknown. Such an
    append is not repeated, unless the verb is called with `at_least_once`.
    """

    def command_of(function: Verb) -> click.Command:
        @wraps(function)
        def run(endpoint: str | None, token_file: Path | None, as_json: bool, **given: Any) -> None:
            output = Output(as_json=as_json)
            at_least_once = bool(given.get("at_least_once"))
            with needing_extra("client"):
                from s2_sdk import S2Error

                from streamfold.cli.errors_from_s2 import failure_from_s2

                client = open_client(endpoint, token_file, at_least_once=at_least_once)
            try:
                asyncio.run(_talk(client, function(client, output, **given)))
            except S2Error as error:
                raise failure_from_s2(error, changes=changes) from error

        command = click.command(name)(run)
        command.params.extend(_EVERY_VERB)
        return command

    return command_of


async def _talk(client: S2, work: Awaitable[None]) -> None:
    async with client:
        await work


def open_client(endpoint: str | None, token_file: Path | None, *, at_least_once: bool) -> S2:
    """Make a client of the server that options or variables name; this sends nothing."""
    from datetime import timedelta

    from s2_sdk import S2, AppendRetryPolicy, Retry, Timeout

    policy = AppendRetryPolicy.ALL if at_least_once else AppendRetryPolicy.NO_SIDE_EFFECTS
    return S2(
        _token(token_file),
        endpoints=_endpoints(endpoint),
        timeout=Timeout(request=timedelta(seconds=_TIMEOUT)),
        retry=Retry(append_retry_policy=policy),
    )


def open_basin(s2: S2, name: str) -> S2Basin:
    """Return a basin, whatever its name.

    Durable Streams may name a bucket, which is a basin, more freely than S2 names basins. The server
    accepts such a name for an existing basin, but the SDK would refuse it before asking. Only this
    function knows how the SDK builds a basin.
    """
    from s2_sdk import S2Basin

    if not is_bucket_name(name):
        return s2.basin(name)  # other servers may have their own rules
    client = s2._get_basin_client(name)
    return S2Basin(name, client, retry=s2._retry, compression=s2._compression)


def _endpoints(endpoint: str | None) -> Endpoints:
    from s2_sdk import Endpoints

    account, basin = (
        _with_scheme(endpoint or os.environ.get(name, "")) for name in (_ACCOUNT, _BASIN)
    )
    for name, value in ((_ACCOUNT, account), (_BASIN, basin)):
        if not value:
            raise VerbFailedError(
                "endpoint_missing",
                f"{name} is not set: set the variables that `streamfold serve` prints, "
                "or give --endpoint http://host:port",
                ExitStatus.USAGE,
            )
    return Endpoints(account=account, basin=basin)


def current_token() -> str | None:
    """Return the running verb's token, for calls that do not go through the SDK."""
    return _token(click.get_current_context().params.get("token_file"))


def _with_scheme(endpoint: str) -> str:
    """Make a URL of `host:port`: servers on this machine rarely have certificates, others should."""
    if not endpoint or "://" in endpoint:
        return endpoint
    host = urlsplit(f"//{endpoint}").hostname or ""
    return f"http://{endpoint}" if _LOOPBACK.fullmatch(host) else f"https://{endpoint}"


def _token(file: Path | None) -> str:
    token = (file.read_text() if file else os.environ.get(_TOKEN, "")).strip()
    if file and not token:
        raise VerbFailedError(
            "token_missing",
            f"{file} is empty: put an access token into it, or omit --token-file if the "
            "server needs none",
            ExitStatus.USAGE,
        )
    return token or _NO_TOKEN


def condition_options(function: Function) -> Function:
    """Add the conditions under which an append is made."""
    fencing = click.option(
        "--fencing-token", metavar="TOKEN", help="Append only if this is the stream's token."
    )
    matching = click.option(
        "--match-seq-num",
        type=click.IntRange(min=0),
        metavar="SEQ_NUM",
        help="Append only if the first record gets this seq_num.",
    )
    return matching(fencing(function))


def open_stream(s2: S2, ref: StreamRef, key_file: Path | None) -> S2Stream:
    """Open the stream, with its encryption key if a file is given."""
    key = key_file.read_text().strip() if key_file else None
    return open_basin(s2, ref.basin).stream(ref.stream, encryption_key=key)
