"""The durable state of a subscription: one document, replaced as a whole."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from streamfold.errors import DataCorruptError
from streamfold.wire.durable_streams.subscriptions import SubscriptionType

#: Links of one subscription: every wake iterates over them.
LINKS_MAX: Final = 10_000
#: Links of all subscriptions together: they are held in memory.
LINKS_TOTAL_MAX: Final = 100_000
#: Links of all subscriptions of one access token, so that none takes the room of all others.
LINKS_PER_OWNER: Final = 20_000
#: Bytes of a document when links are added. The store takes 1 MiB: numbers of links may still grow, by
#: 16 bytes each, and a wake has to fit in.
STATE_MAX: Final = 768 << 10


class Config(Struct, frozen=True, omit_defaults=True):
    """The requested configuration in canonical form, which identifies a repeated request."""

    type: SubscriptionType
    #: Without slashes at its ends, as all paths here.
    pattern: str | None
    #: SHA-256 of the streams that the request named: they become links, which may be removed.
    streams: bytes
    url: str | None
    wake_stream: str | None
    lease_ttl_ms: int
    description: str | None


class Link(Struct, frozen=True, array_like=True):
    """A stream of the subscription, and how far it is processed."""

    #: Number of the first record that is not acknowledged.
    acked: int
    #: Named by the application; it may also fit the pattern.
    explicit: bool
    #: The stream that `acked` is about: a recreated stream has another. None if it does not exist.
    stream_id: int | None


class Wake(Struct, frozen=True, omit_defaults=True):
    """Work that is announced, or held by a worker."""

    id: str
    #: SHA-256 of the token that its holder presents.
    token: bytes | None = None
    #: The worker that claimed it.
    holder: str | None = None
    #: When its lease ends unless renewed, ms since the Unix epoch; None until it is claimed.
    lease_until: int | None = None


class Subscription(Struct, frozen=True, omit_defaults=True):
    """Everything that a restart must not lose."""

    config: Config
    #: Milliseconds since the Unix epoch.
    created_at: int
    #: The root of the control paths as clients see it, for callbacks.
    base_url: str
    links: dict[str, Link]
    #: Of the last wake.
    generation: int = 0
    wake: Wake | None = None
    #: SHA-256 of the tokens of wakes that are over: a caller with one was too slow, not a stranger.
    retired: tuple[bytes, ...] = ()
    #: Failed notifications since the last that succeeded, and when to try again.
    failures: int = 0
    next_attempt_at: int = 0
    #: Id of the access token that it belongs to; root's, if None, as all were at first.
    owner: str | None = None
    #: The prefix that the owner's stream names lack; `links` and `config.wake_stream` have full names.
    prefix: str = ""


_DECODER: Final = msgspec.msgpack.Decoder(Subscription)


def encode(state: Subscription) -> bytes:
    return msgspec.msgpack.encode(state)


def decode(document_id: str, content: bytes) -> Subscription:
    try:
        return _DECODER.decode(content)
    except msgspec.MsgspecError as error:
        raise DataCorruptError(f"subscription {document_id!r} cannot be read: {error}") from error
