"""The life of a wake: begun, held under a lease, acknowledged, over. Values in, values out."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from hmac import compare_digest
from typing import Final

from msgspec.structs import replace

from streamfold.backoff import pause_after
from streamfold.errors import InvalidError
from streamfold.server.durable_streams.subscriptions.fairness import TimeSlice
from streamfold.server.durable_streams.subscriptions.problems import (
    AckOffsetError,
    WakeFencedError,
    WakeTokenInvalidError,
)
from streamfold.server.durable_streams.subscriptions.state import Link, Subscription, Wake
from streamfold.wire.durable_streams.offsets import parse_offset
from streamfold.wire.durable_streams.subscriptions import Ack

#: Tokens of former wakes that are still recognised.
RETIRED_KEPT: Final = 16
#: Milliseconds before the second attempt, doubled for each further one.
RETRY_FIRST: Final = 1_000
RETRY_MAX: Final = 60_000
#: Shares of a delay, of which one is chosen at random: the protocol says 20 % up or down.
RETRY_SPREAD: Final = (0.8, 1.2)

#: The tail of each stream that exists.
Tails = Mapping[str, int]


def pending(links: Mapping[str, Link], tails: Tails) -> str | None:
    """A stream that has records to process."""
    for path, link in links.items():
        if tails.get(path, 0) > link.acked:
            return path
    return None


def begin(state: Subscription, wake_id: str, token: str | None) -> Subscription:
    """A wake of the next generation; `token` if its receiver holds it once notified."""
    wake = Wake(wake_id, token=hash_token(token) if token else None)
    return replace(state, generation=state.generation + 1, wake=wake)


def hold(state: Subscription, wake: Wake, now: int) -> Subscription:
    """The wake is held from now on, for as long as the lease lasts."""
    return replace(state, wake=replace(wake, lease_until=now + state.config.lease_ttl_ms))


def end(state: Subscription) -> Subscription:
    """The state without a wake; the token of the last one is no longer valid."""
    retired = state.retired
    if state.wake is not None and state.wake.token is not None:
        retired = (state.wake.token, *retired)[:RETIRED_KEPT]
    return replace(state, wake=None, retired=retired)


def expire(state: Subscription, now: int) -> Subscription:
    """End the wake if its lease is over."""
    wake = state.wake
    over = wake is not None and wake.lease_until is not None and wake.lease_until <= now
    return end(state) if over else state


def is_known(state: Subscription, token: str) -> bool:
    """Whether a token is, or was, one of this subscription's wakes."""
    shown, wake = hash_token(token), state.wake
    held = () if wake is None or wake.token is None else (wake.token,)
    return any(compare_digest(known, shown) for known in (*held, *state.retired))


def prove(state: Subscription, token: str, wake_id: str, generation: int) -> Wake:
    """The wake, if token, id and generation are all its own."""
    shown, wake = hash_token(token), state.wake
    current = wake is not None and wake.token is not None and compare_digest(wake.token, shown)
    if not is_known(state, token):
        raise WakeTokenInvalidError
    if not current or wake is None or (wake.id, state.generation) != (wake_id, generation):
        raise WakeFencedError(generation, state.generation)
    return wake


async def acknowledge(
    state: Subscription,
    readable: Collection[str],
    acks: Sequence[Ack],
    tails: Tails,
    time_slice: TimeSlice,
) -> Subscription:
    """Move links that are readable forward; all of `acks`, or AckOffsetError and none."""
    if not acks:
        return state
    links = dict(state.links)
    for ack in acks:
        name = ack.stream.strip("/")
        path = state.prefix + name
        link = links.get(path) if path in readable else None
        if link is None:
            raise AckOffsetError(f"stream {name[:80]!r} is not one of this subscription's")
        links[path] = replace(link, acked=_acked(link, ack, tails.get(path, 0)))
        await time_slice.step()
    return replace(state, links=links)


def acknowledge_all(state: Subscription, notified: Tails) -> Subscription:
    """Everything that a receiver was notified of is processed; later acks stay."""
    links = dict(state.links)
    for path, link in state.links.items():
        if (tail := notified.get(path, 0)) > link.acked:
            links[path] = replace(link, acked=tail)
    return replace(state, links=links)


def succeed(state: Subscription) -> Subscription:
    """The state after a successful notification."""
    return replace(state, failures=0, next_attempt_at=0) if state.failures else state


def fail(state: Subscription, now: int, rng: random.Random) -> Subscription:
    """The state after a failed notification, with the time of the next attempt."""
    failures = state.failures + 1
    delay = round(pause_after(failures, RETRY_FIRST, RETRY_MAX, rng, RETRY_SPREAD))
    return replace(state, failures=failures, next_attempt_at=now + delay)


def hash_token(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def _acked(link: Link, ack: Ack, tail: int) -> int:
    try:
        acked = parse_offset(ack.offset)
    except InvalidError as error:
        raise AckOffsetError(error.message) from None
    if not link.acked <= acked <= tail:
        raise AckOffsetError(
            f"offset {ack.offset} of stream {ack.stream[:80]!r} is out of range: acks go forward "
            "from the last one, up to the tail"
        )
    return acked
