"""Groups of verbs, with untruncated summaries and suggestions for misspelt verbs."""

from __future__ import annotations

from difflib import get_close_matches

import click

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
