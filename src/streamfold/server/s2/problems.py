"""The one place where errors become answers, on whatever way the client is to learn of them."""

from __future__ import annotations

import logging

from streamfold.errors import (
    OutcomeUnknownError,
    StorageFullError,
    StoreClosingError,
    StoreRecoveringError,
    StreamfoldError,
    UploadsBusyError,
)
from streamfold.server.http.bodies import JSON
from streamfold.server.http.request import Request
from streamfold.server.http.response_stream import ResponseStream
from streamfold.wire.s2 import frames, sse
from streamfold.wire.s2.errors import ClientHangupError, Failure, describe_failure
from streamfold.wire.s2.headers import RETRY_AFTER_MS

logger = logging.getLogger(__name__)

#: Milliseconds after which a client that was turned away while draining may find the next server.
DRAINED_RETRY_MS = b"500"
#: Milliseconds after which there may be room again, and the same in seconds for plain HTTP clients.
_FULL_RETRY_MS, _FULL_RETRY = b"1000", b"1"
#: The store itself logs why a commit failed, once for all requests that it fails.
_LOGGED_BY_STORE = (OutcomeUnknownError, StoreRecoveringError, StorageFullError)


async def answer_problem(request: Request, error: Exception) -> None:
    """Answer a request that failed before its answer began."""
    failure = _describe(error, request.hidden_prefix)
    headers = [JSON]
    if isinstance(error, StoreClosingError):
        headers.append((RETRY_AFTER_MS.encode(), DRAINED_RETRY_MS))
    elif isinstance(error, StorageFullError | UploadsBusyError):
        headers += [(RETRY_AFTER_MS.encode(), _FULL_RETRY_MS), (b"retry-after", _FULL_RETRY)]
    await request.respond(failure.status, headers, failure.body)


async def end_frames(stream: ResponseStream, error: Exception) -> None:
    """End a session of frames that failed; nothing may follow."""
    await stream.send(frames.encode_terminal(_describe(error, stream.hidden_prefix)))
    await stream.close()


async def end_events(stream: ResponseStream, error: Exception) -> None:
    """End a session of server-sent events that failed; it gets no [DONE]."""
    await stream.send(sse.encode_error(_describe(error, stream.hidden_prefix)))
    await stream.close()


def log_failure(error: Exception) -> None:
    """Log what the client is not shown: unexpected errors, and which file or key storage failed at."""
    if not isinstance(error, StreamfoldError):
        logger.error("a request failed in a way that nobody expected", exc_info=error)
    elif error.public_message is not None and type(error) not in _LOGGED_BY_STORE:
        logger.warning("a request failed: %s", error.message)


def _describe(error: Exception, hidden_prefix: str) -> Failure:
    log_failure(error)
    return describe_failure(error, hidden_prefix)


__all__ = ["ClientHangupError", "answer_problem", "end_events", "end_frames", "log_failure"]
