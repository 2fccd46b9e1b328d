"""Creates and deletes subscriptions. Repeating a creation confirms the existing subscription."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Final

from msgspec.structs import replace

from streamfold.errors import ConflictError, InvalidError, PermissionDeniedError
from streamfold.model.access_tokens import Right
from streamfold.model.grants import Grant
from streamfold.server.durable_streams.subscriptions.leases import Config, Subscription
from streamfold.server.durable_streams.subscriptions.links import literal_prefix
from streamfold.server.durable_streams.subscriptions.problems import (
    SubscriptionNotFoundError,
)
from streamfold.server.durable_streams.subscriptions.registry import SubscriptionRegistry
from streamfold.server.durable_streams.subscriptions.subscription import ActiveSubscription
from streamfold.server.durable_streams.subscriptions.webhooks import (
    literal_addresses,
    parse_webhook_url,
    require_allowed,
)
from streamfold.store.catalog.catalog import NamedLocks
from streamfold.wire.durable_streams.subscriptions import (
    Pattern,
    SubscriptionRequest,
    SubscriptionType,
    parse_path,
)

#: Maximum bytes in UTF-8.
DESCRIPTION_MAX: Final = 4096


class SubscriptionCreator:
    """Creates and deletes subscriptions, one call at a time per id."""

    def __init__(
        self,
        registry: SubscriptionRegistry,
        basin: str,
        now: Callable[[], int],
        start: Callable[[ActiveSubscription], None],
        *,
        local_webhooks: bool,
    ) -> None:
        self._registry = registry
        self._basin = basin
        self._now = now
        self._start = start
        self._local = local_webhooks
        self._locks = NamedLocks()

    async def create(
        self, id_: str, asked: SubscriptionRequest, base_url: str, caller: Grant
    ) -> tuple[ActiveSubscription, bool]:
        """Return the caller's subscription, which is durable, and whether this call created it."""
        streams = await self._named_streams(asked, caller)
        config = configure(asked, streams, caller)
        await self._require_rights(config, streams, caller)
        async with self._locks.hold(id_):
            entry = self._registry.find(id_)
            if entry is not None:
                entry.require_owner(caller)
                if await _confirm(entry, config, base_url, caller.stream_prefix):
                    return entry, False
            if config.pattern is not None:
                Pattern(config.pattern).require_simple()
            self._registry.require_room(caller.token_id)
            self._check_target(config)
            state = Subscription(
                config,
                self._now(),
                base_url,
                {},
                owner=caller.token_id,
                prefix=caller.stream_prefix,
            )
            return await self._insert(self._registry.new_entry(id_, state, caller), streams), True

    async def _named_streams(self, asked: SubscriptionRequest, caller: Grant) -> list[str]:
        """Return the streams to link, sorted and unique, without its own wake stream."""
        own = asked.wake_stream.strip("/") if asked.wake_stream is not None else None
        named, time_slice = set[str](), self._registry.time_slice()
        for stream in asked.streams:
            name = parse_path(stream)
            if name != own:
                named.add(caller.full_stream_name(name))
            await time_slice.step()
        return sorted(named)

    async def _require_rights(self, config: Config, streams: Sequence[str], caller: Grant) -> None:
        """Raise unless the caller may read what is matched, and append to the wake stream.

        Streams that match the pattern are checked again each time a worker is notified of them.
        """
        time_slice = self._registry.time_slice()
        for stream in streams:
            caller.require(Right.READ, self._basin, stream)
            await time_slice.step()
        if config.wake_stream is not None:
            caller.require(Right.APPEND, self._basin, config.wake_stream)
        if config.pattern is None:
            return
        prefix = caller.stream_prefix + literal_prefix(config.pattern)
        if not caller.allows_some(Right.READ, self._basin, prefix):
            raise PermissionDeniedError(
                f"this access token does not allow read on any stream that fits {config.pattern!r}"
            )

    async def delete(self, id_: str, caller: Grant) -> None:
        """Delete the subscription if it exists and belongs to the caller."""
        async with self._locks.hold(id_):
            entry = self._registry.find(id_)
            if entry is None or not entry.belongs_to(caller):
                return
            with suppress(SubscriptionNotFoundError):
                async with entry.alone():
                    await entry.erase()
            self._registry.drop(entry)
            if entry.task is not None:
                entry.task.cancel()

    def _check_target(self, config: Config) -> None:
        # Names are resolved and checked at each delivery. A lookup here would only add a wait.
        if config.url is None:
            return
        target = parse_webhook_url(config.url, local=self._local)
        require_allowed(target, literal_addresses(target.host, target.port))

    async def _insert(
        self, entry: ActiveSubscription, streams: Sequence[str]
    ) -> ActiveSubscription:
        async with entry.alone():
            # Registered before listing streams, so that appends during the listing are noticed.
            self._registry.add(entry)
            try:
                state = await self._link(entry, streams)
            except BaseException:
                entry.gone = True
                self._registry.drop(entry)
                raise
            try:
                await entry.write(state)
            finally:
                # Even if the outcome is unknown, because the runner will read it back.
                self._registry.forget_interests()
                entry.notice(*state.links)
                self._start(entry)
        return entry

    async def _link(self, entry: ActiveSubscription, streams: Sequence[str]) -> Subscription:
        linked = self._registry.streams
        state = await linked.link_explicit(entry.state, streams, entry.tails)
        if entry.pattern is not None:
            state = await linked.link_matching(entry, state, entry.pattern)
        return state


async def _confirm(entry: ActiveSubscription, config: Config, base_url: str, prefix: str) -> bool:
    """Return whether it exists as requested: a failed creation may have left nothing."""
    try:
        async with entry.alone():
            if (entry.state.config, entry.state.prefix) != (config, prefix):
                raise ConflictError(
                    f"subscription {entry.id[:80]!r} exists with another configuration: delete it "
                    "first, or choose another id",
                    code="subscription_exists",
                )
            if entry.state.base_url != base_url:
                # The server now has another public name, and callbacks must use it.
                await entry.write(replace(entry.state, base_url=base_url))
    except SubscriptionNotFoundError:
        return False
    return True


def configure(asked: SubscriptionRequest, streams: Sequence[str], caller: Grant) -> Config:
    """Return the requested configuration in canonical form, without members that its type ignores."""
    if len((asked.description or "").encode()) > DESCRIPTION_MAX:
        raise InvalidError(f"description is too long: at most {DESCRIPTION_MAX} bytes of UTF-8")
    is_webhook = asked.type is SubscriptionType.WEBHOOK
    wake_stream = None
    if not is_webhook:
        wake_stream = caller.full_stream_name(parse_path(asked.wake_stream or ""))
    return Config(
        type=asked.type,
        pattern=Pattern(asked.pattern.strip("/")).text if asked.pattern is not None else None,
        streams=sha256("\0".join(streams).encode()).digest(),
        url=asked.webhook.url if is_webhook and asked.webhook else None,
        wake_stream=wake_stream,
        lease_ttl_ms=asked.lease_ttl_ms,
        description=asked.description,
    )
