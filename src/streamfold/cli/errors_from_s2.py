"""Translates errors of the SDK, from the server or the connection, into command failures."""

from __future__ import annotations

from s2_sdk import (
    AppendConditionError,
    FencingTokenMismatchError,
    ReadUnwrittenError,
    S2Error,
    S2ServerError,
    SeqNumMismatchError,
)

from streamfold.cli.exit_status import ExitStatus, VerbFailedError
from streamfold.cli.target import Target, tls_advice
from streamfold.follow.clients.s2_internals import (
    AppendIndefiniteFailureError,
    ConnectError,
    TransportError,
    has_no_side_effects,
)
from streamfold.wording import reason_of


def failure_from_s2(error: S2Error, target: Target, *, changes: bool) -> VerbFailedError:
    """Translate `error` of a call to `target`.

    `changes`: whether the command may have changed something.
    """
    match error:
        case AppendIndefiniteFailureError():
            return _unknown(str(error))
        case FencingTokenMismatchError():
            current = error.expected_fencing_token
            return _condition(
                "fencing_token_mismatch",
                f"the stream's fencing token is {current!r}, not the one given: "
                "another writer took over; nothing was appended by this batch or after it",
            )
        case SeqNumMismatchError():
            return _condition(
                "seq_num_mismatch",
                f"the stream's next seq_num is {error.expected_seq_num}, not the one given: read "
                "the records there, then decide; nothing was appended by this batch or after it",
            )
        case AppendConditionError():
            return _condition("condition_failed", error.message)
        case ReadUnwrittenError():
            return VerbFailedError(
                "position_unwritten",
                f"no record is there yet, the tail is seq_num {error.tail.seq_num}: "
                "start before it, or give --clamp",
            )
        case S2ServerError():
            return _failure_from_response(error, target, changes=changes)
        case _:
            return _not_reached(error, target, changes=changes)


def _failure_from_response(
    error: S2ServerError, target: Target, *, changes: bool
) -> VerbFailedError:
    if changes and _indefinite(error):
        return _unknown(f"{error.message} ({error.code})")
    status = ExitStatus.NOT_FOUND if error.status_code == 404 else ExitStatus.FAILURE
    message = error.message
    if error.status_code == 401:
        if target.token is None:  # the server rejected the placeholder token
            message = "this server asks for an access token, and none was given"
        message += (
            "; the token comes from S2_ACCESS_TOKEN or --token-file, or from `streamfold config`"
        )
    return VerbFailedError(error.code, message, status)


def _indefinite(error: S2ServerError) -> bool:
    return error.status_code in (408, 499) or (
        error.status_code >= 500 and error.status_code != 501 and not has_no_side_effects(error)
    )


def _not_reached(error: S2Error, target: Target, *, changes: bool) -> VerbFailedError:
    cause = error.__cause__
    if isinstance(cause, ConnectError):
        advice = tls_advice(target.account, str(cause)) or (
            "is it running, and is its address right (`streamfold config show`)? "
            "`streamfold doctor` looks further"
        )
        where = dict.fromkeys((target.account, target.basin))
        return VerbFailedError(
            "unreachable",
            f"the server at {' or '.join(where)} cannot be reached: {reason_of(cause)}; {advice}",
        )
    if isinstance(cause, TransportError):
        if changes:
            return _unknown(reason_of(cause))
        return VerbFailedError("connection_lost", f"the connection was lost: {reason_of(cause)}")
    return VerbFailedError("invalid", str(error))


def _condition(reason: str, message: str) -> VerbFailedError:
    return VerbFailedError(reason, message, ExitStatus.CONDITION_FAILED)


def _unknown(cause: str) -> VerbFailedError:
    return VerbFailedError(
        "outcome_unknown",
        f"the outcome is unknown: {cause}; check whether it took effect before repeating it",
        ExitStatus.OUTCOME_UNKNOWN,
    )
