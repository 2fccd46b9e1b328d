"""The durable state of a subscription, and pure functions that change it.

A wake begins, is held under a lease, is acknowledged, and ends.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from hmac import compare_digest
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from streamfold.backoff import pause_after
from streamfold.errors import ConflictError, InvalidError
from streamfold.server.durable_streams.subscriptions.fairness import TimeSlice
from streamfold.server.durable_streams.subscriptions.problems import (
    ack_offset_invalid,
    wake_token_invalid,
)
from streamfold.wire.durable_streams.offsets import parse_offset
from streamfold.wire.durable_streams.subscriptions import Ack, SubscriptionType

#: Maximum links of one subscription, because every wake iterates over them.
LINKS_MAX: Final = 10_000
#: Maximum links of all subscriptions together, because they are held in memory.
LINKS_TOTAL_MAX: Final = 100_000
#: Maximum links of one access token's subscriptions, so that no token uses up the room of others.
LINKS_PER_OWNER: Final = 20_000
#: Maximum bytes of one subscription's links, including stream names: each worker gets all of them.
LINKS_BYTES_MAX: Final = 768 << 10


class Config(Struct, frozen=True, omit_defaults=True):
    """The requested configuration in canonical form, which identifies a repeated request."""

    type: SubscriptionType
    #: Without leading or trailing slashes, like all paths here.
    pattern: str | None
    #: SHA-256 of the streams named in the request. They become links, which may be removed later.
    streams: bytes
    url: str | None
    wake_stream: str | None
    lease_ttl_ms: int
    description: str | None


class Link(Struct, frozen=True, array_like=True):
    """A stream of the subscription, and how far it has been processed."""

    #: Seq_num of the first record that is not acknowledged.
    acked: int
    #: Whether the application named the stream, which may also match the pattern.
    explicit: bool
    #: Id of the stream that `acked` refers to, because a recreated stream has another id. None if
    #: it does not exist.
    stream_id: int | None


class Wake(Struct, frozen=True, omit_defaults=True):
    """Work that is announced or held by a worker."""

    id: str
    #: SHA-256 of the token that its holder presents.
    token: bytes | None = None
    #: The worker that claimed it.
    holder: str | None = None
    #: When the lease ends unless renewed, in ms since the Unix epoch; None until it is claimed.
    lease_until: int | None = None


class Subscription(Struct, frozen=True, omit_defaults=True):
    """The state of a subscription that must survive a restart."""

    config: Config
    #: Milliseconds since the Unix epoch.
    created_at: int
    #: The root of the control paths as clients see it, for callbacks.
    base_url: str
    links: dict[str, Link]
    #: Number of the last wake.
    generation: int = 0
    wake: Wake | None = None
    #: SHA-256 of the tokens of former wakes, which distinguish a late caller from a stranger.
    retired: tuple[bytes, ...] = ()
    #: Consecutive failed notifications, and when to retry, in ms since the Unix epoch.
    failures: int = 0
    next_attempt_at: int = 0
    #: Id of the access token that owns it; None = root, as for all early subscriptions.
    owner: str | None = None
    #: The prefix that the owner's stream names lack. `links` and `config.wake_stream` have full
    #: names.
    prefix: str = ""


#: Number of former wakes whose tokens are still recognized.
RETIRED_KEPT: Final = 16
#: Milliseconds before the second attempt, doubled for each further one, and their maximum.
RETRY_FIRST: Final = 1_000
RETRY_MAX: Final = 60_000
#: Range of the random factor for a delay: the protocol specifies 20 % up or down.
RETRY_SPREAD: Final = (0.8, 1.2)

#: The tails of existing streams.
Tails = Mapping[str, int]


def pending(links: Mapping[str, Link], tails: Tails) -> str | None:
    """Return a stream that has records to process, if any."""
    for path, link in links.items():
        if tails.get(path, 0) > link.acked:
            return path
    return None


def begin(state: Subscription, wake_id: str, token: str | None) -> Subscription:
    """Begin the next wake. `token` is set if its receiver holds it once notified."""
    wake = Wake(wake_id, token=hash_token(token) if token else None)
    return replace(state, generation=state.generation + 1, wake=wake)


def hold(state: Subscription, wake: Wake, now: int) -> Subscription:
    """Hold the wake for the duration of a lease from now on."""
    return replace(state, wake=replace(wake, lease_until=now + state.config.lease_ttl_ms))


def end(state: Subscription) -> Subscription:
    """End the wake. Its token becomes invalid."""
    retired = state.retired
    if state.wake is not None and state.wake.token is not None:
        retired = (state.wake.token, *retired)[:RETIRED_KEPT]
    return replace(state, wake=None, retired=retired)


def expire(state: Subscription, now: int) -> Subscription:
    """End the wake if its lease has expired."""
    wake = state.wake
    over = wake is not None and wake.lease_until is not None and wake.lease_until <= now
    return end(state) if over else state


def is_known(state: Subscription, token: str) -> bool:
    """Return whether a token belongs to one of this subscription's current or recent wakes."""
    shown, wake = hash_token(token), state.wake
    current = () if wake is None or wake.token is None else (wake.token,)
    return any(compare_digest(digest, shown) for digest in (*current, *state.retired))


def prove(state: Subscription, token: str, wake_id: str, generation: int) -> Wake:
    """Return the wake. Raises unless token, id and generation all match."""
    shown, wake = hash_token(token), state.wake
    current = wake is not None and wake.token is not None and compare_digest(wake.token, shown)
    if not is_known(state, token):
        raise wake_token_invalid()
    if not current or wake is None or (wake.id, state.generation) != (wake_id, generation):
        raise ConflictError(
            f"the wake of generation {generation} is over, the last one was {state.generation}: "
            "stop working on it and wait for the next",
            code="wake_fenced",
        )
    return wake


async def acknowledge(
    state: Subscription,
    readable: Collection[str],
    acks: Sequence[Ack],
    tails: Tails,
    time_slice: TimeSlice,
) -> Subscription:
    """Apply all of `acks` to readable links.

    Raises ack_offset_invalid, changing nothing, if one is bad.
    """
    if not acks:
        return state
    links = dict(state.links)
    for ack in acks:
        name = ack.stream.strip("/")
        path = state.prefix + name
        link = links.get(path) if path in readable else None
        if link is None:
            raise ack_offset_invalid(f"stream {name[:80]!r} is not one of this subscription's")
        links[path] = replace(link, acked=_acked(link, ack, tails.get(path, 0)))
        await time_slice.step()
    return replace(state, links=links)


def acknowledge_all(state: Subscription, notified: Tails) -> Subscription:
    """Acknowledge everything that a receiver was notified of. Later acks stay."""
    links = dict(state.links)
    for path, link in state.links.items():
        if (tail := notified.get(path, 0)) > link.acked:
            links[path] = replace(link, acked=tail)
    return replace(state, links=links)


def succeed(state: Subscription) -> Subscription:
    """Record a successful notification."""
    return replace(state, failures=0, next_attempt_at=0) if state.failures else state


def fail(state: Subscription, now: int, rng: random.Random) -> Subscription:
    """Record a failed notification, and set the time of the next attempt."""
    failures = state.failures + 1
    delay = round(pause_after(failures, RETRY_FIRST, RETRY_MAX, rng, RETRY_SPREAD))
    return replace(state, failures=failures, next_attempt_at=now + delay)


def hash_token(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def _acked(link: Link, ack: Ack, tail: int) -> int:
    try:
        acked = parse_offset(ack.offset)
    except InvalidError as error:
        raise ack_offset_invalid(error.message) from None
    if not link.acked <= acked <= tail:
        raise ack_offset_invalid(
            f"offset {ack.offset} of stream {ack.stream[:80]!r} is out of range: acks go forward "
            "from the last one, up to the tail"
        )
    return acked
