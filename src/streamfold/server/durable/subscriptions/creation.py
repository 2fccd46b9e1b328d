"""Creates subscriptions; the same request again confirms what is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Final

from msgspec.structs import replace

from streamfold.errors import InvalidError
from streamfold.server.durable.subscriptions.book import Book
from streamfold.server.durable.subscriptions.entry import Entry
from streamfold.server.durable.subscriptions.paths import parse_path
from streamfold.server.durable.subscriptions.refusals import (
    SubscriptionExistsError,
    SubscriptionNotFoundError,
)
from streamfold.server.durable.subscriptions.state import Config, Subscription
from streamfold.server.durable.subscriptions.targets import Resolve, find_addresses, parse_target
from streamfold.store.locks import NamedLocks
from streamfold.wire.durable.patterns import Pattern
from streamfold.wire.durable.subscription_bodies import SubscriptionRequest, SubscriptionType

#: Bytes of UTF-8.
DESCRIPTION_MAX: Final = 4096


class Creation:
    """One creation or deletion of an id at a time."""

    def __init__(
        self,
        book: Book,
        look_up: Resolve,
        now: Callable[[], int],
        start: Callable[[Entry], None],
        *,
        local_webhooks: bool,
    ) -> None:
        self._book = book
        self._look_up = look_up
        self._now = now
        self._start = start
        self._local = local_webhooks
        self._locks = NamedLocks()

    async def create(
        self, id_: str, asked: SubscriptionRequest, base_url: str
    ) -> tuple[Entry, bool]:
        """The subscription, durable, and whether this created it."""
        config, streams = configure(asked), named_streams(asked)
        async with self._locks.hold(id_):
            entry = self._book.entries.get(id_)
            if entry is not None and await _confirm(entry, config, base_url):
                return entry, False
            self._book.require_room()
            await self._check_target(config)
            return await self._insert(id_, config, streams, base_url), True

    async def delete(self, id_: str) -> None:
        """See to it that there is no such subscription."""
        async with self._locks.hold(id_):
            entry = self._book.entries.get(id_)
            if entry is None:
                return
            with suppress(SubscriptionNotFoundError):
                async with entry.alone():
                    await entry.erase()
            self._book.drop(entry)
            if entry.task is not None:
                entry.task.cancel()

    async def _check_target(self, config: Config) -> None:
        if config.url is None:
            return
        target = parse_target(config.url, local=self._local)
        try:
            await find_addresses(target, self._look_up)
        except OSError:
            # A name that nobody knows may become known; it is judged again whenever it is used.
            return

    async def _insert(
        self, id_: str, config: Config, streams: Sequence[str], base_url: str
    ) -> Entry:
        state = Subscription(config, self._now(), base_url, {})
        entry = self._book.entry(id_, state)
        async with entry.alone():
            # Known from here on, so that what is appended while streams are listed is noticed.
            self._book.add(entry)
            try:
                state = await self._link(entry, state, streams)
            except BaseException:
                entry.gone = True
                self._book.drop(entry)
                raise
            try:
                await entry.write(state)
            finally:
                # Even if nobody can tell whether it is there: the runner will look.
                self._book.forget_interests()
                entry.notice(*state.links)
                self._start(entry)
        return entry

    async def _link(
        self, entry: Entry, state: Subscription, streams: Sequence[str]
    ) -> Subscription:
        linked = self._book.streams
        state = await linked.link_explicit(state, streams, entry.tails)
        if entry.pattern is not None:
            state = await linked.link_matching(state, entry.pattern, entry.tails)
        return state


async def _confirm(entry: Entry, config: Config, base_url: str) -> bool:
    """Whether it is there, as is asked for; a creation that failed may have left nothing."""
    try:
        async with entry.alone():
            if entry.state.config != config:
                raise SubscriptionExistsError(entry.id)
            if entry.state.base_url != base_url:
                # The server is reached by another name now: callbacks must be, too.
                await entry.write(replace(entry.state, base_url=base_url))
    except SubscriptionNotFoundError:
        return False
    return True


def configure(asked: SubscriptionRequest) -> Config:
    """What is asked for, in one form; what its type does not need is left out."""
    if len((asked.description or "").encode()) > DESCRIPTION_MAX:
        raise InvalidError(f"description is too long: at most {DESCRIPTION_MAX} bytes of UTF-8")
    is_webhook = asked.type is SubscriptionType.WEBHOOK
    wake_stream = None if is_webhook else parse_path(asked.wake_stream or "")
    return Config(
        type=asked.type,
        pattern=Pattern(asked.pattern.strip("/")).text if asked.pattern is not None else None,
        streams=sha256("\0".join(named_streams(asked)).encode()).digest(),
        url=asked.webhook.url if is_webhook and asked.webhook else None,
        wake_stream=wake_stream,
        lease_ttl_ms=asked.lease_ttl_ms,
        description=asked.description,
    )


def named_streams(asked: SubscriptionRequest) -> list[str]:
    """The streams to link, each once, in order; a wake stream cannot be its own subscription's."""
    own = asked.wake_stream.strip("/") if asked.wake_stream is not None else None
    return sorted({parse_path(stream) for stream in asked.streams} - {own})
