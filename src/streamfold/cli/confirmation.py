"""Asking before something is removed for good: a person answers, a script gives `--yes`."""

from __future__ import annotations

import sys

import click

from streamfold.cli.exit_status import ExitStatus, VerbFailedError

yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


def confirm(removal: str, *, yes: bool) -> None:
    """Return if `removal` is wanted; nothing is sent to the server unless it is."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise VerbFailedError(
            "confirmation_missing",
            f"this would {removal}, and nobody is there to ask: give --yes to do it",
            ExitStatus.USAGE,
        )
    if not click.confirm(f"This will {removal}. Go on?", err=True):
        raise VerbFailedError("declined", "nothing was removed: the answer was no")
