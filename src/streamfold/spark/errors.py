"""Errors from reading and writing streams and archives with Spark. Each message names a remedy.

StreamfoldError
├── DataLossError                 records that the query has not read are gone
│   ├── StreamGoneError           the whole stream is gone
│   └── StreamReplacedError       another stream took its name: begin a new archive
├── JavaMissingError              no Java runtime that Spark can use
└── JavaEndedError                Spark's Java process exited: start again
InvalidError
└── OptionError                   an option is missing, unknown or invalid
RetryLaterError
├── EndpointUnavailableError      the server failed every attempt
└── FilesGoneError                load the table again, and pin the epoch for long reads

Spark reports an exception in one of its Python processes only as traceback text (upstream defect
12). So the methods that Spark calls there attach a note to our errors: one line of JSON, which a
traceback prints after the message. The driver finds and decodes that line (`CarriesErrors`,
`error_behind`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from streamfold.errors import InvalidError, RetryLaterError, StreamfoldError


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
            "failOnDataLoss to false to continue without them, or start a new query with bootstrap"
        )
        self.stream, self.start, self.end, self.first = stream, start, end, first


class StreamGoneError(DataLossError):
    code = "stream_gone"

    def __init__(self, stream: str, position: int) -> None:
        StreamfoldError.__init__(
            self,
            f"stream {stream!r}, whose records before {position} this query has read, no longer "
            "exists: set the option failOnDataLoss to false to continue without it",
        )
        self.stream, self.first = stream, position


class StreamReplacedError(DataLossError):
    """A stream is not the one that the archive was made from, though it may have the same name."""

    code = "stream_replaced"

    def __init__(self, stream: str, seq_num: int, timestamp: int, current: int) -> None:
        StreamfoldError.__init__(
            self,
            f"record {seq_num} of stream {stream!r}, up to which the archive has its changes, had the "
            f"timestamp {timestamp} and has {current}: the stream was created anew, or the archive was "
            "made from another one. Begin a new archive, with another key_prefix",
        )
        self.first = 0


class EndpointUnavailableError(RetryLaterError):
    code = "endpoint_unavailable"

    def __init__(self, origin: str, seconds: float, cause: str) -> None:
        self.cause = cause
        super().__init__(
            f"{origin} failed every attempt for {seconds:g} s, most recently: {cause}; check "
            "the server and the option endpoint, or raise the option retryTimeout"
        )


class JavaMissingError(StreamfoldError):
    code = "java_missing"


class JavaEndedError(StreamfoldError):
    """Spark's Java process exited.

    Committed work is safe. The rest was not published, and its records are still in the stream.
    """

    code = "java_ended"

    def __init__(self) -> None:
        super().__init__(
            "Spark's Java process has ended: check its output and the memory of the machine, then "
            "start again; publishing resumes where the archives end"
        )


class FilesGoneError(RetryLaterError):
    """Planned files were deleted before tasks read them. The read fails instead of dropping rows."""

    code = "archive_files_gone"

    def __init__(self, cause: str, position: str) -> None:
        super().__init__(
            f"{cause}; this query reads position {position}: load the table again to read its head, "
            "and pin the epoch first for reads that take longer than collection keeps files"
        )


_MARK = "streamfold-error: "
_NOTE = re.compile(rf"^{_MARK}(\{{.*\}})\s*$", re.MULTILINE)


class CarriesErrors:
    """Base of classes that Spark calls in its Python processes. Public methods attach our errors."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name, member in list(vars(cls).items()):
            if inspect.isfunction(member) and not name.startswith("_"):
                setattr(cls, name, _carrying(member))


def error_behind(raised: BaseException) -> StreamfoldError | None:
    """Return our error behind a Spark exception, with code and fields, or None if it is not ours."""
    if isinstance(raised, StreamfoldError):
        return raised
    for note in reversed(_NOTE.findall(str(raised))):
        try:
            return StreamfoldError.from_wire(note)
        except ValueError:
            continue  # unrelated text that looks like a note
    return None


def _carrying(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        with _noted():
            return method(*args, **named)

    @wraps(method)
    def iterate(*args: Any, **named: Any) -> Iterator[Any]:
        with _noted():
            yield from method(*args, **named)

    return iterate if inspect.isgeneratorfunction(method) else call


@contextmanager
def _noted() -> Iterator[None]:
    try:
        yield
    except StreamfoldError as error:
        if not any(note.startswith(_MARK) for note in getattr(error, "__notes__", ())):
            error.add_note(_MARK + error.to_wire())
        raise
