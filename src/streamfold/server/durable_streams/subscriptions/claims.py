"""The calls of workers and receivers about a wake: claim, acknowledge and release."""

from __future__ import annotations

from msgspec.structs import replace

from streamfold.errors import ConflictError, InvalidError
from streamfold.model.grants import NO_RIGHTS
from streamfold.server.durable_streams.subscriptions import leases
from streamfold.server.durable_streams.subscriptions.problems import (
    WakeClaimedError,
    wake_token_invalid,
)
from streamfold.server.durable_streams.subscriptions.registry import SubscriptionRegistry
from streamfold.server.durable_streams.subscriptions.subscription import ActiveSubscription, Draft
from streamfold.wire.durable_streams.subscriptions import (
    AckRequest,
    AckView,
    ClaimView,
    ReleaseRequest,
    SubscriptionType,
    parse_name,
)


class WakeClaims:
    """Handles calls about wakes. Each call is durable when it returns, or changes nothing."""

    def __init__(self, registry: SubscriptionRegistry) -> None:
        self._registry = registry

    async def claim(self, entry: ActiveSubscription, worker: str) -> ClaimView:
        """Give pending work to `worker`. Raises WakeClaimedError if another worker has it."""
        _require(entry, SubscriptionType.PULL_WAKE)
        parse_name(worker, "worker")
        async with self._registry.changing(entry) as draft:
            draft.state = leases.expire(draft.state, draft.now)
            wake = draft.state.wake
            if wake is not None and wake.holder is not None:
                raise WakeClaimedError(wake.holder, draft.state.generation)
            if draft.pending is None:
                raise ConflictError(
                    "everything is acknowledged: wait for the next wake", code="no_pending_work"
                )
            return await self._give(draft, worker)

    async def acknowledge(
        self, entry: ActiveSubscription, kind: SubscriptionType, token: str, said: AckRequest
    ) -> AckView:
        """Record processed positions and renew the lease. Ends the wake if the caller is done."""
        _require(entry, kind)
        # Acks are checked against the streams' current state, not the state last read.
        acked = {entry.state.prefix + ack.stream.strip("/") for ack in said.acks}
        entry.noticed.update(acked.intersection(entry.state.links))
        async with self._registry.changing(entry) as draft:
            _require_good_owner(entry)
            draft.state = leases.expire(draft.state, draft.now)
            wake = leases.prove(draft.state, token, said.wake_id, said.generation)
            draft.state = await leases.acknowledge(
                draft.state, draft.links, said.acks, entry.tails, draft.time_slice
            )
            draft.state = leases.hold(leases.succeed(draft.state), wake, draft.now)
            more = draft.finish() if said.done else False
        return AckView(more)

    async def release(self, entry: ActiveSubscription, token: str, said: ReleaseRequest) -> None:
        """Release the caller's claim, so that another worker may take the work."""
        _require(entry, SubscriptionType.PULL_WAKE)
        async with self._registry.changing(entry) as draft:
            _require_good_owner(entry)
            draft.state = leases.expire(draft.state, draft.now)
            leases.prove(draft.state, token, said.wake_id, said.generation)
            draft.finish()

    async def _give(self, draft: Draft, worker: str) -> ClaimView:
        if draft.state.wake is None:
            draft.begin()  # claimed at once, so not announced
        wake, token = draft.state.wake, draft.random_text()
        assert wake is not None  # noqa: S101 - begun above if none was open
        claimed = replace(wake, holder=worker, token=leases.hash_token(token))
        draft.state = leases.hold(draft.state, claimed, draft.now)
        state = draft.state
        return ClaimView(
            wake.id, state.generation, token, await draft.streams(), state.config.lease_ttl_ms
        )


def _require_good_owner(entry: ActiveSubscription) -> None:
    if entry.grant == NO_RIGHTS:
        raise wake_token_invalid(
            "the access token that this subscription belongs to was revoked or has expired"
        )


def _require(entry: ActiveSubscription, kind: SubscriptionType) -> None:
    if entry.state.config.type is not kind:
        raise InvalidError(
            f"subscription {entry.id[:80]!r} is of type {entry.state.config.type}: "
            f"this call is for type {kind}"
        )
