"""Turns errors into answers: each face writes its own form; logging and cutting off are shared.

The errors between a client and the listener leave the outcome of the request open: the server may have
acted on what had arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from streamfold.errors import (
    OutcomeUnknownError,
    StorageFullError,
    StoreRecoveringError,
    StreamfoldError,
)
from streamfold.store.damage import StoreDamagedError, StreamDamagedError
from streamfold.store.engine.engine import TableDamagedError

if TYPE_CHECKING:
    from streamfold.server.http.request import Request

logger = logging.getLogger(__name__)

#: Writes an error as the answer to a request, in the form of one face.
ProblemWriter: TypeAlias = Callable[["Request", Exception], Awaitable[None]]

#: The store itself logs why a commit failed, and what is damaged, once for all requests that it fails.
_LOGGED_BY_STORE: Final = (
    OutcomeUnknownError,
    StoreRecoveringError,
    StorageFullError,
    StoreDamagedError,
    StreamDamagedError,
    TableDamagedError,
)


async def answer_problem(request: Request, error: Exception, write: ProblemWriter) -> None:
    """Answer a failed request through `write`; a response that has begun is cut off instead.

    The error has no traceback afterwards.
    """
    begun = bool(request.status)
    if begun:
        logger.error(
            "the response to %s %s was cut off", request.method, request.raw_path, exc_info=error
        )
    else:
        log_failure(error)
    # Now: an answer may have to wait for its client.
    drop_traceback(error)
    if not begun:
        await write(request, error)


def may_change(request: Request) -> bool:
    """Whether the request would have changed something: a refusal says that it did not."""
    return request.method not in ("GET", "HEAD")


def log_failure(error: Exception) -> None:
    """Log what the client is not shown: unexpected errors, and which file or key storage failed at."""
    if not isinstance(error, StreamfoldError):
        logger.error("a request failed unexpectedly", exc_info=error)
    elif error.public_message is not None and type(error) not in _LOGGED_BY_STORE:
        logger.warning("a request failed: %s", error.message)


def drop_traceback(error: BaseException) -> None:
    """Free everything that the frames of a handled error hold, such as the body of its request.

    A variable in one of these frames that refers back to the error, such as a future, makes a cycle.
    The server collects cycles so seldom that refused bodies would fill the memory in between.
    """
    errors, dropped = [error], set[int]()
    while errors:
        one = errors.pop()
        if id(one) not in dropped:
            dropped.add(id(one))
            one.__traceback__ = None
            errors += [other for other in (one.__cause__, one.__context__) if other is not None]
            if isinstance(one, BaseExceptionGroup):
                errors += one.exceptions


class ClientHangupError(StreamfoldError):
    """The client closed the connection, or stopped reading, before it had its answer."""

    code = "client_hangup"
    definite = False


class RequestTimeoutError(StreamfoldError):
    """The client sends its request too slowly."""

    code = "request_timeout"
    definite = False
