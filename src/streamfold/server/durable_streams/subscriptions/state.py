"""What is durable of a subscription: one document, replaced as a whole."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from streamfold.errors import DataCorruptError
from streamfold.wire.durable_streams.subscription_bodies import SubscriptionType

#: Links of one subscription: what it is about is walked through for every wake.
LINKS_MAX: Final = 10_000
#: Links of all subscriptions together: they are held in memory.
LINKS_TOTAL_MAX: Final = 100_000
#: Links of all subscriptions of one access token, so that none takes the room of all others.
LINKS_PER_OWNER: Final = 20_000
#: Bytes of a document when links are added. The store takes 1 MiB: numbers of links may still grow, by
#: 16 bytes each, and a wake has to fit in.
STATE_MAX: Final = 768 << 10


class Config(Struct, frozen=True, omit_defaults=True):
    """What was asked for, in one form: the same request again is known by it."""

    type: SubscriptionType
    #: Without slashes at its ends, as all paths here.
    pattern: str | None
    #: SHA-256 of the streams that were named: they become links, which may go again.
    streams: bytes
    url: str | None
    wake_stream: str | None
    lease_ttl_ms: int
    description: str | None


class Link(Struct, frozen=True, array_like=True):
    """A stream of the subscription, and how far it is processed."""

    #: Number of the first record that is not acknowledged.
    acked: int
    #: Named by the application; it may fit the pattern besides.
    explicit: bool
    #: The stream that `acked` is about: one that is created anew has another. None if there is none.
    stream_id: int | None


class Wake(Struct, frozen=True, omit_defaults=True):
    """Work that somebody is told of, or has."""

    id: str
    #: SHA-256 of the token that proves who has it.
    token: bytes | None = None
    #: The worker that claimed it.
    holder: str | None = None
    #: When it is over unless there is a sign of life, ms since the Unix epoch; None until it is taken.
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
    #: SHA-256 of the tokens of wakes that are over: who shows one was too slow, not a stranger.
    retired: tuple[bytes, ...] = ()
    #: Failed attempts to tell somebody since the last that succeeded, and when to try again.
    failures: int = 0
    next_attempt_at: int = 0
    #: Id of the access token that it belongs to; root's, if None, as all were at first.
    owner: str | None = None
    #: What the owner's names of streams lack; `links` and `config.wake_stream` have whole names.
    prefix: str = ""


_DECODER: Final = msgspec.msgpack.Decoder(Subscription)


def encode(state: Subscription) -> bytes:
    return msgspec.msgpack.encode(state)


def decode(document_id: str, content: bytes) -> Subscription:
    try:
        return _DECODER.decode(content)
    except msgspec.MsgspecError as error:
        raise DataCorruptError(f"subscription {document_id!r} cannot be read: {error}") from error
