"""Errors as S2 clients see them: a status, and a JSON body that explains what went wrong.

A client may repeat an append whose error has a *clean* code without risking a duplicate. So an
error that leaves the outcome unknown never gets a clean code, whatever its own code is.

    WireError
    ├── BadFrameError, BadHeaderError, BadJsonError, BadPathError, BadProtoError, BadQueryError
    └── OversizedError
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from streamfold.errors import (
    FencingTokenMismatchError,
    InvalidError,
    KeyRequiredError,
    MalformedError,
    NotFoundError,
    PositionUnwrittenError,
    RetryLaterError,
    SeqNumMismatchError,
    StorageError,
    StoreClosingError,
    StreamfoldError,
    WriterFencedError,
)


class WireError(StreamfoldError):
    """An error that exists only on the wire. `code` is the code that clients see."""


class BadFrameError(WireError):
    code = "bad_frame"


class BadHeaderError(WireError):
    code = "bad_header"


class BadJsonError(WireError):
    code = "bad_json"


class BadPathError(WireError):
    code = "bad_path"


class BadProtoError(WireError):
    code = "bad_proto"


class BadQueryError(WireError):
    code = "bad_query"


class OversizedError(WireError):
    """A message exceeds a protocol limit, whatever limits the reader asked for."""

    code = "other"


class _Code(NamedTuple):
    status: int
    clean: bool


#: Every code of the protocol, including codes that this server never sends. A clean code promises
#: that the operation had no effect.
CODES: Final[dict[str, _Code]] = {
    "bad_frame": _Code(400, True),
    "bad_header": _Code(400, True),
    "bad_json": _Code(400, True),
    "bad_path": _Code(400, True),
    "bad_proto": _Code(400, True),
    "bad_query": _Code(400, True),
    "decryption_failed": _Code(400, True),
    "authn": _Code(401, True),
    "permission_denied": _Code(403, True),
    "quota_exhausted": _Code(403, True),
    "access_token_not_found": _Code(404, True),
    "basin_not_found": _Code(404, True),
    "stream_not_found": _Code(404, True),
    "request_timeout": _Code(408, False),
    "basin_deletion_pending": _Code(409, True),
    "resource_already_exists": _Code(409, True),
    "stream_deletion_pending": _Code(409, True),
    "transaction_conflict": _Code(409, True),
    "invalid": _Code(422, True),
    "rate_limited": _Code(429, True),
    "client_hangup": _Code(499, False),
    "other": _Code(500, False),
    "storage": _Code(500, False),
    "not_implemented": _Code(501, True),
    "hot_server": _Code(502, True),
    "server_draining": _Code(503, True),
    "unavailable": _Code(503, False),
    "upstream_timeout": _Code(504, False),
}

#: Streamfold's own codes, for features that S2 lacks: snapshots, closed or typed streams, forks.
OWN_CODES: Final[dict[str, _Code]] = {
    "snapshot_not_found": _Code(404, True),
    "stream_closed": _Code(409, True),
    "stream_forked": _Code(409, True),
    "snapshot_conflict": _Code(409, True),
    # For changes only: a read that needs damaged rows reports `storage`. S2's clients retry a 500,
    # and then do not know whether an append happened.
    "stream_damaged": _Code(409, True),
    "store_damaged": _Code(409, True),
    "position_trimmed": _Code(410, True),
    "too_large": _Code(413, True),
    "staged_parts_limit": _Code(429, True),
    # 503 rather than 507: S2's clients retry a 503 and give up on a 507.
    "storage_full": _Code(503, True),
    "uploads_busy": _Code(503, True),
    "snapshot_parts_busy": _Code(503, True),
    "server_busy": _Code(503, True),
}

_KNOWN: Final = CODES | OWN_CODES
_DAMAGED: Final = ("stream_damaged", "store_damaged")

#: For errors whose own code is not part of the protocol. The first matching class decides.
_BY_CLASS: Final[tuple[tuple[type[StreamfoldError], str], ...]] = (
    (WriterFencedError, "unavailable"),
    (MalformedError, "bad_proto"),
    (KeyRequiredError, "bad_header"),
    (InvalidError, "invalid"),
    (StoreClosingError, "server_draining"),
    (RetryLaterError, "unavailable"),
    (StorageError, "storage"),
    # Blobs, for example: clients cannot name them, so a missing one is the server's fault.
    (NotFoundError, "storage"),
)


class Failure(NamedTuple):
    """An error for the client: the same JSON in a response, a terminal frame or an SSE event."""

    status: int
    body: bytes


def describe_failure(
    error: Exception, hidden_prefix: str = "", *, changes: bool = False
) -> Failure:
    """Return the response for `error`. A foreign error reveals nothing.

    `hidden_prefix` is the part of stream names that the caller neither writes nor may see.
    `changes` says whether the request would have changed something.
    """
    match error:
        case FencingTokenMismatchError():
            return Failure(412, _json({"fencing_token_mismatch": error.current}))
        case SeqNumMismatchError():
            return Failure(412, _json({"seq_num_mismatch": error.next_seq_num}))
        case PositionUnwrittenError():
            tail = {"seq_num": error.tail_seq_num, "timestamp": error.tail_timestamp}
            return Failure(416, _json({"tail": tail}))
        case StreamfoldError():
            return _coded(code_of(error, changes=changes), shown_message(error, hidden_prefix))
        case _:
            return _coded("other", "the server failed unexpectedly: see its log")


#: Maximum length of a message in characters. A message that quotes the longest name is shorter.
_MESSAGE_MAX: Final = 900


def shown_message(error: StreamfoldError, hidden_prefix: str = "") -> str:
    """Return the error message as the caller may see it.

    It uses stream names as the caller knows them, reveals no storage files or keys, is valid
    Unicode, and stays short even if it quotes client input.
    """
    # A message may quote text that is not valid Unicode, but the response must still be sent.
    text = (error.public_message or error.message).encode(errors="replace").decode()
    if hidden_prefix:
        text = hide_prefix(text, hidden_prefix)
    return text if len(text) <= _MESSAGE_MAX else f"{text[:_MESSAGE_MAX]}..."


def hide_prefix(text: str, hidden_prefix: str) -> str:
    """Remove `hidden_prefix` from the stream names that a message quotes."""
    # Messages quote names as repr does, which escapes single quotes unless it uses double quotes.
    escaped = repr(f'"{hidden_prefix}')[2:-1]
    plain = escaped.replace("\\'", "'")
    return text.replace(f"'{escaped}", "'").replace(f'"{plain}', '"')


def code_of(error: StreamfoldError, *, changes: bool = False) -> str:
    """Return the protocol's code for `error`. It is clean only if the error is definite."""
    if error.code in _DAMAGED and not changes:
        return "storage"
    code = error.code if error.code in _KNOWN else _code_by_class(error)
    if _KNOWN[code].clean and not error.definite:
        return "storage"
    return code


def _code_by_class(error: StreamfoldError) -> str:
    for kind, code in _BY_CLASS:
        if isinstance(error, kind):
            return code
    return "other" if error.definite else "storage"


def _coded(code: str, message: str) -> Failure:
    return Failure(_KNOWN[code].status, _json({"code": code, "message": message}))


def _json(body: dict[str, object]) -> bytes:
    return msgspec.json.encode(body)
