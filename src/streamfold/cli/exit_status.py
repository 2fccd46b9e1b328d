"""Failures of verbs, as a script sees them: one line, a stable code and an exit status."""

from __future__ import annotations

import enum

import msgspec

from streamfold.errors import StreamfoldError


class ExitStatus(enum.IntEnum):
    """What the process ends with; part of the contract."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    #: match_seq_num or a fencing token did not hold; nothing was appended.
    CONDITION_FAILED = 3
    NOT_FOUND = 4
    #: What was asked for may or may not have happened.
    OUTCOME_UNKNOWN = 5
    #: There was nothing to do, and nothing was done; the message says why.
    NOTHING_DONE = 6
    INTERRUPTED = 130
    #: Whoever read the output has had enough; 128 + SIGPIPE, as a shell has it.
    OUTPUT_CLOSED = 141


class VerbFailedError(StreamfoldError):
    """A verb ended without having done its work."""

    def __init__(self, reason: str, message: str, status: ExitStatus = ExitStatus.FAILURE) -> None:
        super().__init__(message)
        #: Stable, like the codes of the server, which most of them are.
        self.reason = reason
        self.status = status


class OutputClosedError(StreamfoldError):
    """Nobody reads the output any more."""

    code = "output_closed"


def failure_line(reason: str, message: str, *, as_json: bool) -> str:
    """The one line on standard error that a failure is."""
    if as_json:
        return msgspec.json.encode({"error": {"code": reason, "message": message}}).decode()
    return "error: " + " ".join(message.split())
