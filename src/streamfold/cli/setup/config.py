"""`streamfold config`: manages named servers with their tokens, and the current one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from streamfold.cli.contexts import (
    DEFAULT_NAME,
    KEYS,
    Context,
    config_path,
    masked,
    read_contexts,
    readable_by_others,
    write_contexts,
)
from streamfold.cli.exit_status import ExitStatus, VerbFailedError
from streamfold.cli.json_output import Shape
from streamfold.cli.menu import VerbGroup
from streamfold.cli.output import Output
from streamfold.cli.target import ACCOUNT, BASIN, TARGET_OPTIONS, complete_context, find_target
from streamfold.cli.terminal import aligned

Function = TypeVar("Function", bound=Callable[..., Any])

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON lines.")
_KEY = click.argument("key", type=click.Choice(KEYS), metavar="KEY")
_CONTEXT = click.option(
    "--context",
    metavar="NAME",
    help="The context, instead of the current.",
    shell_complete=complete_context,
)
_NAME = click.argument("name", shell_complete=complete_context)


@click.group(cls=VerbGroup)
def config() -> None:
    """Name servers once, and choose between them.

    The file is ~/.config/streamfold/config.toml, or what STREAMFOLD_CONFIG names; only its owner can
    read it. Options come before variables (S2_*_ENDPOINT, S2_ACCESS_TOKEN), variables before the file.
    --context chooses a context for one call. STREAMFOLD_CONTEXT and `config use` apply only while
    S2_*_ENDPOINT are not set.
    """


@config.command("list")
@_JSON
def list_contexts(as_json: bool) -> None:
    """List the contexts, with their servers; a star marks the current one."""
    output, contexts = Output(as_json=as_json), read_contexts()
    _note_permissions(output)
    shapes = [
        {"name": name, "current": name == contexts.current, **context.shown()}
        for name, context in sorted(contexts.contexts.items())
    ]
    if as_json:
        output.show_objects(shapes)
    elif not shapes:
        output.note("no contexts: make one with `streamfold config set endpoint URL`")
    else:
        rows = [
            ("*" if shape["current"] else "", str(shape["name"]), context.account,
             masked(context.access_token) if context.access_token else "-")
            for shape, (_, context) in zip(shapes, sorted(contexts.contexts.items()), strict=True)
        ]  # fmt: skip
        output.write_lines(aligned(rows, ("", "context", "endpoint", "token")))


@config.command()
@_JSON
def show(endpoint: str | None, token_file: Path | None, context: str | None, as_json: bool) -> None:
    """Show the server and the token that a command would use now, and where each comes from."""
    output, target = Output(as_json=as_json), find_target(endpoint, token_file, context)
    _note_permissions(output)
    token = masked(target.token) if target.token else None
    shape: Shape = {
        "account_endpoint": target.account,
        "basin_endpoint": target.basin,
        "endpoint_from": target.endpoint_from,
        "access_token": token,
        "token_from": target.token_from,
    }
    rows = [
        ("account endpoint", target.account, target.endpoint_from),
        ("basin endpoint", target.basin, target.endpoint_from),
        ("access token", token or "-", target.token_from),
    ]
    output.show(shape, "\n".join(aligned(rows, ("setting", "value", "from"))))


show.params[:0] = TARGET_OPTIONS


@config.command("get")
@_KEY
@_CONTEXT
@_JSON
def get_value(key: str, context: str | None, as_json: bool) -> None:
    """Show one value of a context; a token is masked."""
    name, stored = _context(context)
    value = stored.shown().get(key)
    if value is None:
        raise VerbFailedError(
            "value_not_set",
            f"context {name!r} has no {key}: run `streamfold config set {key} VALUE`",
            ExitStatus.NOT_FOUND,
        )
    Output(as_json=as_json).show({"context": name, "key": key, "value": value}, value)


@config.command("set")
@_KEY
@click.argument("value")
@_CONTEXT
@_JSON
def set_value(key: str, value: str, context: str | None, as_json: bool) -> None:
    """Set a value of a context, which is created if there is none.

    KEY is endpoint, account_endpoint, basin_endpoint or access_token. As VALUE, - reads one line of
    standard input, without showing it at a terminal: this keeps a token out of the shell's history.
    """
    contexts = read_contexts()
    name = context or contexts.current or DEFAULT_NAME
    content = _read_value(key) if value == "-" else value
    before = contexts.contexts.get(name, Context())
    write_contexts(contexts.with_context(name, before.changed(key, content)))
    shown = masked(content) if key == "access_token" else content
    Output(as_json=as_json).show(
        {"context": name, "key": key, "value": shown}, f"{name}: {key} = {shown}"
    )


@config.command()
@_KEY
@_CONTEXT
@_JSON
def unset(key: str, context: str | None, as_json: bool) -> None:
    """Remove a value from a context."""
    name, stored = _context(context)
    write_contexts(read_contexts().with_context(name, stored.changed(key, None)))
    Output(as_json=as_json).show(
        {"context": name, "key": key, "value": None}, f"{name}: {key} is not set"
    )


@config.command()
@_NAME
@_JSON
def use(name: str, as_json: bool) -> None:
    """Make a context the current one, which commands use when nothing else names a server."""
    contexts = read_contexts()
    context = contexts.get(name)
    write_contexts(type(contexts)(name, contexts.contexts))
    output = Output(as_json=as_json)
    output.show(
        {"name": name, "current": True, **context.shown()}, f"{name}: {context.account or '-'}"
    )
    if named := [variable for variable in (ACCOUNT, BASIN) if os.environ.get(variable)]:
        output.note(
            f"warning: {' and '.join(named)} come before the current context: unset them, or name the "
            "context with --context"
        )


@config.command()
@_NAME
@_JSON
def delete(name: str, as_json: bool) -> None:
    """Remove a context and its token from the file."""
    write_contexts(read_contexts().without(name))
    Output(as_json=as_json).show({"name": name, "status": "deleted"}, f"{name}  deleted")


def _context(named: str | None) -> tuple[str, Context]:
    contexts = read_contexts()
    name = named or contexts.current or DEFAULT_NAME
    return name, contexts.get(name)


def _read_value(key: str) -> str:
    if sys.stdin.isatty():
        entered: str = click.prompt(key, hide_input=True, err=True)
        return entered.strip()
    return sys.stdin.readline().strip()


def _note_permissions(output: Output) -> None:
    path = config_path()
    if readable_by_others(path):
        output.note(f"warning: other users can read {path}: run chmod 600 {path}")
