"""Maps errors to responses for Durable Streams clients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from streamfold.errors import (
    InvalidError,
    NotFoundError,
    OutcomeUnknownError,
    PositionTrimmedError,
    ProducerGapError,
    ProducersExhaustedError,
    ProducerStaleError,
    RetryLaterError,
    StreamDeletingError,
    StreamfoldError,
    StreamForkedError,
    TermsError,
    TooLargeError,
)
from streamfold.server.http.bodies import NO_STORE, answer_json
from streamfold.server.http.headers import Headers
from streamfold.server.http.problems import may_change
from streamfold.server.http.request import Request
from streamfold.store.catalog.staged_parts import StagedPartsFullError
from streamfold.wire.durable_streams import snapshot_parts
from streamfold.wire.durable_streams.headers import NEXT_OFFSET
from streamfold.wire.durable_streams.offsets import format_offset
from streamfold.wire.s2.errors import WireError, describe_failure, shown_message
from streamfold.wire.text import ascii_url

#: Sent with every response: a page that may use the server may also embed a stream's content.
RESOURCE_POLICY: Final = (b"cross-origin-resource-policy", b"cross-origin")
#: Sent with every response. A stream may have type text/html, and a browser that opens it must not
#: run its content under this server's origin, where the console keeps a token.
SANDBOX: Final = (b"content-security-policy", b"sandbox; default-src 'none'")


def offset_header(seq_num: int) -> tuple[bytes, bytes]:
    return NEXT_OFFSET, format_offset(seq_num).encode()


async def refuse_method(request: Request, allowed: Iterable[str]) -> None:
    """Respond to a request whose method its path does not allow."""
    listed = ", ".join(("OPTIONS", *sorted(allowed)))
    message = f"{request.method[:20]} is not possible here, only {listed}"
    problem = {"code": "method_not_allowed", "message": message}
    await answer_json(request, problem, 405, ((b"allow", listed.encode()),))


async def write_problem(request: Request, error: Exception, *, path: str) -> None:
    """Respond to a request for the stream at `path` that failed before its response began."""
    problem: object
    status = _status(error, request.method)
    if isinstance(error, StreamfoldError) and status is not None:
        text = shown_message(error, request.hidden_prefix)
        problem = {"code": error.code, "message": text}
    else:
        status, body = describe_failure(error, request.hidden_prefix, changes=may_change(request))
        problem = msgspec.Raw(body)
    await answer_json(request, problem, status, (NO_STORE, *_details(error, path)))


def _status(error: Exception, method: str) -> int | None:
    """Return the status for an error, or None if it is the same on all faces."""
    match error:
        case WireError():
            return None
        case TooLargeError():
            return 413
        case InvalidError():
            return 400
        case PositionTrimmedError():
            return 410
        case StreamForkedError():
            return 409 if method == "PUT" else 410
        case ProducerStaleError():
            return 403
        case ProducersExhaustedError() | StagedPartsFullError():
            return 429
        case TermsError():
            return 409
        case NotFoundError() | StreamDeletingError():
            return 404
        case OutcomeUnknownError():
            return 500
        case StreamfoldError() if error.code in _CONFLICTS:
            return 409
        case RetryLaterError():
            return 503
    return None


_CONFLICTS: Final = ("resource_already_exists", "snapshot_conflict", "basin_deletion_pending")


def _details(error: Exception, path: str) -> Headers:
    """Return headers that let the client recover."""
    match error:
        case PositionTrimmedError():
            bootstrap = f'<{ascii_url(path)}/bootstrap>; rel="bootstrap"'.encode()
            return (offset_header(error.first_seq_num), (b"link", bootstrap))
        case ProducerStaleError():
            return ((b"producer-epoch", str(error.current_epoch).encode()),)
        case ProducerGapError():
            return (
                (b"producer-expected-seq", str(error.expected).encode()),
                (b"producer-received-seq", str(error.received).encode()),
            )
        case StagedPartsFullError():
            limit = snapshot_parts.STAGED_MAX[error.what]
            return ((limit, str(error.limit).encode()),)
        case RetryLaterError():
            return ((b"retry-after", b"1"),)
    return ()
