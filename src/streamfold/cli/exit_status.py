"""Command failures as scripts see them: one line, a stable code and an exit status."""

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
    """The exit status of the process. Stable."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    #: match_seq_num or a fencing token did not match. Nothing was appended.
    CONDITION_FAILED = 3
    NOT_FOUND = 4
    #: The change may or may not have taken effect.
    OUTCOME_UNKNOWN = 5
    #: Nothing needed to be done, and nothing was done. The message says why.
    NOTHING_DONE = 6
    #: The compared things differ.
    DIFFERS = 7
    #: Another process has taken over the server's store. A restart would take it back.
    FENCED = 8
    INTERRUPTED = 130
    #: The reader closed the output; 128 + SIGPIPE, as shells report it.
    OUTPUT_CLOSED = 141


class VerbFailedError(StreamfoldError):
    """Raised when a command fails."""

    def __init__(self, reason: str, message: str, status: ExitStatus = ExitStatus.FAILURE) -> None:
        super().__init__(message)
        #: Stable. Most are the server's own codes.
        self.reason = reason
        self.status = status


class OutputClosedError(StreamfoldError):
    """Raised when the reader of standard output has closed it."""

    code = "output_closed"


_STATUSES: tuple[tuple[type[StreamfoldError], ExitStatus], ...] = (
    (ConditionFailedError, ExitStatus.CONDITION_FAILED),
    (NotFoundError, ExitStatus.NOT_FOUND),
    (OutcomeUnknownError, ExitStatus.OUTCOME_UNKNOWN),
)


@contextmanager
def exit_statuses() -> Iterator[None]:
    """Translate library errors into command failures, with the exit status of each kind."""
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
    # Messages contain names that others chose, which must not control the terminal.
    return "error: " + "".join(each if each.isprintable() else ascii(each)[1:-1] for each in shown)
