"""Errors of subscription calls, and their representation in the protocol."""

from __future__ import annotations

from typing import Final

import msgspec

from streamfold.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    StreamfoldError,
    TooLargeError,
    UnauthenticatedError,
)
from streamfold.server.http.bodies import answer_json
from streamfold.server.http.problems import drop_traceback
from streamfold.server.http.request import Request
from streamfold.wire.durable_streams.subscriptions import Refusal, RefusalBody
from streamfold.wire.s2.errors import shown_message


class WebhookUrlRejectedError(InvalidError):
    """Raised if the server must not send requests to this URL."""

    code = "webhook_url_rejected"


class SubscriptionNotFoundError(NotFoundError):
    code = "subscription_not_found"

    def __init__(self, subscription_id: str) -> None:
        super().__init__(f"subscription {subscription_id[:80]!r} does not exist: check its id")


class WakeClaimedError(ConflictError):
    """Raised if another worker holds the wake."""

    code = "wake_claimed"

    def __init__(self, holder: str, generation: int) -> None:
        super().__init__("another worker has claimed this: wait until its lease is over")
        self.holder = holder
        self.generation = generation


#: The status and the protocol's code for each stable error code.
_ANSWERS: Final = {
    "webhook_url_rejected": (400, "WEBHOOK_URL_REJECTED"),
    "wake_token_invalid": (401, "TOKEN_INVALID"),
    "subscription_not_found": (404, "SUBSCRIPTION_NOT_FOUND"),
    "subscription_exists": (409, "SUBSCRIPTION_ALREADY_EXISTS"),
    "wake_fenced": (409, "FENCED"),
    "wake_claimed": (409, "ALREADY_CLAIMED"),
    "no_pending_work": (409, "NO_PENDING_WORK"),
    "ack_offset_invalid": (409, "INVALID_OFFSET"),
}


def wake_token_invalid(
    message: str = "the token is not one of this subscription's wakes",
) -> UnauthenticatedError:
    return UnauthenticatedError(message, code="wake_token_invalid")


def ack_offset_invalid(message: str) -> ConflictError:
    """Return the error for an ack that does not fit its stream. None of the call's acks is applied."""
    return ConflictError(message, code="ack_offset_invalid")


async def answer_problem(request: Request, error: StreamfoldError) -> None:
    """Respond with the protocol's error object. Re-raises errors without such a code."""
    if isinstance(error, TooLargeError):
        status, code = 413, "INVALID_REQUEST"
    elif error.code in _ANSWERS:
        status, code = _ANSWERS[error.code]
    elif isinstance(error, InvalidError):
        status, code = 400, "INVALID_REQUEST"
    else:
        raise error
    refusal = Refusal(code, shown_message(error, request.hidden_prefix))
    if isinstance(error, WakeClaimedError):
        claimed = {"current_holder": error.holder, "generation": error.generation}
        refusal = msgspec.structs.replace(refusal, **claimed)
    drop_traceback(error)
    await answer_json(request, RefusalBody(refusal), status)
