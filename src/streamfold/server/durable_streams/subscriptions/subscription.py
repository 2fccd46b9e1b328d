"""One subscription in memory: its durable state, and facts derived from it.

Only one task at a time changes the state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from streamfold.errors import PermissionDeniedError
from streamfold.model.access_tokens import Right
from streamfold.model.grants import ROOT, Grant
from streamfold.model.names import parse_stream_name
from streamfold.server.durable_streams.subscriptions import leases
from streamfold.server.durable_streams.subscriptions.fairness import TimeSlice
from streamfold.server.durable_streams.subscriptions.leases import Link, Subscription
from streamfold.server.durable_streams.subscriptions.problems import SubscriptionNotFoundError
from streamfold.server.durable_streams.subscriptions.storage import StoredSubscription
from streamfold.wire.durable_streams.offsets import format_offset
from streamfold.wire.durable_streams.subscriptions import (
    LinkType,
    Pattern,
    PendingView,
    SubscriptionType,
)


class ActiveSubscription:
    """A subscription in memory. `state` is what storage has, and responses never go beyond it."""

    def __init__(
        self, stored: StoredSubscription, basin: str, id_: str, state: Subscription, grant: Grant
    ) -> None:
        self.id = id_
        self.state = state
        #: The owner's rights as last looked up.
        self.grant = grant
        self.basin = basin
        pattern = state.config.pattern
        self.pattern = Pattern(pattern) if pattern is not None else None
        #: Streams to read again because something was, or may have been, appended.
        self.noticed = set(state.links)
        #: Tails of the linked streams read so far.
        self.tails: dict[str, int] = {}
        #: Set when there may be something to do.
        self.poked = asyncio.Event()
        #: The id and token of the wake whose token is known. Storage has only the token's hash.
        self.token: tuple[str, str] | None = None
        #: The wake announced in the wake stream, as far as this process knows.
        self.announced: str | None = None
        #: Whether there is no room for some streams that match the pattern.
        self.full = False
        self.gone = False
        #: The task that runs the subscription.
        self.task: asyncio.Task[None] | None = None
        self._stored = stored
        self._lock = asyncio.Lock()
        #: A write that is in progress or has failed. Until the state is read again, it is unknown
        #: what storage has.
        self._write: asyncio.Task[None] | None = None

    def wants(self, stream: str) -> bool:
        """Return whether the stream belongs, or should belong, to the subscription."""
        if stream in self.state.links:
            return True
        prefix = self.state.prefix
        # A subscription to its own wake stream would wake itself endlessly.
        if stream == self.state.config.wake_stream or not stream.startswith(prefix):
            return False
        fits = self.pattern is not None and self.pattern.matches(stream[len(prefix) :])
        return fits and self.may_read(stream)

    def may_read(self, stream: str) -> bool:
        """Return whether the owner may read a stream. The owner must not learn about other streams."""
        return self.grant is ROOT or self.grant.allows(Right.READ, self.basin, stream)

    def readable(self, links: Mapping[str, Link]) -> Mapping[str, Link]:
        """Return the links to streams that the owner may read."""
        if self.grant is ROOT:
            return links
        allowed = self.grant.allowed_streams(Right.READ, self.basin).contains
        return {path: link for path, link in links.items() if allowed(path)}

    def full_name(self, name: str) -> str:
        """Return the full name of a stream that the owner calls `name`."""
        return parse_stream_name(self.state.prefix + name)

    def short_name(self, path: str) -> str:
        """Return the owner's name for a stream."""
        return path.removeprefix(self.state.prefix)

    def belongs_to(self, caller: Grant) -> bool:
        """Return whether the caller is root, or has the token that owns the subscription."""
        mine = self.state.owner is not None and self.state.owner == caller.token_id
        return caller is ROOT or mine

    def require_owner(self, caller: Grant) -> None:
        """Raise unless the subscription belongs to the caller. The error reveals that it exists."""
        if not self.belongs_to(caller):
            raise PermissionDeniedError(
                f"subscription {self.id[:80]!r} belongs to another access token: choose another id"
            )

    def notice(self, *streams: str) -> None:
        """Make the runner read these streams soon."""
        self.noticed.update(streams)
        self.poked.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Hold the subscription exclusively. While held, `state` is what storage has."""
        async with self._lock:
            if self._write is not None:
                await self._look_again()
            if self.gone:
                raise SubscriptionNotFoundError(self.id)
            yield

    async def write(self, state: Subscription) -> None:
        """Make `state` durable. Call only while holding the subscription."""
        await self._finish(self._stored.write(state))
        self.state = state
        self.poked.set()

    async def erase(self) -> None:
        """Delete the subscription durably. Call only while holding the subscription."""
        await self._finish(self._stored.erase())
        self.gone = True
        self.poked.set()

    async def wait(self, seconds: float | None) -> None:
        """Wait until there may be something to do, or until `seconds` have passed."""
        try:
            async with asyncio.timeout(seconds):
                await self.poked.wait()
        except TimeoutError:
            return

    async def settled(self) -> None:
        """Wait until no write is in progress."""
        if self._write is not None:
            await asyncio.wait((self._write,))

    async def _finish(self, write: Coroutine[Any, Any, None]) -> None:
        # The caller may be cancelled. Then the write continues, and the next one waits for it.
        self._write = asyncio.create_task(write)
        try:
            await asyncio.shield(self._write)
        except BaseException:
            self.poked.set()  # the runner must read what storage has now and continue from there
            raise
        self._write = None

    async def _look_again(self) -> None:
        await self.settled()
        if self._write is not None and not self._write.cancelled():
            self._write.exception()  # the caller has already received it, unless cancelled
        state = await self._stored.read()
        self._write = None
        if state is None:
            self.gone = True
            return
        self.state = state
        self.notice(*self.state.links)


@dataclass(slots=True)
class Draft:
    """A change to a subscription, and the state after it."""

    entry: ActiveSubscription
    state: Subscription
    #: Milliseconds since the Unix epoch.
    now: int
    random_text: Callable[[], str]
    #: For loops over many streams.
    time_slice: TimeSlice
    #: The token of the wake that this draft began.
    token: str | None = None

    @property
    def links(self) -> Mapping[str, Link]:
        """The links to streams that the owner may read. Work consists of these alone."""
        return self.entry.readable(self.state.links)

    @property
    def pending(self) -> str | None:
        """A stream that has records to process, if any."""
        return leases.pending(self.links, self.entry.tails)

    def begin(self) -> None:
        """Begin a wake. A webhook's receiver holds it as soon as it is notified."""
        if self.state.config.type is SubscriptionType.WEBHOOK:
            self.token = self.random_text()
        self.state = leases.begin(self.state, f"wake_{self.random_text()}", self.token)

    def finish(self) -> bool:
        """End the wake, and begin the next if work is left. Returns whether it did."""
        self.state = leases.end(self.state)
        more = self.pending is not None
        if more:
            self.begin()
        return more

    async def streams(self) -> tuple[PendingView, ...]:
        """Return the subscription's streams as a worker receives them."""
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
