"""Errors of subscription calls, and their form in the protocol.

InvalidError          WebhookUrlRejectedError
UnauthenticatedError  WakeTokenInvalidError
NotFoundError         SubscriptionNotFoundError
ConflictError         SubscriptionExistsError, WakeFencedError, WakeClaimedError,
                      NoPendingWorkError, AckOffsetError
"""

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
    """The server does not send requests to this URL."""

    code = "webhook_url_rejected"


class WakeTokenInvalidError(UnauthenticatedError):
    """The call carries no token of this subscription."""

    code = "wake_token_invalid"

    def __init__(self, message: str = "the token is not one of this subscription's wakes") -> None:
        super().__init__(message)


class SubscriptionNotFoundError(NotFoundError):
    code = "subscription_not_found"

    def __init__(self, subscription_id: str) -> None:
        super().__init__(f"subscription {subscription_id[:80]!r} does not exist: check its id")


class SubscriptionExistsError(ConflictError):
    code = "subscription_exists"

    def __init__(self, subscription_id: str) -> None:
        super().__init__(
            f"subscription {subscription_id[:80]!r} exists with another configuration: "
            "delete it first, or choose another id"
        )


class WakeFencedError(ConflictError):
    """The wake that the call is about is over; another worker may have the work by now."""

    code = "wake_fenced"

    def __init__(self, generation: int, current: int) -> None:
        super().__init__(
            f"the wake of generation {generation} is over, the last one was {current}: "
            "stop working on it and wait for the next"
        )


class WakeClaimedError(ConflictError):
    """Another worker has the wake."""

    code = "wake_claimed"

    def __init__(self, holder: str, generation: int) -> None:
        super().__init__("another worker has claimed this: wait until its lease is over")
        self.holder = holder
        self.generation = generation


class NoPendingWorkError(ConflictError):
    code = "no_pending_work"

    def __init__(self) -> None:
        super().__init__("everything is acknowledged: wait for the next wake")


class AckOffsetError(ConflictError):
    """An ack does not fit the stream; none of the call's acks was applied."""

    code = "ack_offset_invalid"


_KNOWN: Final[dict[type[StreamfoldError], tuple[int, str]]] = {
    WebhookUrlRejectedError: (400, "WEBHOOK_URL_REJECTED"),
    WakeTokenInvalidError: (401, "TOKEN_INVALID"),
    SubscriptionNotFoundError: (404, "SUBSCRIPTION_NOT_FOUND"),
    SubscriptionExistsError: (409, "SUBSCRIPTION_ALREADY_EXISTS"),
    WakeFencedError: (409, "FENCED"),
    WakeClaimedError: (409, "ALREADY_CLAIMED"),
    NoPendingWorkError: (409, "NO_PENDING_WORK"),
    AckOffsetError: (409, "INVALID_OFFSET"),
}


async def answer_problem(request: Request, error: StreamfoldError) -> None:
    """Answer with the protocol's error object; an error without a code is raised again."""
    if isinstance(error, TooLargeError):
        status, code = 413, "INVALID_REQUEST"
    elif type(error) in _KNOWN:
        status, code = _KNOWN[type(error)]
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
