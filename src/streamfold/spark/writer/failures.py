"""What stopped a table, as an error of ours; and whether trying again may help.

StreamfoldError
└── RetryLaterError
    └── QueryFailedError              Spark ended the query for a reason of its own
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

#: Characters of Spark's own message that a status shows.
SHOWN = 500
_OURS = re.compile(r"(?:streamfold(?:\.\w+)+\.)(\w+Error): ([^\n]*)")
#: What may pass: the next try begins with what the manifest says.
_PASSING = (RetryLaterError, OutcomeUnknownError, ConflictError, ConditionFailedError)


class QueryFailedError(RetryLaterError):
    """A job or a query of Spark failed, and not with an error of ours."""

    code = "query_failed"


def told_by(error: BaseException) -> StreamfoldError:
    """The error that a failure comes from; Spark hands on those of its Python processes as text."""
    if isinstance(error, StreamfoldError):
        return error
    text = str(error)
    for name, message in reversed(_OURS.findall(text)):
        kind = _kinds().get(name)
        if kind is not None:
            found = kind.__new__(kind)
            StreamfoldError.__init__(found, message)
            return found
    return QueryFailedError(f"{type(error).__name__}: {text[:SHOWN]}")


def may_pass(error: StreamfoldError) -> bool:
    """Whether the same may succeed later."""
    return isinstance(error, _PASSING)


def _kinds() -> dict[str, type[StreamfoldError]]:
    return {kind.__name__: kind for kind in _subclasses(StreamfoldError)}


def _subclasses(kind: type[StreamfoldError]) -> Iterator[type[StreamfoldError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _subclasses(child)
