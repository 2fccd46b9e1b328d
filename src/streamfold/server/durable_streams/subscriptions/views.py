"""Subscriptions as they are shown."""

from __future__ import annotations

from datetime import UTC, datetime

from streamfold.model.grants import NOBODY
from streamfold.server.durable_streams.subscriptions.subscription import Entry
from streamfold.wire.durable_streams.offsets import format_offset
from streamfold.wire.durable_streams.signing import ALGORITHM
from streamfold.wire.durable_streams.subscription_bodies import (
    LinkType,
    LinkView,
    SigningView,
    SubscriptionStatus,
    SubscriptionView,
    WebhookView,
)


def show(entry: Entry, kid: str | None, base_url: str, *, to_root: bool) -> SubscriptionView:
    """What is durable of a subscription, without anything secret; `kid` if it has a webhook.

    Names are the owner's; root is told whose they are, and what they lack.
    """
    state, config = entry.state, entry.state.config
    webhook = None
    if config.url is not None and kid is not None:
        signing = SigningView(ALGORITHM, kid, f"{base_url}/jwks.json")
        webhook = WebhookView(config.url, signing)
    failed = state.failures > 0 or entry.full or entry.grant == NOBODY
    wake_stream = None if config.wake_stream is None else entry.short_name(config.wake_stream)
    created = datetime.fromtimestamp(state.created_at / 1000, UTC)
    return SubscriptionView(
        id=entry.id,
        subscription_id=entry.id,
        type=config.type,
        streams=_links(entry),
        lease_ttl_ms=config.lease_ttl_ms,
        created_at=created.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        status=SubscriptionStatus.FAILED if failed else SubscriptionStatus.ACTIVE,
        pattern=config.pattern,
        webhook=webhook,
        wake_stream=wake_stream,
        description=config.description,
        owner=state.owner if to_root else None,
        stream_prefix=(state.prefix or None) if to_root else None,
    )


def _links(entry: Entry) -> tuple[LinkView, ...]:
    return tuple(
        LinkView(
            entry.short_name(path),
            LinkType.EXPLICIT if link.explicit else LinkType.GLOB,
            format_offset(link.acked),
        )
        for path, link in entry.readable(entry.state.links).items()
    )
