"""Manages all subscriptions of a basin: which streams each follows, and changes to each."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from time import perf_counter
from typing import Final, TypeAlias

from streamfold.errors import InvalidError, StreamfoldError
from streamfold.model.grants import Grant
from streamfold.server.durable_streams.subscriptions.fairness import TimeSlice
from streamfold.server.durable_streams.subscriptions.leases import LINKS_MAX, Subscription
from streamfold.server.durable_streams.subscriptions.links import LinkedStreams
from streamfold.server.durable_streams.subscriptions.problems import SubscriptionNotFoundError
from streamfold.server.durable_streams.subscriptions.storage import (
    StoredSubscription,
    load_subscriptions,
)
from streamfold.server.durable_streams.subscriptions.subscription import ActiveSubscription, Draft
from streamfold.store.damage import StoreDamagedError
from streamfold.store.store import StreamStore

logger = logging.getLogger(__name__)

#: Maximum subscriptions of one basin, each of which has a task.
SUBSCRIPTIONS_MAX: Final = 1_000
#: Maximum subscriptions of one access token, so that no token uses up the room of others.
SUBSCRIPTIONS_PER_OWNER: Final = 100
#: Maximum streams whose subscriptions are cached: the same few get most appends.
_REMEMBERED: Final = 10_000
#: Seconds between checks of whether storage was reopened, because appends that reopening settles are
#: not announced.
_LOOK_INTERVAL: Final = 5.0
#: Checks between two regular sweeps, because stream deletions are not announced either.
_SWEEP_EVERY: Final = 180

#: Returns what an access token currently allows, by its id. None stands for root.
GrantOf: TypeAlias = Callable[[str | None], Awaitable[Grant]]


class SubscriptionRegistry:
    """Finds subscriptions by id and by stream."""

    def __init__(
        self,
        store: StreamStore,
        basin: str,
        now: Callable[[], int],
        random_text: Callable[[], str],
        subscriptions_max: int,
        grant_of: GrantOf,
        step_clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.entries: dict[str, ActiveSubscription] = {}
        self._step_clock = step_clock
        self.streams = LinkedStreams(store, basin, self.count_links, self.time_slice)
        self._documents = store.documents
        self._basin = basin
        self._grant_of = grant_of
        self._subscriptions_max = subscriptions_max
        self._now = now
        self._random_text = random_text
        #: Streams whose subscriptions have not been notified yet, in order.
        self._fresh: OrderedDict[str, None] = OrderedDict()
        #: The stream of which subscriptions are currently being notified.
        self._spreading: str | None = None
        self._freshened = asyncio.Event()
        self._matching = asyncio.Lock()
        self._room_made = asyncio.Event()
        #: Why some subscriptions may be missing from `entries`.
        self._damaged: StoreDamagedError | None = None
        self._interested: dict[str, Sequence[ActiveSubscription]] = {}

    async def load(self) -> None:
        """Load all subscriptions from storage."""
        try:
            subscriptions = load_subscriptions(self._documents, self._basin, self.time_slice)
            async for id_, stored, state in subscriptions:
                grant = await self._grant_of(state.owner)
                self.add(ActiveSubscription(stored, self._basin, id_, state, grant))
        except StoreDamagedError as error:
            self._damaged = error

    def new_entry(self, id_: str, state: Subscription, grant: Grant) -> ActiveSubscription:
        """Return a subscription that is not in storage yet."""
        stored = StoredSubscription(self._documents, self._basin, id_, self.time_slice)
        return ActiveSubscription(stored, self._basin, id_, state, grant)

    def find(self, id_: str) -> ActiveSubscription | None:
        """Return the subscription, or None. Raises StoreDamagedError if it may be unreadable."""
        entry = self.entries.get(id_)
        if entry is None and self._damaged is not None:
            raise self._damaged
        return entry

    def get(self, id_: str) -> ActiveSubscription:
        entry = self.find(id_)
        if entry is None:
            raise SubscriptionNotFoundError(id_)
        return entry

    def add(self, entry: ActiveSubscription) -> None:
        self.entries[entry.id] = entry
        self.forget_interests()

    def drop(self, entry: ActiveSubscription) -> None:
        if self.entries.get(entry.id) is entry:
            del self.entries[entry.id]
        self.forget_interests()

    def forget_interests(self) -> None:
        """Drop the cache of subscriptions by stream."""
        # A new dict, because results being computed go to the old one and are dropped with it.
        self._interested = {}

    def time_slice(self) -> TimeSlice:
        """Return a time slice for a loop over many streams or subscriptions that begins now."""
        return TimeSlice(self._step_clock)

    def require_room(self, owner: str | None) -> None:
        """Raise unless there is room for another subscription of this owner."""
        owned = [entry for entry in self.entries.values() if entry.state.owner == owner]
        if owner is not None and len(owned) >= SUBSCRIPTIONS_PER_OWNER:
            raise InvalidError(
                f"this access token has {len(owned)} subscriptions already, and can have "
                f"{SUBSCRIPTIONS_PER_OWNER}: delete those that are not needed"
            )
        if len(self.entries) >= self._subscriptions_max:
            raise InvalidError(
                f"there are {len(self.entries)} subscriptions already, and there can be "
                f"{self._subscriptions_max}: delete those that are not needed"
            )

    def count_links(self, owner: str | None = None) -> int:
        """Return the number of links of all subscriptions, or of one access token's."""
        entries = self.entries.values()
        return sum(
            len(entry.state.links) for entry in entries if owner in (None, entry.state.owner)
        )

    @asynccontextmanager
    async def changing(self, entry: ActiveSubscription) -> AsyncIterator[Draft]:
        """Yield a draft with current rights and streams.

        Writes it if the block ends without an error.
        """
        async with entry.alone():
            await self._look_up_rights(entry)
            await self._notice_fresh(entry)
            noticed, entry.noticed = entry.noticed, set()
            try:
                state = await self.streams.refresh(entry, noticed)
                draft = Draft(entry, state, self._now(), self._random_text, self.time_slice())
                yield draft
                if draft.state is not entry.state:
                    await entry.write(draft.state)
            except BaseException:
                entry.noticed |= noticed
                raise
            if len(entry.tails) > len(entry.state.links):
                entry.tails = {
                    path: entry.tails[path] for path in entry.state.links if path in entry.tails
                }
            if draft.token is not None and draft.state.wake is not None:
                entry.token = (draft.state.wake.id, draft.token)

    async def _notice_fresh(self, entry: ActiveSubscription) -> None:
        """Make the entry notice every append acknowledged before this call."""
        # One entry at a time, because the slices of many would add up.
        async with self._matching:
            time_slice = self.time_slice()
            spreading = () if self._spreading is None else (self._spreading,)
            for stream in (*spreading, *self._fresh):
                if entry.wants(stream):
                    entry.noticed.add(stream)
                await time_slice.step()

    async def _look_up_rights(self, entry: ActiveSubscription) -> None:
        """Look up what the owner's token allows now, because it may have changed or become invalid."""
        grant = await self._grant_of(entry.state.owner)
        if grant != entry.grant:
            entry.grant = grant
            self.forget_interests()
            self.sweep_soon()

    def notice(self, stream: str) -> None:
        """Record an append to `stream`. Cheap, and safe to call during a commit."""
        if self.entries:
            self._fresh[stream] = None
            self._freshened.set()

    async def spread_notices(self) -> None:
        """Notify subscriptions of appends until cancelled."""
        while True:
            await self._freshened.wait()
            self._freshened.clear()
            time_slice = self.time_slice()
            while self._fresh:
                self._spreading, _ = self._fresh.popitem(last=False)
                for entry in await self._interested_in(self._spreading, time_slice):
                    entry.notice(self._spreading)
                self._spreading = None
                await time_slice.step()

    async def _interested_in(
        self, stream: str, time_slice: TimeSlice
    ) -> Sequence[ActiveSubscription]:
        if len(self._interested) >= _REMEMBERED:
            self.forget_interests()
        by_stream = self._interested
        if stream not in by_stream:
            interested: list[ActiveSubscription] = []
            for entry in tuple(self.entries.values()):
                if entry.wants(stream):
                    interested.append(entry)
                await time_slice.step()
            by_stream[stream] = interested
        return by_stream[stream]

    async def sweep_when_needed(self) -> None:
        """Sweep all streams after storage was opened, and then regularly, until cancelled."""
        swept, looks = None, 0
        while True:
            mounted = self._documents.supervisor.current
            looks += 1
            try:
                if mounted is not None and (mounted is not swept or looks >= _SWEEP_EVERY):
                    await self._sweep()
                    swept, looks = mounted, 0
                elif self._room_made.is_set():
                    await self._find_unlinked()
            except StreamfoldError as error:
                logger.warning("subscriptions cannot read their streams: %s", error)
                swept = None
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_INTERVAL):
                    await self._room_made.wait()

    def sweep_soon(self) -> None:
        """Request a sweep, because room or rights may now allow further links."""
        self._room_made.set()

    async def _sweep(self) -> None:
        """Make every subscription check its streams, including those that it should link."""
        time_slice = self.time_slice()
        for entry in tuple(self.entries.values()):
            entry.notice(*entry.state.links)
            await time_slice.step()
        await self._find_unlinked()

    async def _find_unlinked(self) -> None:
        self._room_made.clear()
        for entry in self.entries.values():
            entry.full = False
        if not any(entry.pattern for entry in self.entries.values()):
            return
        time_slice = self.time_slice()
        async for names in self.streams.pages():
            for name in names:
                for entry in tuple(self.entries.values()):
                    unknown = name not in entry.state.links and entry.wants(name)
                    if unknown and len(entry.noticed) <= 2 * LINKS_MAX:
                        entry.notice(name)
                    await time_slice.step()
