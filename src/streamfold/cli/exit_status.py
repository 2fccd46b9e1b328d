"""Failures of commands, as a script sees them: one line, a stable code and an exit status."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from contextlib import contextmanager

from streamfold.errors import (
    ConditionFailedError,
    NotFoundError,
    OutcomeUnknownError,
    StreamfoldError,
)


class ExitStatus(enum.IntEnum):
    """The exit status of the process; stable."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    #: match_seq_num or a fencing token did not hold; nothing was appended.
    CONDITION_FAILED = 3
    NOT_FOUND = 4
    #: The change may or may not have taken effect.
    OUTCOME_UNKNOWN = 5
    #: Nothing needed to be done, and nothing was; the message says why.
    NOTHING_DONE = 6
    #: What was compared differs.
    DIFFERS = 7
    #: Another process took the server's store over; a restart would take it back.
    FENCED = 8
    INTERRUPTED = 130
    #: The reader closed the output; 128 + SIGPIPE, as shells report it.
    OUTPUT_CLOSED = 141


class VerbFailedError(StreamfoldError):
    """A command failed."""

    def __init__(self, reason: str, message: str, status: ExitStatus = ExitStatus.FAILURE) -> None:
        super().__init__(message)
        #: Stable; most are the server's own codes.
        self.reason = reason
        self.status = status


class OutputClosedError(StreamfoldError):
    """The reader of standard output closed it."""

    code = "output_closed"


_STATUSES: tuple[tuple[type[StreamfoldError], ExitStatus], ...] = (
    (ConditionFailedError, ExitStatus.CONDITION_FAILED),
    (NotFoundError, ExitStatus.NOT_FOUND),
    (OutcomeUnknownError, ExitStatus.OUTCOME_UNKNOWN),
)


@contextmanager
def exit_statuses() -> Iterator[None]:
    """Raise errors of the library as failures of the command, with the status of their group."""
    try:
        yield
    except (VerbFailedError, OutputClosedError):
        raise
    except StreamfoldError as error:
        fitting = [status for kind, status in _STATUSES if isinstance(error, kind)]
        status = fitting[0] if fitting else ExitStatus.FAILURE
        raise VerbFailedError(error.code, error.message, status) from error


def failure_line(reason: str, message: str, *, as_json: bool) -> str:
    """Format a failure as one line for standard error."""
    if as_json:
        return json.dumps({"error": {"code": reason, "message": message}})
    shown = " ".join(message.split())
    # Messages name what others chose: a terminal must not obey it.
    return "error: " + "".join(each if each.isprintable() else ascii(each)[1:-1] for each in shown)
