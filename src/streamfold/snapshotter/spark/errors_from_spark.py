"""Turns Spark's errors into ours, and says whether a retry may help.

StreamfoldError
├── DataLossError
│   └── ChangesLostError              begin a new archive, from all rows
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
from streamfold.spark.errors import (
    DataLossError,
    EndpointUnavailableError,
    StreamGoneError,
    StreamReplacedError,
    error_behind,
)

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


class ChangesLostError(DataLossError):
    """Records that the table has not taken in are gone from its stream."""

    code = "data_loss"

    def __init__(self, stream: str, lost: str) -> None:
        StreamfoldError.__init__(
            self,
            f"{lost}, and the table cannot continue without its changes: have the source write all "
            "rows again, and begin a new archive with another key_prefix",
        )
        self.stream = stream

    @classmethod
    def shortened(cls, stream: str, tail: int, position: int) -> ChangesLostError:
        """Return the error for a stream that ends before the next record of the table."""
        return cls(
            stream,
            f"stream {stream!r} ends before record {tail}, and the table has its records up to "
            f"{position - 1}: it was created anew, or restored to an earlier state",
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


def in_terms_of_tables(error: StreamfoldError, server: str) -> StreamfoldError:
    """Return the error with a way out that a table's configuration has; others name Spark's options."""
    if isinstance(error, EndpointUnavailableError):
        return ServerUnreachableError(server, error.cause)
    if isinstance(error, StreamGoneError):
        return ChangesLostError(error.stream, f"stream {error.stream!r} no longer exists")
    if isinstance(error, DataLossError) and not isinstance(
        error, StreamReplacedError | ChangesLostError
    ):
        return ChangesLostError(
            error.stream,
            f"records {error.start} to {error.end - 1} of stream {error.stream!r} were trimmed or "
            f"aged out before they were published, the first available is {error.first}",
        )
    return error
