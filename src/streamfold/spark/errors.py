"""What can go wrong between Spark and streams, as errors; each names the option that helps.

StreamfoldError
├── DataLossError                 records that the query has not seen are gone
│   └── StreamGoneError           and so is their stream
├── JavaMissingError              no runtime that Spark could use
└── JavaEndedError                the process of Spark is gone: start again
InvalidError
└── OptionError                   an option is missing, unknown or has a bad value
RetryLaterError
└── EndpointUnavailableError      it did not answer, however often it was asked
ConflictError
└── ReplayChangedError            a repeated batch has other rows than the one half appended
"""

from __future__ import annotations

from streamfold.errors import ConflictError, InvalidError, RetryLaterError, StreamfoldError


class OptionError(InvalidError):
    code = "option_invalid"

    def __init__(self, name: str, rule: str) -> None:
        super().__init__(f"option {name!r} {rule}")


class DataLossError(StreamfoldError):
    code = "data_loss"

    def __init__(self, stream: str, start: int, end: int, first: int) -> None:
        super().__init__(
            f"records {start} to {end - 1} of stream {stream!r} are gone, the first available is "
            f"{first}: they were trimmed, aged out, or the stream was created anew; set the option "
            "failOnDataLoss to false to go on without them, or start a new query with bootstrap"
        )
        self.first = first


class StreamGoneError(DataLossError):
    code = "stream_gone"

    def __init__(self, stream: str, position: int) -> None:
        StreamfoldError.__init__(
            self,
            f"stream {stream!r}, of which this query read the records before {position}, does not "
            "exist any more: set the option failOnDataLoss to false to go on without it",
        )
        self.first = position


class EndpointUnavailableError(RetryLaterError):
    code = "endpoint_unavailable"

    def __init__(self, origin: str, seconds: float, cause: str) -> None:
        self.cause = cause
        super().__init__(
            f"{origin} did not do what it was asked to within {seconds:g} s, at last: {cause}; look "
            "at the server and at the option endpoint, or raise the option retryTimeout"
        )


class ReplayChangedError(ConflictError):
    code = "replay_changed"

    def __init__(self, stream: str, transaction: str, batch: int) -> None:
        super().__init__(
            f"batch {batch} of {transaction!r} was appended to stream {stream!r} in part, and now has "
            "other rows, or the same in another order: give the option orderBy, or make the query "
            "deterministic; nothing more was appended"
        )


class JavaMissingError(StreamfoldError):
    code = "java_missing"


class JavaEndedError(StreamfoldError):
    """What was committed is there; anything under way is not, and its records are in the stream."""

    code = "java_ended"

    def __init__(self) -> None:
        super().__init__(
            "Spark's Java process has ended, by itself or by somebody's hand: see its output and the "
            "memory of the machine, then start again; it goes on where the archives end"
        )
