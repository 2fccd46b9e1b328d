"""Chooses a command's server and token: from options, else from variables, else from the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from streamfold.cli.exit_status import ExitStatus, VerbFailedError
from streamfold.model.names import endpoint_url

ACCOUNT, BASIN, TOKEN = "S2_ACCOUNT_ENDPOINT", "S2_BASIN_ENDPOINT", "S2_ACCESS_TOKEN"
#: Error texts when a server answers plain HTTP with a TLS message: the SDK's, and http_client's.
_SIGNS_OF_TLS = ("terminated before a request stream", "illegal request line")
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

Function = TypeVar("Function", bound=Callable[..., Any])


def complete_context(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of contexts that begin with `incomplete`."""
    from streamfold.cli.contexts import read_contexts

    return [name for name in sorted(read_contexts().contexts) if name.startswith(incomplete)]


#: The options that choose a command's server.
TARGET_OPTIONS = (
    click.Option(
        ["--endpoint"], metavar="URL", help="The server's address, instead of S2_*_ENDPOINT."
    ),
    click.Option(
        ["--token-file"], type=FILE, help="File with the token, instead of S2_ACCESS_TOKEN."
    ),
    click.Option(
        ["--context"],
        metavar="NAME",
        help="Server and token of `streamfold config`, by name.",
        shell_complete=complete_context,
    ),
)
JSON_OPTION = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON lines.")


@dataclass(frozen=True, slots=True)
class Target:
    """A server and its token, each with the setting that named it."""

    account: str
    basin: str
    endpoint_from: str
    token: str | None
    token_from: str


def find_target(endpoint: str | None, token_file: Path | None, context: str | None) -> Target:
    """Find server and token in options, else in variables, else in a context.

    A context named by an option takes precedence over variables. A context's token is only sent to
    that context's server, never to a server named in another way.
    """
    server_token = read_token(token_file)
    if endpoint:
        url = endpoint_url(endpoint)
        return Target(url, url, "--endpoint", *_token(server_token, token_file))
    variables = endpoint_url(os.environ.get(ACCOUNT, "")), endpoint_url(os.environ.get(BASIN, ""))
    if context is None and any(variables):
        for name, value in zip((ACCOUNT, BASIN), variables, strict=True):
            if not value:
                raise _missing(f"{name} is not set")
        return Target(*variables, "environment", *_token(server_token, token_file))
    return _from_file(server_token, token_file, context)


def _from_file(server_token: str | None, token_file: Path | None, named: str | None) -> Target:
    # Imported here, because most calls from scripts need no file.
    from streamfold.cli.contexts import CONTEXT, config_path, read_contexts

    contexts = read_contexts()
    name = named or os.environ.get(CONTEXT) or contexts.current
    if not name:
        raise _missing(f"{ACCOUNT} is not set")
    context, source = contexts.get(name), f"context {name!r} in {config_path()}"
    for key, value in (("account_endpoint", context.account), ("basin_endpoint", context.basin)):
        if not value:
            raise VerbFailedError(
                "endpoint_missing",
                f"{source} has no {key}: run `streamfold config set endpoint URL --context {name}`",
                ExitStatus.USAGE,
            )
    token, token_from = _token(server_token, token_file)
    if token_file is None and (named or token is None):
        token, token_from = context.access_token, source if context.access_token else "none"
    return Target(
        endpoint_url(context.account), endpoint_url(context.basin), source, token, token_from
    )


def _token(server_token: str | None, file: Path | None) -> tuple[str | None, str]:
    if file is not None:
        return server_token, f"--token-file {file}"
    return server_token, TOKEN if server_token else "none"


def _missing(problem: str) -> VerbFailedError:
    return VerbFailedError(
        "endpoint_missing",
        f"{problem}: set the variables that `streamfold serve` prints, give --endpoint "
        "http://host:port, or run `streamfold config set endpoint URL` once",
        ExitStatus.USAGE,
    )


def tls_advice(endpoint: str, problem: str) -> str | None:
    """Return advice if a connection to `endpoint` failed because of TLS, according to `problem`."""
    if "WRONG_VERSION_NUMBER" in problem:
        return f"it has no TLS: write {endpoint.replace('https://', 'http://', 1)}"
    if "certificate has expired" in problem:
        return "renew its certificate, and restart it"
    if "mismatch" in problem:
        return "write the address by a name that its certificate has"
    if "CERTIFICATE_VERIFY_FAILED" in problem:
        return (
            "this machine does not trust its certificate: set SSL_CERT_FILE to a file with the "
            "certificate of its authority, or with its own if it is self-signed"
        )
    if any(sign in problem for sign in _SIGNS_OF_TLS) and endpoint.startswith("http://"):
        return f"if it has TLS, write {endpoint.replace('http://', 'https://', 1)}"
    return None


def read_token(file: Path | None) -> str | None:
    """Return the token from the file or else the environment, or None if there is none."""
    token = read_secret(file, "an access token") if file else os.environ.get(TOKEN, "").strip()
    if file and not token:
        raise VerbFailedError(
            "token_missing",
            f"{file} is empty: put an access token into it, or omit --token-file if the "
            "server needs none",
            ExitStatus.USAGE,
        )
    return token or None


def read_secret(file: Path, what: str) -> str:
    """Return the content of a file that contains only a secret."""
    try:
        return file.read_text().strip()
    except UnicodeDecodeError:  # the original error would contain the secret
        raise VerbFailedError(
            "invalid", f"{file} is not text: put {what} into it", ExitStatus.USAGE
        ) from None
