"""Requests to remote storage: time limits, retries, and classification of obstore's exceptions.

obstore raises few exception classes with long texts: URL, response and internals. An S3 server that
rejects a signature returns the signed headers, including the session token. So none of that text is
passed on: a `FailedRequest` has a status, an error code and our own phrase, without secrets. The
exception is not chained either, because tracebacks would show it.

Only the text tells a refused connection from a lost response (upstream defect 15). If no pattern below
matches, the failure counts as `OUTCOME_UNKNOWN`, which is always safe.
"""

from __future__ import annotations

import ast
import enum
import math
import re
from collections.abc import Awaitable, Iterator, Mapping
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

#: The exceptions that obstore raises.
OBSTORE_ERRORS = (BaseError, OSError, ValueError)

#: Name that obstore gives to our credential provider.
_PROVIDER = "External AWS credential provider"
_KEYS_REFUSED = "the service does not accept the credentials; check AWS_PROFILE or the AWS_* keys"
_OTHER_REGION = "the bucket is in another region; set AWS_REGION to the region of the bucket"
#: Meanings of S3 error codes that are not self-explanatory.
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
    """The known effect of a failed request."""

    NOT_FOUND = "not found"
    EXISTS = "exists"
    CHANGED = "changed"
    NOT_SENT = "not sent"
    REFUSED = "refused"
    BEYOND_END = "beyond end"
    OUTCOME_UNKNOWN = "outcome unknown"


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """One failed request. `reason` is safe to show to users."""

    kind: FailureKind
    reason: str
    status: int | None = None
    #: Whether it belonged to a multipart upload, before the request that makes the blob visible.
    before_completion: bool = False
    #: Whether it was not signed because there were no credentials.
    unsigned: bool = False

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed a moment later."""
        if self.kind in (FailureKind.NOT_SENT, FailureKind.OUTCOME_UNKNOWN):
            return True
        return self.status in (409, 429)


def classify_error(error: Exception) -> FailedRequest:
    """Classify one obstore exception."""
    # After the last marker comes Rust's debug form, which escapes newlines in values, so a key or
    # response cannot imitate a line of it.
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
    """Return the error of a failed read. It is definite, because reads change nothing."""
    if failure.kind is FailureKind.NOT_FOUND:
        return BlobNotFoundError(f"blob {key!r} does not exist in {store}")
    what = f"{key!r} in {store}" if key else store
    error = BlobUnavailableError(f"cannot read {what}: {failure.reason}")
    error.transient = failure.is_retryable and not failure.unsigned
    return error


def write_error(
    store: str, key: str, failure: FailedRequest, *, outcome_unknown: bool
) -> StreamfoldError:
    """Return the error of a failed write. `outcome_unknown`: an attempt may have succeeded."""
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
        # A missing bucket is not a missing blob: a reader must not mistake it for an empty store.
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
        return True  # no credentials to sign the request with
    return bool(re.search(r"^\s+kind: (Connect|Builder),$", dump, re.MULTILINE))


def _was_redirected(dump: str) -> bool:
    """Return whether S3 redirected without an address, because the bucket is elsewhere."""
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
    """Return our credential provider's message. Other messages may contain secrets."""
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
    number = _find(pattern, text)
    return int(number) if number else None


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one call, in seconds: at most about `attempts * request_timeout` plus pauses."""

    #: Time to connect, after which a host counts as down.
    connect_timeout: float = 5.0
    #: Time for one request with its body. At this limit, a 128 MiB blob needs 18 Mbit/s.
    request_timeout: float = 60.0
    #: Maximum attempts per request, including the first.
    attempts: int = 4
    #: Pause after the first failure. Doubles up to `longest_pause`; each pause is randomly up to
    #: half shorter.
    first_pause: float = 0.1
    longest_pause: float = 2.0

    @classmethod
    def take_from(cls, options: Mapping[str, str]) -> tuple[RequestLimits, dict[str, str]]:
        """Return the limits found in `options`, and the remaining options."""
        names = {field.name for field in fields(cls)}
        limits = {name: _parse(name, text) for name, text in options.items() if name in names}
        attempts = int(limits.pop("attempts", cls().attempts))
        rest = {name: text for name, text in options.items() if name not in names}
        return cls(attempts=attempts, **limits), rest

    def pauses(self) -> Iterator[float]:
        """Yield the pause before each retry."""
        for failures in range(1, self.attempts):
            yield pause_after(failures, self.first_pause, self.longest_pause)

    @property
    def total(self) -> timedelta:
        """The time after which no retry starts."""
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


async def send(request: Awaitable[T]) -> T | FailedRequest:
    """Return the result of the request, or how it failed."""
    try:
        return await request
    except OBSTORE_ERRORS as error:
        return classify_error(error)
