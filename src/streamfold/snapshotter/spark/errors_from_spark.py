"""Turns Spark's errors into ours, and says whether a retry may help.

StreamfoldError
└── RetryLaterError
    ├── QueryFailedError              a query or job of Spark failed
    └── ServerUnreachableError        check the server, and source.server
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from streamfold.errors import (
    ConditionFailedError,
    ConflictError,
    OutcomeUnknownError,
    RetryLaterError,
    StreamfoldError,
)

#: Most characters of Spark's message in a status.
SHOWN = 500
_OURS = re.compile(r"(?:streamfold(?:\.\w+)+\.)(\w+Error): ([^\n]*)")
#: Errors that are worth a retry, which starts at the manifest's head.
_PASSING = (RetryLaterError, OutcomeUnknownError, ConflictError, ConditionFailedError)


class QueryFailedError(RetryLaterError):
    """A job or a query of Spark failed, and not with one of our errors."""

    code = "query_failed"


class ServerUnreachableError(RetryLaterError):
    """The server of a table's stream does not answer."""

    code = "endpoint_unavailable"

    def __init__(self, server: str, cause: str) -> None:
        super().__init__(
            f"source.server {server} cannot be reached ({cause}): start it, or correct source.server"
        )


def error_from_spark(error: BaseException) -> StreamfoldError:
    """Return the error behind a failure; Spark passes on those of its Python processes as text."""
    if isinstance(error, StreamfoldError):
        return error
    text = str(error)
    for name, message in reversed(_OURS.findall(text)):
        kind = _kinds().get(name)
        if kind is not None:
            found = kind.__new__(kind)
            StreamfoldError.__init__(found, message)
            return found
    first = text.strip().partition("\n")[0][:SHOWN] or "no message"
    return QueryFailedError(
        f"a query or a job of Spark failed with {type(error).__name__}: {first.rstrip('.')}; run with "
        "--verbose to see the whole error"
    )


def is_retryable(error: StreamfoldError) -> bool:
    """Return whether a retry may succeed."""
    return isinstance(error, _PASSING)


def _kinds() -> dict[str, type[StreamfoldError]]:
    return {kind.__name__: kind for kind in _subclasses(StreamfoldError)}


def _subclasses(kind: type[StreamfoldError]) -> Iterator[type[StreamfoldError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _subclasses(child)
