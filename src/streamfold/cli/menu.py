"""The menu of commands by section. Each command is loaded only when called, for a quick start."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from streamfold.cli.examples import EXAMPLES
from streamfold.cli.spellings import canonical, commands_on
from streamfold.extras import needing_extra

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: Maximum characters of a summary: longer than any summary, so that none is truncated.
_SUMMARY = 400


class VerbGroup(click.Group):
    """A group that never truncates summaries, and suggests commands similar to an unknown one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        if name == "help":
            return name, show_help, args[1:]
        alike = commands_on(name) or get_close_matches(name, self.list_commands(ctx), n=3)
        meant = f" Did you mean {' or '.join(map(repr, alike))}?" if alike else ""
        raise click.UsageError(f"No such command {name!r}.{meant}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, verb.get_short_help_str(_SUMMARY)) for name, verb in verbs if verb]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.command("help", add_help_option=False)
@click.argument("names", nargs=-1)
@click.pass_context
def show_help(context: click.Context, names: tuple[str, ...]) -> None:
    """Show the help of the group in which this was called, or of one of its commands."""
    shown = context.parent or context
    rest = [name for name in names if not name.startswith("-")]
    while rest and isinstance(shown.command, click.Group):
        name, command, rest = shown.command.resolve_command(shown, rest)
        if command is None or name == "help":
            break
        shown = click.Context(command, info_name=name, parent=shown)
    click.echo(shown.get_help())


def add_examples(command: click.Command, path: str) -> None:
    """Append examples to the help of a command and of all its subcommands."""
    lines = "\n".join(f"  {line}" for line in EXAMPLES.get(path, ()))
    command.epilog = f"\b\nExamples:\n{lines}" if lines else None
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            add_examples(part, f"{path} {name}")


class MenuEntry(NamedTuple):
    """The module of a command, and its line in the menu."""

    module: str
    summary: str
    #: The extra that the command needs.
    extra: str = "client"


SECTIONS: Final[dict[str, dict[str, MenuEntry]]] = {
    "Server": {
        "serve": MenuEntry("servers.serve", "Run a server.", "server"),
        "lite": MenuEntry("servers.serve", "Same as serve, under S2's name for it.", "server"),
        "mcp": MenuEntry("servers.mcp", "Give an assistant access to streams over MCP."),
        "top": MenuEntry("servers.top", "Show what a server is doing, live.", ""),
    },
    "Stores": {
        "check": MenuEntry("stores", "Verify a whole store and report damage.", "server"),
        "backup": MenuEntry("stores", "Copy a store, running or stopped.", "server"),
        "restore": MenuEntry("stores", "Create a store from a backup.", "server"),
    },
    "Set-up": {
        "config": MenuEntry(
            "setup.config", "Store servers under names and switch between them.", ""
        ),
        "completion": MenuEntry("setup.completion", "Print a shell completion script.", ""),
        "doctor": MenuEntry(
            "setup.doctor", "Check the set-up and explain how to fix problems.", ""
        ),
    },
    "Records": {
        "append": MenuEntry("records.append", "Append the lines of standard input."),
        "read": MenuEntry("records.read", "Print records, from the first or from any position."),
        "tail": MenuEntry("records.read", "Print the last records."),
        "check-tail": MenuEntry("records.positions", "Show the seq_num of the next record."),
        "trim": MenuEntry("records.positions", "Remove all records before a seq_num."),
        "fence": MenuEntry(
            "records.positions", "Set the fencing token; appends with a different token fail."
        ),
        "bench": MenuEntry("records.bench", "Measure how fast a server appends and reads."),
    },
    "Streams": {
        "apply": MenuEntry(
            "resources.apply", "Create and configure basins and streams from a file."
        ),
        "diff": MenuEntry("resources.apply", "Show what apply would change."),
        "ls": MenuEntry("resources.streams", "List basins, or the streams of a basin."),
        "list-streams": MenuEntry("resources.streams", "List the streams of a basin."),
        "create-stream": MenuEntry(
            "resources.streams", "Create a stream, or ensure that it exists."
        ),
        "get-stream-config": MenuEntry("resources.streams", "Show a stream's configuration."),
        "reconfigure-stream": MenuEntry("resources.streams", "Change a stream's configuration."),
        "delete-stream": MenuEntry("resources.streams", "Delete a stream."),
        "copy": MenuEntry("records.copy", "Copy streams or whole basins between servers."),
    },
    "Snapshots": {
        "snapshot": MenuEntry(
            "snapshots.snapshot", "Take, restore, list and prune state snapshots."
        ),
    },
    "Tables": {
        "publish": MenuEntry(
            "publishing.publish",
            "Publish PostgreSQL tables as archives, in one command.",
            "server,postgres,spark",
        ),
        "ingest": MenuEntry(
            "servers.ingest",
            "Copy PostgreSQL tables into streams and follow their changes.",
            "postgres",
        ),
        "archive": MenuEntry(
            "archives.archive",
            "Inspect, verify, restore and follow tables published as files.",
            "archive",
        ),
        "snapshotter": MenuEntry(
            "servers.snapshotter",
            "Publish change streams as archives, on Spark.",
            "spark",
        ),
    },
    "Basins": {
        "list-basins": MenuEntry("resources.streams", "List basins."),
        "create-basin": MenuEntry("resources.streams", "Create a basin, or ensure that it exists."),
        "get-basin-config": MenuEntry("resources.streams", "Show a basin's configuration."),
        "reconfigure-basin": MenuEntry("resources.streams", "Change a basin's configuration."),
        "delete-basin": MenuEntry("resources.streams", "Delete a basin and its streams."),
    },
    "Account": {
        "issue-access-token": MenuEntry("resources.account", "Issue an access token."),
        "list-access-tokens": MenuEntry("resources.account", "List access tokens."),
        "revoke-access-token": MenuEntry("resources.account", "Revoke an access token."),
        "get-account-metrics": MenuEntry("resources.account", "Show account usage."),
        "get-basin-metrics": MenuEntry("resources.account", "Show basin usage."),
        "get-stream-metrics": MenuEntry("resources.account", "Show stream usage."),
    },
}
_ENTRIES: Final = {name: entry for verbs in SECTIONS.values() for name, entry in verbs.items()}


class Menu(VerbGroup):
    """A group whose commands are in separate modules."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_ENTRIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _ENTRIES.get(cmd_name)
        if entry is None:
            return None
        with needing_extra(entry.extra):
            module = import_module(f"streamfold.cli.{entry.module}")
        attribute = "serve" if entry.module == "servers.serve" else cmd_name.replace("-", "_")
        command: click.Command = getattr(module, attribute)
        add_examples(command, command.name or cmd_name)  # `lite` is serve
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, canonical(args))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands from the menu, without loading any."""
        from click.shell_completion import CompletionItem

        verbs = [
            CompletionItem(name, help=entry.summary)
            for name, entry in _ENTRIES.items()
            if name.startswith(incomplete)
        ]
        return verbs + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, _ENTRIES))
        for title, verbs in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(f"{name:<{width}}", entry.summary) for name, entry in verbs.items()]
                )
