"""`streamfold`: the verbs, and how their failures are shown."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from streamfold import __version__
from streamfold.cli.serve import serve
from streamfold.errors import StreamfoldError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="streamfold")
def streamfold() -> None:
    """A durable stream store that knows about snapshots."""


streamfold.add_command(serve, "serve")
streamfold.add_command(serve, "lite")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a failure is one line on standard error and exit status 1."""
    try:
        streamfold.main(args=arguments, prog_name="streamfold", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except StreamfoldError as error:
        click.echo(f"streamfold: {error.message}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
