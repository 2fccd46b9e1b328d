"""A change to a subscription before it is written; nothing of it counts until then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from streamfold.server.durable_streams.subscriptions import leases
from streamfold.server.durable_streams.subscriptions.state import Link, Subscription
from streamfold.server.durable_streams.subscriptions.subscription import ActiveSubscription
from streamfold.server.durable_streams.subscriptions.time_slices import TimeSlice
from streamfold.wire.durable_streams.offsets import format_offset
from streamfold.wire.durable_streams.subscriptions import LinkType, PendingView, SubscriptionType


@dataclass(slots=True)
class Draft:
    """The state after the change."""

    entry: ActiveSubscription
    state: Subscription
    #: Milliseconds since the Unix epoch.
    now: int
    random_text: Callable[[], str]
    #: For loops over many streams.
    time_slice: TimeSlice
    #: The token of the wake that was begun, in the clear.
    token: str | None = None

    @property
    def links(self) -> Mapping[str, Link]:
        """The links to streams that the owner may read: work is about these alone."""
        return self.entry.readable(self.state.links)

    @property
    def pending(self) -> str | None:
        """A stream that has records to process."""
        return leases.pending(self.links, self.entry.tails)

    def begin(self) -> None:
        """Begin a wake; a webhook's receiver holds it as soon as it is notified."""
        if self.state.config.type is SubscriptionType.WEBHOOK:
            self.token = self.random_text()
        self.state = leases.begin(self.state, f"wake_{self.random_text()}", self.token)

    def finish(self) -> bool:
        """End the wake, and begin the next if work is left; returns whether it was."""
        self.state = leases.end(self.state)
        more = self.pending is not None
        if more:
            self.begin()
        return more

    async def streams(self) -> tuple[PendingView, ...]:
        """The subscription's streams, as a worker gets them."""
        views = []
        for path, link in self.links.items():
            tail = self.entry.tails.get(path, 0)
            views.append(
                PendingView(
                    self.entry.short_name(path),
                    LinkType.EXPLICIT if link.explicit else LinkType.GLOB,
                    format_offset(link.acked),
                    format_offset(tail),
                    tail > link.acked,
                )
            )
            await self.time_slice.step()
        return tuple(views)
