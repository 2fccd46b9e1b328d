"""Subscriptions on the wire: names in paths, request and response bodies, stream path globs.

In a glob, `*` stands for one whole segment and `**` for any number of segments, including none.
Segments are separated by slashes. Matching takes one step per segment of the path, whatever the
pattern: the set of reached pattern segments, held as the bits of one integer, advances along the
path.

A request either decodes into a struct that satisfies all its rules, or is rejected. Unknown members
are ignored, as in the protocol's other servers. A response omits members without a value.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from streamfold.errors import InvalidError
from streamfold.model.names import parse_stream_name
from streamfold.wire.text import SHOWN, decode_json, decode_segment

#: Maximum bytes of UTF-8 in a subscription id, and in a worker's name.
ID_MAX: Final = 256
#: A first path segment that no stream can have.
_CONTROL: Final = "__ds"
#: Maximum characters: twice the longest stream name.
PATTERN_MAX: Final = 1024
#: Maximum segments of a new pattern, and maximum `**` among them. Each stream is matched against
#: every subscription.
SEGMENTS_MAX: Final = 32
MANY_MAX: Final = 4
_ONE, _MANY = "*", "**"
#: Minimum and maximum milliseconds for which a worker holds a wake without renewing its lease.
LEASE_TTL_MIN_MS: Final = 1_000
LEASE_TTL_MAX_MS: Final = 600_000
LEASE_TTL_DEFAULT_MS: Final = 30_000
#: Maximum streams that one request may name: as many as a subscription may have.
NAMED_MAX: Final = 10_000
Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53 - 1)]
LeaseTtl: TypeAlias = Annotated[int, Meta(ge=LEASE_TTL_MIN_MS, le=LEASE_TTL_MAX_MS)]


def parse_id(segment: str) -> str:
    """Parse a subscription id from a path segment."""
    return parse_name(decode_name(segment), "subscription id")


def parse_name(text: str, what: str) -> str:
    """Check a name that is stored with a subscription, and return it."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidError(f"{what} {text[:60]!r} is not valid Unicode text") from None
    if not 0 < size <= ID_MAX or "\0" in text:
        raise InvalidError(f"{what} of {size} bytes must have 1 to {ID_MAX}, and no NUL")
    return text


def parse_path(text: str) -> str:
    """Parse a stream's path. Leading and trailing slashes are ignored."""
    path = parse_stream_name(text.strip("/"))
    if path.partition("/")[0] == _CONTROL:
        raise InvalidError(f"stream {path[:80]!r} begins with {_CONTROL}, which is reserved")
    return path


def decode_name(segment: str) -> str:
    text = decode_segment(segment)
    if text is None:
        raise InvalidError(f"path segment {segment[:SHOWN]!r} is not percent-encoded UTF-8")
    return text


class Pattern:
    """A validated glob, ready to match paths."""

    __slots__ = ("_here", "_many", "_one", "_start", "_whole", "text")

    def __init__(self, text: str) -> None:
        #: The pattern without a leading slash.
        self.text = text.removeprefix("/")
        segments = _segments(self.text)
        #: Bit i of a mask: the pattern's i-th segment is this text (`_here`), `*` (`_one`) or `**`
        #: (`_many`).
        self._here: dict[str, int] = {}
        for index, segment in enumerate(segments):
            self._here[segment] = self._here.get(segment, 0) | 1 << index
        self._one = self._here.pop(_ONE, 0)
        self._many = self._here.pop(_MANY, 0)
        self._start = self._skip(1)
        self._whole = 1 << len(segments)

    def matches(self, path: str) -> bool:
        """Return whether the whole path matches. A leading slash is ignored."""
        reached, here, one, many = self._start, self._here.get, self._one, self._many
        for segment in path.removeprefix("/").split("/"):
            passed = (reached & (one | here(segment, 0))) << 1 | reached & many
            reached = passed | (passed & many) << 1  # inlines _skip to save a call per segment
            if not reached:
                return False
        return bool(reached & self._whole)

    def require_simple(self) -> None:
        """Raise InvalidError if the pattern is too expensive to match for a new subscription."""
        segments, many = self._whole.bit_length() - 1, self._many.bit_count()
        if segments > SEGMENTS_MAX or many > MANY_MAX:
            raise InvalidError(
                f"pattern {self.text[:60]!r} has {segments} segments, {many} of them **: it can have "
                f"{SEGMENTS_MAX} and {MANY_MAX}; use fewer, or name the streams instead"
            )

    def _skip(self, reached: int) -> int:
        """Extend `reached` past each `**`, which may match nothing.

        `**` never repeats, so once is enough.
        """
        return reached | (reached & self._many) << 1

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"


def _segments(text: str) -> list[str]:
    if not 0 < len(text) <= PATTERN_MAX:
        raise InvalidError(
            f"pattern of {len(text)} characters: it must have 1 to {PATTERN_MAX} after the first /"
        )
    segments: list[str] = []
    for segment in text.split("/"):
        _check_segment(segment, text)
        if segment != _MANY or segments[-1:] != [_MANY]:
            segments.append(segment)
    return segments


def _check_segment(segment: str, text: str) -> None:
    if not segment:
        raise InvalidError(f"pattern {text[:60]!r} has an empty segment: use single slashes")
    if "*" in segment and segment not in (_ONE, _MANY):
        raise InvalidError(
            f"pattern {text[:60]!r}: {segment[:60]!r} mixes * with text; "
            "* stands for one whole segment, ** for any number of them"
        )
    if "\0" in segment:
        raise InvalidError(f"pattern {text[:60]!r} contains a NUL character: remove it")


class SubscriptionType(enum.StrEnum):
    WEBHOOK = "webhook"
    PULL_WAKE = "pull-wake"


class SubscriptionStatus(enum.StrEnum):
    ACTIVE = "active"
    FAILED = "failed"


class LinkType(enum.StrEnum):
    """How a stream belongs to a subscription. Explicit wins if both apply."""

    GLOB = "glob"
    EXPLICIT = "explicit"


class WebhookTarget(Struct, frozen=True):
    url: Text


class SubscriptionRequest(Struct, frozen=True):
    """`PUT …/subscriptions/{id}`: the streams, and how to wake a worker."""

    type: SubscriptionType
    pattern: Text | None = None
    streams: Annotated[tuple[Text, ...], Meta(max_length=NAMED_MAX)] = ()
    webhook: WebhookTarget | None = None
    wake_stream: Text | None = None
    lease_ttl_ms: LeaseTtl = LEASE_TTL_DEFAULT_MS
    description: str | None = None


class StreamsRequest(Struct, frozen=True):
    """`POST …/streams`: the streams to link."""

    streams: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=NAMED_MAX)]


class ClaimRequest(Struct, frozen=True):
    """`POST …/claim`: the worker that claims a wake."""

    worker: Text


class Ack(Struct, frozen=True):
    """Everything in `stream` before `offset` has been processed."""

    stream: Text
    offset: Text


class AckRequest(Struct, frozen=True):
    """`POST …/ack` and `…/callback`."""

    wake_id: Text
    generation: Count
    acks: Annotated[tuple[Ack, ...], Meta(max_length=NAMED_MAX)] = ()
    done: bool = False


class ReleaseRequest(Struct, frozen=True):
    """`POST …/release`."""

    wake_id: Text
    generation: Count


class WebhookReply(Struct, frozen=True):
    """A webhook receiver's reply. `done` acknowledges everything it was sent."""

    done: bool = False


class LinkView(Struct, frozen=True):
    path: str
    link_type: LinkType
    acked_offset: str


class PendingView(Struct, frozen=True):
    """A linked stream as workers see it."""

    path: str
    link_type: LinkType
    acked_offset: str
    tail_offset: str
    has_pending: bool


class SigningView(Struct, frozen=True):
    alg: str
    kid: str
    jwks_url: str


class WebhookView(Struct, frozen=True):
    url: str
    signing: SigningView


class SubscriptionView(Struct, frozen=True, omit_defaults=True):
    """A subscription in responses. `id` and `subscription_id` are equal."""

    id: str
    subscription_id: str
    type: SubscriptionType
    streams: tuple[LinkView, ...]
    lease_ttl_ms: int
    #: RFC 3339.
    created_at: str
    status: SubscriptionStatus
    pattern: str | None = None
    webhook: WebhookView | None = None
    wake_stream: str | None = None
    description: str | None = None
    #: Root only: the access token that owns the subscription, and the prefix that its stream names
    #: lack.
    owner: str | None = None
    stream_prefix: str | None = None


class ClaimView(Struct, frozen=True):
    """The response to a worker that claimed a wake."""

    wake_id: str
    generation: int
    token: str
    streams: tuple[PendingView, ...]
    lease_ttl_ms: int


class AckView(Struct, frozen=True):
    next_wake: bool
    ok: bool = True


class WebhookCall(Struct, frozen=True):
    """The signed body sent to a webhook."""

    subscription_id: str
    wake_id: str
    generation: int
    streams: tuple[PendingView, ...]
    callback_url: str
    callback_token: str


class WakeMessage(Struct, frozen=True, tag="wake", tag_field="type"):
    """A message that is appended to a wake stream."""

    subscription_id: str
    stream: str
    generation: int
    #: Milliseconds since the Unix epoch.
    ts: int


class Refusal(Struct, frozen=True, omit_defaults=True):
    code: str
    message: str
    #: Only if another worker holds the wake.
    current_holder: str | None = None
    generation: int | None = None


class RefusalBody(Struct, frozen=True):
    error: Refusal


_SUBSCRIPTION: Final = msgspec.json.Decoder(SubscriptionRequest)
_STREAMS: Final = msgspec.json.Decoder(StreamsRequest)
_CLAIM: Final = msgspec.json.Decoder(ClaimRequest)
_ACK: Final = msgspec.json.Decoder(AckRequest)
_RELEASE: Final = msgspec.json.Decoder(ReleaseRequest)
_REPLY: Final = msgspec.json.Decoder(WebhookReply)


def decode_subscription(body: bytes) -> SubscriptionRequest:
    """Decode a subscription. It must have streams, and the target that its type needs."""
    asked = decode_json(_SUBSCRIPTION, body)
    if asked.pattern is None and not asked.streams:
        raise InvalidError("the subscription has no streams: give pattern, streams, or both")
    if asked.type is SubscriptionType.WEBHOOK and asked.webhook is None:
        raise InvalidError("a webhook subscription needs webhook.url: give the URL to call")
    if asked.type is SubscriptionType.PULL_WAKE and asked.wake_stream is None:
        raise InvalidError("a pull-wake subscription needs wake_stream: name a stream for wakes")
    return asked


def decode_streams(body: bytes) -> tuple[str, ...]:
    return decode_json(_STREAMS, body).streams


def decode_claim(body: bytes) -> ClaimRequest:
    return decode_json(_CLAIM, body)


def decode_ack(body: bytes) -> AckRequest:
    return decode_json(_ACK, body)


def decode_release(body: bytes) -> ReleaseRequest:
    return decode_json(_RELEASE, body)


def decode_webhook_reply(body: bytes) -> WebhookReply:
    """Decode the receiver's reply. An empty body acknowledges nothing."""
    return decode_json(_REPLY, body) if body.strip() else WebhookReply()
