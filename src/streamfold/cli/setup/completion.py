"""`streamfold completion`: scripts for shells, and the names that they complete."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress

import click
from click.shell_completion import get_completion_class

from streamfold.cli.exit_status import VerbFailedError
from streamfold.cli.output import Output
from streamfold.cli.target import JSON_OPTION, find_target
from streamfold.errors import StreamfoldError

_VARIABLE = "_STREAMFOLD_COMPLETE"
#: Seconds that a person at the Tab key waits for names from a server, and maximum names.
_TIMEOUT, _NAMES_MAX = 2.0, 200
#: Names that a shell inserts unchanged. Others could become commands.
_PLAIN = re.compile(r"[\w./=@+:-]+", re.ASCII)
_SCHEME = "s2://"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str, as_json: bool) -> None:
    """Print a script that completes commands, options, contexts, basins and streams.

    \b
    bash:  eval "$(streamfold completion bash)"          in ~/.bashrc
    zsh:   eval "$(streamfold completion zsh)"           in ~/.zshrc
    fish:  streamfold completion fish > ~/.config/fish/completions/streamfold.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise VerbFailedError("invalid", f"{shell} is not known to this version of click")
    script = kind(context.find_root().command, {}, "streamfold", _VARIABLE).source()
    Output(as_json=as_json).show({"shell": shell, "script": script}, script)


completion.params.append(JSON_OPTION)


def names_on_server(context: click.Context, incomplete: str) -> list[str]:
    """Return basins, or a basin's streams, that begin with `incomplete`.

    Returns nothing if the server fails, because a shell cannot show an error here.
    """
    from s2_sdk import S2Error

    from streamfold.cli.connection import open_client

    scheme = _SCHEME if incomplete.startswith(_SCHEME) else ""
    basin, slash, prefix = incomplete.removeprefix(scheme).partition("/")
    params = context.params
    names: list[str] = []

    async def ask() -> None:
        target = find_target(
            params.get("endpoint"), params.get("token_file"), params.get("context")
        )
        async with asyncio.timeout(_TIMEOUT), open_client(target) as s2:
            if slash:
                streams = await s2.basin(basin).list_streams(prefix=prefix, limit=_NAMES_MAX)
                names.extend(f"{basin}/{stream.name}" for stream in streams.items)
            else:
                basins = await s2.list_basins(prefix=basin, limit=_NAMES_MAX)
                names.extend(f"{info.name}/" for info in basins.items)

    with suppress(S2Error, StreamfoldError, OSError, TimeoutError):
        asyncio.run(ask())
    return [scheme + name for name in names if _PLAIN.fullmatch(name)]
