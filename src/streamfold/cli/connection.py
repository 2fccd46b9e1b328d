"""Finds the server for commands and talks to it: any S2 endpoint, through S2's Python SDK."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from streamfold.cli.output import Output
from streamfold.cli.parameters import FencingToken
from streamfold.cli.target import (
    FILE,
    JSON_OPTION,
    TARGET_OPTIONS,
    Target,
    find_target,
    read_secret,
)
from streamfold.errors import InvalidError
from streamfold.extras import needing_extra
from streamfold.model.names import StreamRef, is_bucket_name

if TYPE_CHECKING:
    from s2_sdk import S2, S2Basin, S2Stream

#: Sent without a token, because the SDK needs one and an open server accepts any.
_NO_TOKEN = "none"  # noqa: S105
#: Seconds allowed for one request, and for one acknowledgement. Remote storage may be slow.
_TIMEOUT = 30

Verb = Callable[..., Awaitable[None]]

Function = TypeVar("Function", bound=Callable[..., Any])
encryption_option = click.option(
    "--encryption-key-file",
    type=FILE,
    help="File with the stream's encryption key, 32 bytes in base64.",
)


def verb(name: str, *, changes: bool = False) -> Callable[[Verb], click.Command]:
    """Return a decorator that makes a command of a coroutine function.

    The function's first arguments are the client and the output. With `changes`, a failed attempt
    may have taken effect, so its outcome may be unknown. Such an append is not repeated unless the
    command is called with `at_least_once`.
    """

    def command_of(function: Verb) -> click.Command:
        @wraps(function)
        def run(
            endpoint: str | None,
            token_file: Path | None,
            context: str | None,
            as_json: bool,
            **options: Any,
        ) -> None:
            output = Output(as_json=as_json)
            at_least_once = bool(options.get("at_least_once"))
            with needing_extra("client"):
                from s2_sdk import S2Error
            # Imported objects stay in memory. Without this, the interpreter would search all of
            # them for cycles when the process ends, which takes a sixth of a short command's CPU
            # time.
            gc.freeze()
            target = find_target(endpoint, token_file, context)
            try:
                client = open_client(target, at_least_once)
                asyncio.run(_talk(client, function(client, output, **options)))
            except S2Error as error:
                # Imported here, because a successful command should not wait for it.
                from streamfold.cli.errors_from_s2 import failure_from_s2

                raise failure_from_s2(error, target, changes=changes) from error

        command = click.command(name)(run)
        command.params.extend((*TARGET_OPTIONS, JSON_OPTION))
        return command

    return command_of


async def _talk(client: S2, work: Awaitable[None]) -> None:
    async with client:
        await work


def open_client(target: Target, at_least_once: bool = False) -> S2:
    """Create a client for a server. Sends nothing."""
    from datetime import timedelta

    from s2_sdk import S2, AppendRetryPolicy, Endpoints, Retry, S2ClientError, Timeout

    policy = AppendRetryPolicy.ALL if at_least_once else AppendRetryPolicy.NO_SIDE_EFFECTS
    try:
        return S2(
            target.token or _NO_TOKEN,
            endpoints=Endpoints(account=target.account, basin=target.basin),
            timeout=Timeout(request=timedelta(seconds=_TIMEOUT)),
            retry=Retry(append_retry_policy=policy),
        )
    except S2ClientError as error:
        raise InvalidError(
            f"endpoint {target.account!r} cannot be used ({error}): write http://host:port, or "
            "https://host"
        ) from error


def open_basin(s2: S2, name: str) -> S2Basin:
    """Return a basin, whatever its name.

    A Durable Streams bucket is a basin, but its name may break S2's rules for basin names. The
    server accepts such a name for an existing basin, but the SDK would reject it before sending a
    request. Only this function depends on how the SDK builds a basin.
    """
    from s2_sdk import S2Basin

    if not is_bucket_name(name):
        return s2.basin(name)  # other servers may have their own rules
    client = s2._get_basin_client(name)
    return S2Basin(name, client, retry=s2._retry, compression=s2._compression)


async def send_json(
    s2: S2, method: str, path: str, body: object = None, *, basin: str | None = None
) -> bytes:
    """Send a request for which the SDK has no method, in the SDK's own way. Returns the response.

    Streamfold's own stream settings are not in the SDK's types. With `basin`, the request goes to
    the endpoint of that basin.
    """
    from streamfold.follow.clients.s2_internals import fallible

    client = s2._account_client if basin is None else s2._get_basin_client(basin)
    send = fallible(s2._retrier.__call__)
    response = await send(client.unary_request, method, path, json=body)
    content: bytes = response.content
    return content


def token_for(endpoint: str) -> str | None:
    """Return the running command's token for calls to `endpoint` that bypass the SDK.

    A context's token is only for that context's server.
    """
    options = click.get_current_context().params
    target = find_target(options.get("endpoint"), options.get("token_file"), options.get("context"))
    if target.token_from.startswith("context") and endpoint.rstrip("/") != target.account:
        return None
    return target.token


def condition_options(function: Function) -> Function:
    """Add the options for conditions of an append."""
    fencing = click.option(
        "--fencing-token",
        type=FencingToken(),
        metavar="TOKEN",
        help="Append only if this is the stream's token.",
    )
    matching = click.option(
        "--match-seq-num",
        type=click.IntRange(min=0),
        metavar="SEQ_NUM",
        help="Append only if the first record gets this seq_num.",
    )
    return matching(fencing(function))


def open_stream(s2: S2, ref: StreamRef, key_file: Path | None) -> S2Stream:
    """Open the stream, with the encryption key in `key_file` if given."""
    key = read_secret(key_file, "the key in base64") if key_file else None
    return open_basin(s2, ref.basin).stream(ref.stream, encryption_key=key)
