"""Links a subscription's streams, and reads their tails.

A stream that matches the pattern is linked when it is first noticed. Creating a subscription links
all existing streams at their tails, so a stream without a link is younger than the subscription and
is linked at its beginning. So anything missed, even because of a crash, is caught up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from streamfold.errors import (
    BasinNotFoundError,
    DataCorruptError,
    InvalidError,
    StreamDeletingError,
    StreamForkedError,
    StreamNotFoundError,
)
from streamfold.model.resources import StreamStatus
from streamfold.server.durable_streams.subscriptions import leases
from streamfold.server.durable_streams.subscriptions.fairness import TimeSlice
from streamfold.server.durable_streams.subscriptions.leases import (
    LINKS_BYTES_MAX,
    LINKS_MAX,
    LINKS_PER_OWNER,
    LINKS_TOTAL_MAX,
    Link,
    Subscription,
)
from streamfold.server.durable_streams.subscriptions.subscription import ActiveSubscription
from streamfold.store.store import StreamStore
from streamfold.wire.durable_streams.subscriptions import Pattern

logger = logging.getLogger(__name__)

#: Streams read together. After a start, all must be read from storage.
_TOGETHER: Final = 32


class LinkedStreams:
    """Reads the status of streams and updates links accordingly."""

    def __init__(
        self,
        store: StreamStore,
        basin: str,
        count_links: Callable[..., int],
        time_slice: Callable[[], TimeSlice],
    ) -> None:
        self._store = store
        self._basin = basin
        #: Counts the links of all subscriptions, or of one owner's.
        self._count_links = count_links
        self._time_slice = time_slice

    async def refresh(self, entry: ActiveSubscription, streams: Collection[str]) -> Subscription:
        """Return the entry's state with links updated to the streams' current status.

        Records the tails.

        Skips streams that the owner may not read, because the owner may get the right back. If a
        stream was deleted or replaced, the wake ends, because its holder's acks would refer to
        records that no longer exist.
        """
        changed, fresh, gone = dict[str, Link | None](), dict[str, Link | None](), False
        async for path, status in self._look_at(tuple(filter(entry.may_read, streams))):
            former = entry.state.links.get(path)
            link = _relink(former, status)
            if status is not None:
                entry.tails[path] = status.tail
            else:
                entry.tails.pop(path, None)
            if former is None and link is not None and entry.wants(path):
                fresh[path] = link
            elif former is not None and link != former:
                changed[path] = link
                gone = gone or former.stream_id is not None
        state = _with_links(entry.state, changed)
        if gone and state.wake is not None:
            state = leases.end(state)
        return self._grow(entry, state, fresh) if fresh else state

    def _grow(
        self, entry: ActiveSubscription, state: Subscription, fresh: Mapping[str, Link | None]
    ) -> Subscription:
        """Return the state with new links, if there is room for them."""
        grown = _with_links(state, fresh)
        was_full, entry.full = entry.full, not self._has_room(grown, entry.state)
        if not entry.full:
            return grown
        # The next sweep finds those streams again and links them if there is room then.
        if not was_full:
            logger.warning("subscription %r has no room for more streams", entry.id)
        return state

    async def link_explicit(
        self, state: Subscription, paths: Sequence[str], tails: dict[str, int]
    ) -> Subscription:
        """Return the state with further streams linked at their tails, existing or not."""
        links: dict[str, Link | None] = {}
        async for path, status in self._look_at(tuple(dict.fromkeys(paths))):
            link = state.links.get(path)
            if link is not None:
                links[path] = replace(link, explicit=True)
                continue
            tails[path] = status.tail if status else 0
            links[path] = Link(tails[path], True, status.id if status else None)
        return self._require_room(_with_links(state, links), state)

    async def link_matching(
        self, entry: ActiveSubscription, state: Subscription, pattern: Pattern
    ) -> Subscription:
        """Return the state with all existing matching streams linked at their tails."""
        links: dict[str, Link | None] = {}
        time_slice = self._time_slice()
        async for names in self.pages(state.prefix + literal_prefix(pattern.text)):
            matching: list[str] = []
            for name in names:
                if name not in state.links and entry.wants(name):
                    matching.append(name)
                await time_slice.step()
            async for path, status in self._look_at(matching):
                if status is not None:
                    entry.tails[path] = status.tail
                    links[path] = Link(status.tail, False, status.id)
            self._require_room(_with_links(state, links), state)
        return _with_links(state, links)

    async def pages(self, prefix: str = "") -> AsyncIterator[Sequence[str]]:
        """Yield the names of all streams that start with `prefix`, page by page."""
        after, more = "", True
        while more:
            try:
                page = await self._store.list_streams(self._basin, prefix=prefix, start_after=after)
            except BasinNotFoundError:
                return  # it is created together with its first stream
            more = page.has_more
            names = [info.name for info in page.items if info.deleted_at is None]
            if page.items:
                after = page.items[-1].name
            yield names

    def _has_room(self, state: Subscription, former: Subscription) -> bool:
        """Return whether the links are within the subscription's, owner's and server's limits."""
        count, more = len(state.links), len(state.links) - len(former.links)
        if count > LINKS_MAX or self._count_links() + more > LINKS_TOTAL_MAX:
            return False
        owned = 0 if state.owner is None else self._count_links(state.owner) + more
        size = len(msgspec.msgpack.encode(state.links))
        return owned <= LINKS_PER_OWNER and size <= LINKS_BYTES_MAX

    def _require_room(self, state: Subscription, former: Subscription) -> Subscription:
        if len(state.links) > len(former.links) and not self._has_room(state, former):
            raise InvalidError(
                f"the subscription would have {len(state.links)} streams or more: it can have "
                f"{LINKS_MAX} in {LINKS_BYTES_MAX} bytes, all of an access token {LINKS_PER_OWNER}, "
                f"all together {LINKS_TOTAL_MAX}; use a narrower pattern, or delete subscriptions that "
                "are not needed"
            )
        return state

    async def _look_at(
        self, paths: Sequence[str]
    ) -> AsyncIterator[tuple[str, StreamStatus | None]]:
        """Yield each stream's status, or None if it does not exist. Skips unreadable streams."""
        for at in range(0, len(paths), _TOGETHER):
            some = paths[at : at + _TOGETHER]
            outcomes = await asyncio.gather(*map(self._status, some))
            for path, (readable, status) in zip(some, outcomes, strict=True):
                if readable:
                    yield path, status

    async def _status(self, path: str) -> tuple[bool, StreamStatus | None]:
        try:
            return True, await self._store.stream(self._basin, path).status()
        except (StreamNotFoundError, StreamForkedError, StreamDeletingError, BasinNotFoundError):
            return True, None
        except DataCorruptError as error:
            # The other streams of the subscription are unaffected.
            logger.error("stream %r of a subscription cannot be read: %s", path, error)
            return False, None


def literal_prefix(pattern: str) -> str:
    """Return the prefix of every path that matches."""
    before, star, _ = pattern.partition("*")
    # `**` may be empty: a/** matches a.
    return before.rstrip("/") if star else before


def _relink(link: Link | None, status: StreamStatus | None) -> Link | None:
    """Return the link to a stream with this status."""
    if status is None:
        # Explicit links stay, for the next stream with that name.
        return Link(0, True, None) if link is not None and link.explicit else None
    if link is not None and link.stream_id == status.id:
        return link
    # The records that a fork inherits were in another stream before.
    origin = status.traits.origin
    start = int(origin.seq_num) if origin is not None else 0
    return Link(start, link is not None and link.explicit, status.id)


def _with_links(state: Subscription, changes: Mapping[str, Link | None]) -> Subscription:
    """Return the state with some links changed, or removed where the value is None."""
    if not changes:
        return state
    links = {**state.links, **changes}
    return replace(state, links={path: link for path, link in links.items() if link is not None})
