"""Translates Spark's errors, and tells which are worth a retry.

StreamfoldError
├── DataLossError
│   └── ChangesLostError              begin a new archive from all rows
└── RetryLaterError
    ├── QueryFailedError              a Spark query or job failed
    ├── ServerUnreachableError        check the server, and source.server
    └── StreamMissingError            create the stream, or correct source.stream
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

#: Maximum characters of Spark's message in a status.
SHOWN = 500
#: Errors worth a retry, which starts at the manifest's head.
_PASSING = (RetryLaterError, OutcomeUnknownError, ConflictError, ConditionFailedError)


class QueryFailedError(RetryLaterError):
    """A Spark job or query failed, not with one of our errors."""

    code = "query_failed"


class ServerUnreachableError(RetryLaterError):
    """The server of the stream does not answer."""

    code = "endpoint_unavailable"

    def __init__(self, server: str, cause: str) -> None:
        super().__init__(
            f"source.server {server} cannot be reached ({cause}): start it, or correct source.server"
        )


class StreamMissingError(RetryLaterError):
    """The stream of a table without an archive does not exist yet; the table waits for it."""

    code = "stream_missing"

    def __init__(self, stream: str, basin: str, server: str) -> None:
        super().__init__(
            f"stream {stream!r} does not exist in basin {basin!r} at {server}: the table waits until "
            "it is created; correct source.stream if this is not its name"
        )
        self.stream = stream


class ChangesLostError(DataLossError):
    """The stream has lost records that the table has not taken in."""

    code = "data_loss"

    def __init__(self, stream: str, lost: str) -> None:
        StreamfoldError.__init__(
            self,
            f"{lost}, and the table cannot continue without its changes: have the source write all "
            "rows again, and begin a new archive with another key_prefix",
        )
        self.stream = stream

    @classmethod
    def missing(cls, stream: str) -> ChangesLostError:
        """Return the error for a stream that no longer exists."""
        return cls(stream, f"stream {stream!r} no longer exists")

    @classmethod
    def shortened(cls, stream: str, tail: int, position: int) -> ChangesLostError:
        """Return the error for a stream that ends before the next record of the table."""
        return cls(
            stream,
            f"stream {stream!r} ends before record {tail}, and the table has its records up to "
            f"{position - 1}: it was created anew, or restored to an earlier state",
        )


def error_from_spark(error: BaseException) -> StreamfoldError:
    """Return our error behind a failure, or a QueryFailedError for Spark's own."""
    cause = error_behind(error)
    if cause is not None:
        return cause
    first = str(error).strip().partition("\n")[0][:SHOWN] or "no message"
    return QueryFailedError(
        f"a query or a job of Spark failed with {type(error).__name__}: {first.rstrip('.')}; run with "
        "--verbose to see the whole error"
    )


def is_retryable(error: StreamfoldError) -> bool:
    """Return whether a retry may succeed."""
    return isinstance(error, _PASSING)


def in_terms_of_tables(error: StreamfoldError, server: str) -> StreamfoldError:
    """Return the error with a way out in terms of the configuration instead of Spark's options."""
    if isinstance(error, EndpointUnavailableError):
        return ServerUnreachableError(server, error.cause)
    if isinstance(error, StreamGoneError):
        return ChangesLostError.missing(error.stream)
    if isinstance(error, DataLossError) and not isinstance(
        error, StreamReplacedError | ChangesLostError
    ):
        return ChangesLostError(
            error.stream,
            f"records {error.start} to {error.end - 1} of stream {error.stream!r} were trimmed or "
            f"aged out before they were published, the first available is {error.first}",
        )
    return error
