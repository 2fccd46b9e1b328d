"""A command whose help lists its options in sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click


class SectionedCommand(click.Command):
    """Lists options under headings, in the order of `sections`, and the others at the end."""

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]], **kwargs: Any) -> None:
        """`sections` has each section's options as users write them, such as `--port`."""
        super().__init__(*args, **kwargs)
        self._sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        lines = {
            parameter.opts[0]: line
            for parameter in self.get_params(ctx)
            if (line := parameter.get_help_record(ctx)) is not None
        }
        for title, options in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([lines.pop(option) for option in options])
        with formatter.section("Other"):
            formatter.write_dl(list(lines.values()))
