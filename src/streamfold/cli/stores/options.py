"""What the commands on stores have in common: how they run, and how their failures end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeAlias

import click

from streamfold.cli.exit_status import ExitStatus, VerbFailedError
from streamfold.cli.output import Output, ProgressBar
from streamfold.cli.target import JSON_OPTION
from streamfold.errors import InvalidError, NotFoundError, StreamfoldError

StoreVerb: TypeAlias = Callable[..., Awaitable[None]]
#: Bytes from which a progress bar is shown.
_BAR_FROM = 8 << 20


def store_verb(name: str, failed: ExitStatus) -> Callable[[StoreVerb], click.Command]:
    """Make an async function a command; `failed` is the status of failures that have none of their own.

    The first argument of the function is the Output.
    """

    def decorate(function: StoreVerb) -> click.Command:
        @wraps(function)
        def run(as_json: bool, **given: Any) -> None:
            try:
                with _quiet_log():
                    asyncio.run(_finished(function(Output(as_json=as_json), **given)))
            except VerbFailedError:
                raise
            except StreamfoldError as error:
                raise VerbFailedError(error.code, error.message, _status(error, failed)) from error
            except KeyboardInterrupt:
                raise click.exceptions.Abort from None

        command = click.command(name)(run)
        command.params.append(JSON_OPTION)
        return command

    return decorate


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Keep the log off the terminal: the command reports what the store would log."""
    log = logging.getLogger("streamfold")
    nowhere, propagate = logging.NullHandler(), log.propagate
    log.addHandler(nowhere)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(nowhere)
        log.propagate = propagate


async def _finished(call: Awaitable[None]) -> None:
    await call


def _status(error: StreamfoldError, failed: ExitStatus) -> ExitStatus:
    if failed is not ExitStatus.FAILURE:
        return failed
    if isinstance(error, NotFoundError):
        return ExitStatus.NOT_FOUND
    return ExitStatus.USAGE if isinstance(error, InvalidError) else ExitStatus.FAILURE


class Bar:
    """A progress bar whose total is known only after a while."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: ProgressBar | None = None
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = ProgressBar(self._label, total, least=_BAR_FROM)
        self._bar.total = max(total, self._bar.total)
        self._bar.update(done - self._done)
        self._done = done

    def close(self) -> None:
        if self._bar is not None:
            self._bar.__exit__()
            self._bar = None


def human_size(size: float) -> str:
    """Bytes for people: 12.3 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"
