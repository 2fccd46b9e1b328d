"""`streamfold mcp`: gives an assistant access to streams and archives through streamfold-mcp."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import click

from streamfold.cli.connection import open_client
from streamfold.cli.exit_status import VerbFailedError
from streamfold.cli.target import TARGET_OPTIONS, find_target
from streamfold.extras import needing_extra


class NamedArchive(click.ParamType[tuple[str, str]]):
    """An archive's folder or URL, with the name that refers to it: `users=s3://bucket/users`."""

    name = "NAME=URI"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        name, equals, uri = value.partition("=")
        if not (name and equals and uri):
            self.fail(f"{value!r} is no NAME=URI, such as users=s3://bucket/users", param, ctx)
        return name, uri


@click.command()
@click.option("--allow-append", is_flag=True, help="Offer the tool that appends records, too.")
@click.option(
    "--archive",
    "archives",
    type=NamedArchive(),
    multiple=True,
    help="An archive that the assistant may query by SQL; may be given again.",
)
def mcp(
    endpoint: str | None,
    token_file: Path | None,
    context: str | None,
    allow_append: bool,
    archives: Sequence[tuple[str, str]],
) -> None:
    """Give an assistant that speaks MCP access to streams, over standard input and output.

    It has the rights of the access token, and cannot append without --allow-append. An assistant starts
    this command itself: https://modelcontextprotocol.io names the file where it is configured.
    """
    try:
        from streamfold_mcp.server import serve_stdio
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("streamfold_mcp", "mcp", "mcp_types"):
            raise
        raise VerbFailedError(
            "extra_missing",
            f"the package {error.name!r} is not installed: run pip install streamfold-mcp",
        ) from None
    if archives:
        with needing_extra("archive"):
            import streamfold.archive  # noqa: F401 - refused here, and not at the first question
    client = open_client(find_target(endpoint, token_file, context))
    asyncio.run(serve_stdio(client, archives=dict(archives), allow_append=allow_append))


mcp.params.extend(TARGET_OPTIONS)
