"""`streamfold`: runs a command and reports its failure."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from streamfold import __version__
from streamfold.cli.exit_status import (
    ExitStatus,
    OutputClosedError,
    VerbFailedError,
    failure_line,
)
from streamfold.cli.menu import Menu
from streamfold.errors import StreamfoldError, WriterFencedError

#: click's wording for a text that is not a number, and its meaning.
_WORDINGS: Final = {
    "is not a valid integer range": "is not a whole number",
    "is not a valid float range": "is not a number",
}


@click.group(cls=Menu, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="streamfold")
def streamfold() -> None:
    """A durable stream store with built-in snapshots.

    Commands for records, streams, basins and the account talk to a server: Streamfold, or any other
    with the S2 API. They find it through S2_ACCOUNT_ENDPOINT, S2_BASIN_ENDPOINT and S2_ACCESS_TOKEN,
    as printed by `serve`, or through a context set with `config`. All of them take --json and --help.

    \b
    Examples:
      streamfold serve --local-root data --port 8080
      streamfold help append
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. A failure is reported as one line on standard error and an exit status."""
    _replace_closed_streams()
    args = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in args
    try:
        streamfold.main(args=args, prog_name="streamfold", standalone_mode=False)
    except click.exceptions.Abort:
        if sys.stderr.isatty():
            click.echo(err=True)  # the prompt ends without a newline
        sys.exit(ExitStatus.INTERRUPTED)
    except OutputClosedError:
        sys.exit(ExitStatus.OUTPUT_CLOSED)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(ExitStatus.USAGE)
    except click.ClickException as error:
        _fail("usage", _usage_message(error), as_json, ExitStatus.USAGE)
    except VerbFailedError as error:
        _fail(error.reason, error.message, as_json, error.status)
    except WriterFencedError as error:
        _fail(error.code, error.message, as_json, ExitStatus.FENCED)
    except StreamfoldError as error:
        _fail(error.code, error.message, as_json, ExitStatus.FAILURE)
    except OSError as error:
        from streamfold.cli.output import discard_the_rest

        discard_the_rest()
        if isinstance(error, BrokenPipeError):
            sys.exit(ExitStatus.OUTPUT_CLOSED)
        where = "" if error.filename is None else f"{error.filename}: "
        _fail("system", f"{where}{error.strerror or error}", as_json, ExitStatus.FAILURE)


def _replace_closed_streams() -> None:
    """Open the null device for standard streams that the caller has closed.

    Otherwise a connection would get the descriptor of one, and a successful command would fail when
    it prints its result.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


def _fail(reason: str, message: str, as_json: bool, status: ExitStatus) -> None:
    click.echo(failure_line(reason, message, as_json=as_json), err=True)
    sys.exit(status)


def _usage_message(error: click.ClickException) -> str:
    message = error.format_message()
    for wording, ours in _WORDINGS.items():
        message = message.replace(wording, ours)
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{message} (see '{error.ctx.command_path} --help')"
    return message


if __name__ == "__main__":
    main()
