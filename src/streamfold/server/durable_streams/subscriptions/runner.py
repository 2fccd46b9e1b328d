"""Runs subscriptions: begins wakes, notifies workers, and ends wakes whose lease has expired.

A wake is durable before any worker is notified, and notifications are not recorded. So a restarted
process notifies again, and a crash cannot lose a wake.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias
from urllib.parse import quote

import msgspec

from streamfold.errors import InvalidError, StreamfoldError
from streamfold.model.access_tokens import Right
from streamfold.model.grants import NO_RIGHTS
from streamfold.model.records import Record
from streamfold.model.resources import Claim
from streamfold.records.batch import RecordBatch
from streamfold.server.durable_streams.subscriptions import leases
from streamfold.server.durable_streams.subscriptions.fairness import OwnerSlots
from streamfold.server.durable_streams.subscriptions.problems import (
    SubscriptionNotFoundError,
    WebhookUrlRejectedError,
)
from streamfold.server.durable_streams.subscriptions.registry import SubscriptionRegistry
from streamfold.server.durable_streams.subscriptions.subscription import ActiveSubscription, Draft
from streamfold.server.durable_streams.subscriptions.webhooks import (
    HostLookups,
    Keyring,
    Reply,
    WebhookAddress,
    WebhookClient,
    WebhookError,
    parse_webhook_url,
    require_allowed,
)
from streamfold.store.log.admission import AppendRequest
from streamfold.store.store import StreamStore
from streamfold.wire.durable_streams.signing import SIGNATURE_HEADER
from streamfold.wire.durable_streams.subscriptions import (
    SubscriptionType,
    WakeMessage,
    WebhookCall,
    decode_webhook_reply,
)
from streamfold.wording import reason_of

logger = logging.getLogger(__name__)

#: Maximum webhooks in progress for all subscriptions: a slow receiver occupies one for seconds.
DELIVERIES_MAX: Final = 128
#: Maximum webhooks in progress of one access token, and of root.
DELIVERIES_PER_OWNER: Final = 32
DELIVERIES_OF_ROOT: Final = 96
#: Seconds until the next attempt after storage fails to respond or an unexpected error occurs.
_PAUSE: Final = 5.0
#: Milliseconds between checks of whether an owner's revoked token has become valid again.
_RIGHTS_INTERVAL: Final = 60_000

#: A webhook's parsed URL, and the checked addresses of its host.
_Receiver: TypeAlias = tuple[WebhookAddress, Sequence[str]]


class Runner:
    """Runs one task for each subscription."""

    def __init__(
        self,
        store: StreamStore,
        basin: str,
        registry: SubscriptionRegistry,
        keyring: Keyring,
        webhooks: WebhookClient,
        lookups: HostLookups,
        now: Callable[[], int],
        chance: random.Random,
        *,
        local_webhooks: bool,
        own_url: str | None,
    ) -> None:
        self._store = store
        self._basin = basin
        self._registry = registry
        self._keyring = keyring
        self._webhooks = webhooks
        self._lookups = lookups
        self._now = now
        self._chance = chance
        self._local = local_webhooks
        #: The root of the control paths. If unknown, callbacks go to the URL that was used when the
        #: subscription was created.
        self._own_url = own_url
        self._slots = OwnerSlots(DELIVERIES_MAX, DELIVERIES_PER_OWNER, DELIVERIES_OF_ROOT)

    async def run(self, entry: ActiveSubscription) -> None:
        """Do what is due until the subscription is gone."""
        while True:
            entry.poked.clear()
            try:
                due = await self._step(entry)
            except SubscriptionNotFoundError:
                self._registry.drop(entry)
                return
            except StreamfoldError as error:
                logger.warning("subscription %r waits: %s", entry.id, error)
                await asyncio.sleep(_PAUSE)
            except Exception:
                # Unexpected, but it must not affect other subscriptions or the server.
                logger.exception("subscription %r failed, and will be retried", entry.id)
                await asyncio.sleep(_PAUSE)
            else:
                await entry.wait(None if due is None else max(0, due - self._now()) / 1000)

    async def _step(self, entry: ActiveSubscription) -> int | None:
        """Do what is due. Returns the latest time of the next check, in ms since the Unix epoch."""
        async with self._registry.changing(entry) as draft:
            _advance(draft)
        state = entry.state
        wake = state.wake
        if wake is None:
            # Nothing announces that a token was issued again.
            return self._now() + _RIGHTS_INTERVAL if entry.grant == NO_RIGHTS else None
        if wake.lease_until is not None:
            return wake.lease_until
        if state.next_attempt_at > self._now():
            return state.next_attempt_at
        if state.config.type is SubscriptionType.WEBHOOK:
            # Before taking a slot, because an unresponsive name server must not occupy other
            # owners' slots.
            receiver = await self._find_addresses(entry)
            give_back = await self._slots.take(state.owner)
            try:
                await self._deliver(entry, wake.id, receiver)
            finally:
                give_back()
        elif entry.announced == wake.id:
            return None
        else:
            await self._announce(entry, wake.id)
        return self._now()

    async def _announce(self, entry: ActiveSubscription, wake_id: str) -> None:
        """Append a wake to the wake stream, if the owner may append there."""
        async with self._registry.changing(entry) as draft:
            stream, wake_stream = draft.pending, draft.state.config.wake_stream or ""
            if not _is_untaken(draft, wake_id) or stream is None:
                return
            named, generation = entry.short_name(stream), draft.state.generation
        message = msgspec.json.encode(WakeMessage(entry.id, named, generation, self._now()))
        try:
            entry.grant.require(Right.APPEND, self._basin, wake_stream)
            append = AppendRequest(
                (RecordBatch.of([Record(message)]),), claim=Claim(content_type="application/json")
            )
            await self._store.stream(self._basin, wake_stream).submit(append).ack
        except StreamfoldError as error:
            logger.warning("subscription %r cannot write its wake: %s", entry.id, error)
            async with self._registry.changing(entry) as draft:
                if _is_untaken(draft, wake_id):
                    draft.state = leases.fail(draft.state, draft.now, self._chance)
            return
        entry.announced = wake_id
        async with self._registry.changing(entry) as draft:
            draft.state = leases.succeed(draft.state)

    async def _deliver(
        self, entry: ActiveSubscription, wake_id: str, receiver: _Receiver | None
    ) -> None:
        """Send a wake to a webhook's receiver, and apply its response."""
        async with self._registry.changing(entry) as draft:
            untaken = _is_untaken(draft, wake_id) and draft.pending is not None
            if not untaken or entry.token is None:
                return
            call = await _call(draft, entry.token[1], self._own_url or draft.state.base_url)
            notified = {path: entry.tails.get(path, 0) for path in draft.links}
        reply = await self._send(entry, receiver, msgspec.json.encode(call))
        async with self._registry.changing(entry) as draft:
            wake = draft.state.wake
            if wake is None or wake.id != wake_id:
                return  # a callback was faster, or the subscription changed meanwhile
            if reply is not None and 200 <= reply.status < 300:
                draft.state = leases.succeed(draft.state)
                if _says_done(reply):
                    draft.state = leases.acknowledge_all(draft.state, notified)
                    draft.finish()
                elif wake.lease_until is None:
                    draft.state = leases.hold(draft.state, wake, draft.now)
            elif wake.lease_until is None:
                draft.state = leases.fail(draft.state, draft.now, self._chance)

    async def _find_addresses(self, entry: ActiveSubscription) -> _Receiver | None:
        """Resolve and check the webhook's address again.

        Returns None if it is unknown or not allowed.
        """
        try:
            target = parse_webhook_url(entry.state.config.url or "", local=self._local)
            addresses = await self._lookups.addresses(entry.state.owner, target.host, target.port)
            require_allowed(target, addresses)
        except (OSError, WebhookUrlRejectedError) as error:
            _log_failure(entry, error)
            return None
        return target, addresses

    async def _send(
        self, entry: ActiveSubscription, receiver: _Receiver | None, body: bytes
    ) -> Reply | None:
        """Return the receiver's response, or None without one."""
        if receiver is None:
            return None
        key = await self._keyring.key()
        headers = {
            "content-type": "application/json",
            SIGNATURE_HEADER: key.sign(self._now() // 1000, body),
        }
        try:
            reply = await self._webhooks.post(*receiver, headers, body)
        except (OSError, WebhookError) as error:
            _log_failure(entry, error)
            return None
        if not 200 <= reply.status < 300:
            logger.warning(
                "the webhook of subscription %r answered with status %d", entry.id, reply.status
            )
        return reply


def _log_failure(entry: ActiveSubscription, error: Exception) -> None:
    logger.warning("the webhook of subscription %r failed: %s", entry.id, reason_of(error))


def callback_url(base_url: str, subscription_id: str) -> str:
    return f"{base_url}/subscriptions/{quote(subscription_id, safe='')}/callback"


def _advance(draft: Draft) -> None:
    """End an expired wake, and begin one if there is work that no worker has."""
    draft.state = leases.expire(draft.state, draft.now)
    wake = draft.state.wake
    if wake is None:
        if draft.pending is not None:
            draft.begin()
    elif wake.lease_until is None and not _is_current(draft):
        # Its streams may be gone. Or only a former process knows its token, so the receiver needs
        # another.
        draft.finish()


def _is_current(draft: Draft) -> bool:
    """Return whether an unclaimed wake can be announced as it is."""
    wake, token = draft.state.wake, draft.entry.token
    if draft.pending is None or wake is None:
        return False
    is_webhook = draft.state.config.type is SubscriptionType.WEBHOOK
    return not is_webhook or (token is not None and token[0] == wake.id)


def _is_untaken(draft: Draft, wake_id: str) -> bool:
    wake = draft.state.wake
    return wake is not None and wake.id == wake_id and wake.lease_until is None


async def _call(draft: Draft, token: str, base_url: str) -> WebhookCall:
    state, id_ = draft.state, draft.entry.id
    return WebhookCall(
        id_,
        state.wake.id if state.wake else "",
        state.generation,
        await draft.streams(),
        callback_url(base_url, id_),
        token,
    )


def _says_done(reply: Reply) -> bool:
    try:
        return decode_webhook_reply(reply.body).done
    except InvalidError:
        return False  # whatever the receiver answered, it may call back later
