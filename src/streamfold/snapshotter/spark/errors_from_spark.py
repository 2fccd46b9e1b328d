"""Turns Spark's errors into ours, and says whether a retry may help.

StreamfoldError
└── RetryLaterError
    ├── QueryFailedError              a query or job of Spark failed
    └── ServerUnreachableError        check the server, and source.server
"""

from __future__ import annotations

from streamfold.errors import (
    ConditionFailedError,
    ConflictError,
    OutcomeUnknownError,
    RetryLaterError,
    StreamfoldError,
)
from streamfold.spark.errors import error_behind

#: Most characters of Spark's message in a status.
SHOWN = 500
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
    """Return our error behind a failure, or a QueryFailedError for one that is Spark's own."""
    found = error_behind(error)
    if found is not None:
        return found
    first = str(error).strip().partition("\n")[0][:SHOWN] or "no message"
    return QueryFailedError(
        f"a query or a job of Spark failed with {type(error).__name__}: {first.rstrip('.')}; run with "
        "--verbose to see the whole error"
    )


def is_retryable(error: StreamfoldError) -> bool:
    """Return whether a retry may succeed."""
    return isinstance(error, _PASSING)
