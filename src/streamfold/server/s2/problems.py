"""Errors as S2 clients get them: as a response, as a terminal frame, or as an event."""

from __future__ import annotations

from streamfold.errors import (
    StorageFullError,
    StoreClosingError,
    UploadsBusyError,
)
from streamfold.server.http.bodies import JSON
from streamfold.server.http.problems import log_failure
from streamfold.server.http.request import Request
from streamfold.server.http.response_stream import ResponseStream
from streamfold.wire.s2 import frames, sse
from streamfold.wire.s2.errors import Failure, describe_failure
from streamfold.wire.s2.headers import RETRY_AFTER_MS

#: Milliseconds after which a client that was turned away while draining may find the next server.
DRAINED_RETRY_MS = b"500"
#: Milliseconds after which there may be room again, and the same in seconds for plain HTTP clients.
_FULL_RETRY_MS, _FULL_RETRY = b"1000", b"1"


async def write_problem(request: Request, error: Exception) -> None:
    """Answer a request that failed before its response began."""
    failure = describe_failure(error, request.hidden_prefix)
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


def _describe(error: Exception, hidden_prefix: str) -> Failure:
    log_failure(error)
    return describe_failure(error, hidden_prefix)
