"""The verbs by section, each loaded only when called, so that one starts without the others."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from streamfold.extras import needing_extra

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: Characters of a summary: more than any has, so that none is truncated.
_SUMMARY = 400


class VerbGroup(click.Group):
    """A group that never truncates summaries, and suggests verbs that resemble an unknown one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        alike = get_close_matches(name, self.list_commands(ctx), n=3, cutoff=0.6)
        meant = f" Did you mean {' or '.join(map(repr, alike))}?" if alike else ""
        raise click.UsageError(f"No such command {name!r}.{meant}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, verb.get_short_help_str(_SUMMARY)) for name, verb in verbs if verb]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class Entry(NamedTuple):
    """The module of a verb, and its line in the menu."""

    module: str
    summary: str
    #: The extra that it needs.
    extra: str = "client"


SECTIONS: Final[dict[str, dict[str, Entry]]] = {
    "Server": {
        "serve": Entry("servers.serve", "Run a server.", "server"),
        "lite": Entry("servers.serve", "The same, under S2's name for it.", "server"),
        "top": Entry("servers.top", "Show what a server is doing, live.", ""),
    },
    "Stores": {
        "check": Entry("stores.check", "Read a whole store, and name what is damaged.", "server"),
        "backup": Entry("stores.backup", "Copy a store, running or stopped.", "server"),
        "restore": Entry("stores.backup", "Make a store from a backup.", "server"),
    },
    "Set-up": {
        "config": Entry("setup.config", "Name servers once, and choose between them.", ""),
        "completion": Entry("setup.completion", "Print a shell completion script.", ""),
        "doctor": Entry(
            "setup.doctor", "Check the set-up, and say how to fix what does not work.", ""
        ),
    },
    "Records": {
        "append": Entry("records.append", "Append the lines of standard input."),
        "read": Entry("records.read", "Print records, from the first or from any position."),
        "tail": Entry("records.read", "Print the last records."),
        "check-tail": Entry("records.positions", "Show the seq_num of the next record."),
        "trim": Entry("records.positions", "Remove all records before a seq_num."),
        "fence": Entry(
            "records.positions", "Set the fencing token; appends with another one fail."
        ),
        "bench": Entry("records.bench", "Measure how quickly a server appends and reads."),
    },
    "Streams": {
        "apply": Entry("resources.apply", "Make basins and streams what a file says."),
        "diff": Entry("resources.apply", "Show what apply would change."),
        "ls": Entry("resources.streams", "List basins, or the streams of one."),
        "list-streams": Entry("resources.streams", "List the streams of a basin."),
        "create-stream": Entry("resources.streams", "Create a stream, or ensure it."),
        "get-stream-config": Entry("resources.streams", "Show a stream's configuration."),
        "reconfigure-stream": Entry("resources.streams", "Change a stream's configuration."),
        "delete-stream": Entry("resources.streams", "Delete a stream."),
        "copy": Entry("records.copy", "Copy streams, or a basin, from one server to another."),
    },
    "Snapshots": {
        "snapshot": Entry(
            "snapshots.snapshot", "Take, restore, list and prune snapshots of a state."
        ),
    },
    "Tables": {
        "publish": Entry(
            "publishing.publish",
            "Publish tables of PostgreSQL as archives, in one command.",
            "server,postgres,spark",
        ),
        "ingest": Entry(
            "servers.ingest",
            "Fill streams from tables of PostgreSQL, and follow their changes.",
            "postgres",
        ),
        "archive": Entry(
            "archives.archive",
            "Inspect, verify, restore and follow tables published as files.",
            "archive",
        ),
        "snapshotter": Entry(
            "servers.snapshotter",
            "Publish the tables of change streams as archives, on Spark.",
            "spark",
        ),
    },
    "Basins": {
        "list-basins": Entry("resources.streams", "List basins."),
        "create-basin": Entry("resources.streams", "Create a basin, or ensure it."),
        "get-basin-config": Entry("resources.streams", "Show a basin's configuration."),
        "reconfigure-basin": Entry("resources.streams", "Change a basin's configuration."),
        "delete-basin": Entry("resources.streams", "Delete a basin and its streams."),
    },
    "Account": {
        "issue-access-token": Entry("resources.account", "Issue an access token."),
        "list-access-tokens": Entry("resources.account", "List access tokens."),
        "revoke-access-token": Entry("resources.account", "Revoke an access token."),
        "get-account-metrics": Entry("resources.account", "Show the usage of the account."),
        "get-basin-metrics": Entry("resources.account", "Show the usage of a basin."),
        "get-stream-metrics": Entry("resources.account", "Show the usage of a stream."),
    },
}
_ENTRIES: Final = {name: entry for verbs in SECTIONS.values() for name, entry in verbs.items()}


class Menu(VerbGroup):
    """A group whose verbs are in modules of their own."""

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
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete verbs from the menu, without loading any."""
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
