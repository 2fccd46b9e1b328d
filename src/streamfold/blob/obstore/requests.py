"""Requests to remote storage: their time limits and retries, and what obstore's exceptions mean.

obstore gives a few exception classes and a long text: the URL, the server's answer, a dump of its
internals. An S3 server that refuses a signature answers with the signed headers, session token
included, so none of that text is passed on: a `FailedRequest` keeps a status, an error code and a
phrase of ours, without secrets. Nor is the exception chained, because every traceback would show it.

Only the text distinguishes a refused connection from a lost answer (upstream defect 15). Where a
pattern below does not match, the failure counts as `OUTCOME_UNKNOWN`, which is always safe to say.
"""

from __future__ import annotations

import ast
import asyncio
import enum
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TypeVar
from urllib.parse import parse_qs, urlsplit

from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from streamfold.backoff import pause_after
from streamfold.errors import (
    BlobNotFoundError,
    BlobOutcomeUnknownError,
    BlobUnavailableError,
    InvalidError,
    StreamfoldError,
)

#: The exceptions that an obstore call raises itself.
OBSTORE_ERRORS = (BaseError, OSError, ValueError)

#: obstore's name for our function that provides credentials.
_PROVIDER = "External AWS credential provider"
_KEYS_REFUSED = "the service does not accept the credentials; check AWS_PROFILE or the AWS_* keys"
_OTHER_REGION = "the bucket is in another region; set AWS_REGION to the region of the bucket"
#: What S3's error codes mean for the caller, where the code alone does not say what to do.
_MEANINGS = {
    "NoSuchBucket": "the bucket does not exist; create it, or check its name",
    "InvalidAccessKeyId": _KEYS_REFUSED,
    "SignatureDoesNotMatch": _KEYS_REFUSED,
    "InvalidToken": _KEYS_REFUSED,
    "ExpiredToken": "the credentials have expired; get new ones",
    "AccessDenied": "these credentials do not allow it; use others, or change the bucket's policy",
    "PermanentRedirect": _OTHER_REGION,
    "AuthorizationHeaderMalformed": _OTHER_REGION,
    "IllegalLocationConstraintException": _OTHER_REGION,
}


class FailureKind(enum.Enum):
    """What is known about the effect of a failed request."""

    NOT_FOUND = "not found"
    EXISTS = "exists"
    CHANGED = "changed"
    NOT_SENT = "not sent"
    REFUSED = "refused"
    BEYOND_END = "beyond end"
    OUTCOME_UNKNOWN = "outcome unknown"


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """One failed request; `reason` is safe to show."""

    kind: FailureKind
    reason: str
    status: int | None = None
    #: The request belonged to a multipart upload and was not the one that makes the blob visible.
    before_completion: bool = False
    #: There were no credentials to sign it with.
    unsigned: bool = False

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed a moment later."""
        if self.kind in (FailureKind.NOT_SENT, FailureKind.OUTCOME_UNKNOWN):
            return True
        return self.status in (409, 429)


def classify_error(error: Exception) -> FailedRequest:
    """Classify one exception of obstore."""
    # The part after the last marker is Rust's debug form: newlines inside values are escaped
    # there, so a key or an answer cannot imitate a line of it.
    dump = str(error).rpartition("\n\nDebug source:\n")[2]
    status = _find_number(r"^\s+status: (\d{3}),$", dump)
    code = _find(r"<Code>([A-Za-z0-9.]{1,64})</Code>", dump) if status else None
    return FailedRequest(
        kind=_kind(error, dump, status, code),
        reason=_reason(error, dump, status, code),
        status=status,
        before_completion=_is_before_completion(dump),
        unsigned=status is None and _PROVIDER in dump,
    )


def read_error(store: str, key: str, failure: FailedRequest) -> StreamfoldError:
    """Return the error for a read that failed: reads change nothing, so it is always definite."""
    if failure.kind is FailureKind.NOT_FOUND:
        return BlobNotFoundError(f"blob {key!r} does not exist in {store}")
    what = f"{key!r} in {store}" if key else store
    error = BlobUnavailableError(f"cannot read {what}: {failure.reason}")
    error.transient = failure.is_retryable and not failure.unsigned
    return error


def write_error(
    store: str, key: str, failure: FailedRequest, *, outcome_unknown: bool
) -> StreamfoldError:
    """Return the error for a write that was given up; set `outcome_unknown` if one may have worked."""
    if outcome_unknown:
        return BlobOutcomeUnknownError(
            f"blob {key!r} in {store} may or may not have been written: {failure.reason}; "
            "read it back before repeating"
        )
    return BlobUnavailableError(f"blob {key!r} was not written to {store}: {failure.reason}")


def _kind(error: Exception, dump: str, status: int | None, code: str | None) -> FailureKind:
    if isinstance(error, AlreadyExistsError):
        return FailureKind.EXISTS
    if code == "NoSuchBucket":
        # A missing bucket is not a missing blob: a reader must not take it for an empty store.
        return FailureKind.REFUSED
    if isinstance(error, PreconditionError):
        return FailureKind.CHANGED
    if isinstance(error, FileNotFoundError):
        return FailureKind.NOT_FOUND
    if status == 416 or re.search(r"^\s+source: StartTooLarge \{$", dump, re.MULTILINE):
        return FailureKind.BEYOND_END
    if status is not None:
        decided = 400 <= status < 500 and status != 408
        return FailureKind.REFUSED if decided else FailureKind.OUTCOME_UNKNOWN
    if _was_redirected(dump):
        return FailureKind.REFUSED
    if _was_not_sent(dump):
        return FailureKind.NOT_SENT
    return FailureKind.REFUSED if isinstance(error, ValueError) else FailureKind.OUTCOME_UNKNOWN


def _was_not_sent(dump: str) -> bool:
    if _PROVIDER in dump:
        return True  # no credentials to sign a request with
    return bool(re.search(r"^\s+kind: (Connect|Builder),$", dump, re.MULTILINE))


def _was_redirected(dump: str) -> bool:
    """Whether S3 redirected the request without an address: the bucket is in another region."""
    return bool(re.search(r"^\s+inner: BareRedirect,$", dump, re.MULTILINE))


def _reason(error: Exception, dump: str, status: int | None, code: str | None) -> str:
    if status is not None:
        return _answered(status, code, dump)
    if _was_redirected(dump):
        return _OTHER_REGION
    if _PROVIDER in dump:
        return _provider_failure(dump)
    if _was_not_sent(dump):
        return "no connection to the storage endpoint"
    if re.search(r"^\s+kind: Timeout,$", dump, re.MULTILINE):
        return "the request timed out"
    if re.search(r"^\s+kind: (Request|Interrupted),$", dump, re.MULTILINE):
        return "the connection broke"
    return type(error).__name__


def _answered(status: int, code: str | None, dump: str) -> str:
    text = f"HTTP {status}" + (f" {code}" if code else "")
    meaning = _MEANINGS.get(code or "")
    if meaning is None:
        return text
    region = _find(r"<Region>([a-z0-9-]{1,32})</Region>", dump)
    named = f", {region}" if region and meaning is _OTHER_REGION else ""
    return f"{text}: {meaning}{named}"


def _provider_failure(dump: str) -> str:
    """The message of our credential provider; messages of others may contain secrets."""
    words = _find(r"^\s+value: CredentialsUnavailableError\((.*)\),$", dump)
    return str(ast.literal_eval(words)) if words else "the credential provider failed"


def _is_before_completion(dump: str) -> bool:
    query = urlsplit(_find(r"^\s+(https?://\S+),$", dump) or "").query
    names = parse_qs(query, keep_blank_values=True)
    return "uploads" in names or "partNumber" in names


def _find(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1) if match else None


def _find_number(pattern: str, text: str) -> int | None:
    found = _find(pattern, text)
    return int(found) if found else None


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on one call: at most about `attempts * request_timeout` plus the pauses.

    All times are in seconds.
    """

    #: A host that accepts no connection within this time counts as down.
    connect_timeout: float = 5.0
    #: One request with its body: a 128 MiB blob in one request needs 18 Mbit/s.
    request_timeout: float = 60.0
    #: How often one request is sent at most, including the first time.
    attempts: int = 4
    #: Pause after the first failure; doubles up to `longest_pause`, each up to half shorter.
    first_pause: float = 0.1
    longest_pause: float = 2.0

    @classmethod
    def take_from(cls, options: Mapping[str, str]) -> tuple[RequestLimits, dict[str, str]]:
        """Return the limits among `options`, and the other options."""
        names = {field.name for field in fields(cls)}
        given = {name: _parse(name, text) for name, text in options.items() if name in names}
        attempts = int(given.pop("attempts", cls().attempts))
        rest = {name: text for name, text in options.items() if name not in names}
        return cls(attempts=attempts, **given), rest

    def pauses(self) -> Iterator[float]:
        """Yield the pause before each retry."""
        for failures in range(1, self.attempts):
            yield pause_after(failures, self.first_pause, self.longest_pause)

    @property
    def total(self) -> timedelta:
        """After this time no further retry starts."""
        return timedelta(seconds=self.attempts * self.request_timeout)


def _parse(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf or (name == "attempts" and not number.is_integer()):
        kind = "a whole number above 0" if name == "attempts" else "a number of seconds above 0"
        raise InvalidError(f"option {name} is {text!r}: it must be {kind}")
    return number


T = TypeVar("T")


class WriteRetries:
    """Retries one write; `name` is the store's name in messages."""

    def __init__(self, name: str, limits: RequestLimits) -> None:
        self._name = name
        self._limits = limits

    async def repeat(self, key: str, attempt: Callable[[bool], Awaitable[T | FailedRequest]]) -> T:
        """Retry `attempt` until it succeeds, and return its result.

        `attempt` sends one request; its argument says whether an earlier one may have worked.
        """
        outcome_unknown = False
        pauses = self._limits.pauses()
        while isinstance(result := await attempt(outcome_unknown), FailedRequest):
            outcome_unknown = outcome_unknown or result.kind is FailureKind.OUTCOME_UNKNOWN
            pause = next(pauses, None)
            if pause is None or not result.is_retryable:
                raise write_error(self._name, key, result, outcome_unknown=outcome_unknown)
            await asyncio.sleep(pause)
        return result


async def send(request: Awaitable[T]) -> T | FailedRequest:
    """Return the result of the request, or how it failed."""
    try:
        return await request
    except OBSTORE_ERRORS as error:
        return classify_error(error)
