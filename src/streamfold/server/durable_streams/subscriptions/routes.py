"""Serves the calls below `__ds`: subscriptions, and the public keys of their webhooks."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from time import perf_counter
from typing import Final

import msgspec
from msgspec.structs import replace

from streamfold.errors import StoreClosingError, StreamfoldError, TooLargeError
from streamfold.model.access_tokens import Right
from streamfold.model.grants import NO_RIGHTS, ROOT, Grant
from streamfold.server.durable_streams.subscriptions import leases
from streamfold.server.durable_streams.subscriptions.claims import WakeClaims
from streamfold.server.durable_streams.subscriptions.creation import SubscriptionCreator
from streamfold.server.durable_streams.subscriptions.problems import (
    SubscriptionNotFoundError,
    answer_problem,
    wake_token_invalid,
)
from streamfold.server.durable_streams.subscriptions.registry import (
    SUBSCRIPTIONS_MAX,
    GrantOf,
    SubscriptionRegistry,
)
from streamfold.server.durable_streams.subscriptions.runner import Runner
from streamfold.server.durable_streams.subscriptions.subscription import ActiveSubscription
from streamfold.server.durable_streams.subscriptions.webhooks import (
    HostLookups,
    Keyring,
    Resolve,
    WebhookClient,
    resolve,
)
from streamfold.server.http.bodies import NO_STORE, answer_json
from streamfold.server.http.request import Request
from streamfold.server.http.router import PUBLIC, OtherRule, Route, Router
from streamfold.store.store import StreamStore, wall_clock
from streamfold.wire.durable_streams import subscriptions as bodies
from streamfold.wire.durable_streams.offsets import format_offset
from streamfold.wire.durable_streams.signing import ALGORITHM
from streamfold.wire.durable_streams.subscriptions import (
    LinkType,
    LinkView,
    SigningView,
    SubscriptionStatus,
    SubscriptionType,
    SubscriptionView,
    WebhookView,
    decode_name,
    parse_id,
    parse_path,
)


def show(
    entry: ActiveSubscription, kid: str | None, base_url: str, *, to_root: bool
) -> SubscriptionView:
    """Describe a subscription's durable state without secrets. `kid` is set if it has a webhook.

    Names are shown as the owner sees them. Root also sees the owner, and the prefix that the names
    lack.
    """
    state, config = entry.state, entry.state.config
    webhook = None
    if config.url is not None and kid is not None:
        signing = SigningView(ALGORITHM, kid, f"{base_url}/jwks.json")
        webhook = WebhookView(config.url, signing)
    failed = state.failures > 0 or entry.full or entry.grant == NO_RIGHTS
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


def _links(entry: ActiveSubscription) -> tuple[LinkView, ...]:
    return tuple(
        LinkView(
            entry.short_name(path),
            LinkType.EXPLICIT if link.explicit else LinkType.GLOB,
            format_offset(link.acked),
        )
        for path, link in sorted(entry.readable(entry.state.links).items())
    )


#: The path of these calls, below the server's own URL.
CONTROL_ROOT: Final = "/v1/stream/__ds"
#: Maximum bytes of a request's body: as much as the links of one subscription may take.
_BODY_MAX: Final = 1 << 20
_JWKS: Final = (
    (b"content-type", b"application/jwk-set+json"),
    (b"cache-control", b"public, max-age=300"),
)


def _random_text() -> str:
    return secrets.token_urlsafe(32)


class Subscriptions:
    """Serves everything below `__ds`, and wakes workers while running.

    `public_url` returns the scheme, host and port by which a client reached the server. Callbacks
    go there unless the server knows its `own_url`. `authorise` returns the caller's grant, and
    raises if it is unknown. `grant_of` returns the grant of a subscription's owner, for each
    notification. A caller with a wake's token needs no other right. Clocks, tokens and randomness
    are parameters for tests.
    """

    def __init__(
        self,
        store: StreamStore,
        basin: str,
        *,
        public_url: Callable[[Request], str],
        authorise: Callable[[Request], Awaitable[Grant]],
        grant_of: GrantOf,
        own_url: str | None = None,
        local_webhooks: bool = False,
        subscriptions_max: int = SUBSCRIPTIONS_MAX,
        now: Callable[[], int] = wall_clock,
        look_up: Resolve = resolve,
        webhooks: WebhookClient | None = None,
        random_text: Callable[[], str] = _random_text,
        chance: random.Random | None = None,
        step_clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._public_url = public_url
        self._authorise = authorise
        self._keyring = Keyring(store.documents)
        self.registry = registry = SubscriptionRegistry(
            store, basin, now, random_text, subscriptions_max, grant_of, step_clock
        )
        self._work = WakeClaims(registry)
        self._runner = Runner(
            store,
            basin,
            registry,
            self._keyring,
            webhooks or WebhookClient(),
            HostLookups(look_up),
            now,
            chance or random.Random(),  # noqa: S311 - spreads retries, keeps no secret
            local_webhooks=local_webhooks,
            own_url=None if own_url is None else own_url + CONTROL_ROOT,
        )
        self._creation = SubscriptionCreator(
            registry, basin, now, self._start, local_webhooks=local_webhooks
        )
        self._group: asyncio.TaskGroup | None = None
        self._basin = basin
        self._router = self._route()
        store.on_append(self._on_append)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load the stored subscriptions, and run them while the context lasts."""
        await self.registry.load()
        # Not a task group: it would wrap the exceptions of the body.
        started = asyncio.Event()
        keeper = asyncio.create_task(self._keep(started))
        await started.wait()
        try:
            yield
        finally:
            keeper.cancel()
            with suppress(asyncio.CancelledError):
                await keeper
            for entry in self.registry.entries.values():
                await entry.settled()

    async def _keep(self, started: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self.registry.spread_notices())
                group.create_task(self.registry.sweep_when_needed())
                for entry in self.registry.entries.values():
                    self._start(entry)
                started.set()
        finally:
            self._group = None

    def notice(self, stream: str) -> None:
        """Record an append to a stream that the store itself does not announce."""
        if self._group is not None:
            self.registry.notice(stream)

    def look_again(self) -> None:
        """Do everything that is due. For tests that set the clock."""
        for entry in self.registry.entries.values():
            entry.poked.set()

    async def handle(self, request: Request, path: str) -> None:
        """Respond to a request, given the still encoded rest of its path after `__ds`."""
        try:
            match = self._router.match(path)
            if match is None or "" in match.segments:
                raise SubscriptionNotFoundError(path.removeprefix("/subscriptions/"))
            handler = match.handlers.get(request.method)
            if handler is not None:
                if self._group is None:
                    raise StoreClosingError
                await handler(request, *match.segments)
            else:
                allow = ", ".join(sorted((*match.handlers, "OPTIONS"))).encode()
                await request.respond(405, ((b"allow", allow),))
        except StreamfoldError as error:
            await answer_problem(request, error)

    @property
    def routes(self) -> Sequence[Route]:
        """Every route, with the right or rule that it requires."""
        return [route._replace(path=CONTROL_ROOT + route.path) for route in self._router.routes]

    def _route(self) -> Router:
        router, owned = Router(), partial(partial, self._authorised)
        one, streams = "/subscriptions/{}", "/subscriptions/{}/streams"
        router.add("GET", "/jwks.json", PUBLIC, self._jwks)
        router.add("GET", one, OtherRule.OWNER, owned(self._get))
        router.add("PUT", one, OtherRule.OWNER, owned(self._put))
        router.add("DELETE", one, OtherRule.OWNER, owned(self._delete))
        router.add("POST", streams, OtherRule.OWNER, owned(self._link))
        router.add("DELETE", f"{streams}/{{...}}", OtherRule.OWNER, owned(self._unlink))
        router.add("POST", f"{one}/claim", OtherRule.OWNER, owned(self._claim))
        ack, callback = SubscriptionType.PULL_WAKE, SubscriptionType.WEBHOOK
        router.add("POST", f"{one}/ack", OtherRule.WAKE_TOKEN, partial(self._ack, ack))
        router.add("POST", f"{one}/callback", OtherRule.WAKE_TOKEN, partial(self._ack, callback))
        router.add("POST", f"{one}/release", OtherRule.WAKE_TOKEN, self._release)
        return router

    async def _authorised(
        self, handler: Callable[..., Awaitable[None]], request: Request, segment: str, *rest: str
    ) -> None:
        """Call `handler` with the caller's grant and the subscription's id."""
        caller = await self._authorise(request)
        await handler(parse_id(segment), *rest, request, caller)

    def _owned(self, id_: str, caller: Grant) -> ActiveSubscription:
        """Return the subscription if it belongs to the caller.

        Otherwise, the error is the same whether it belongs to another owner or does not exist.
        """
        entry = self.registry.get(id_)
        if not entry.belongs_to(caller):
            raise SubscriptionNotFoundError(id_)
        return entry

    def _proven(self, id_: str, request: Request) -> tuple[ActiveSubscription, str]:
        """Return the subscription, and the wake token that the request presents.

        The error is the same whether or not the subscription exists, because only a caller with one
        of its tokens may learn that.
        """
        token = _bearer(request)
        entry = self.registry.find(id_)
        if entry is None or not leases.is_known(entry.state, token):
            raise wake_token_invalid()
        return entry, token

    async def _jwks(self, request: Request) -> None:
        await request.respond(200, _JWKS, (await self._keyring.key()).jwks)

    async def _put(self, id_: str, request: Request, caller: Grant) -> None:
        if not caller.allows_somewhere(Right.READ, self._basin):
            caller.require(Right.READ, self._basin)
        asked = bodies.decode_subscription(await _body(request))
        base_url = self._base_url(request)
        entry, created = await self._creation.create(id_, asked, base_url, caller)
        await self._show(request, entry, caller, 201 if created else 200)

    async def _get(self, id_: str, request: Request, caller: Grant) -> None:
        entry = self._owned(id_, caller)
        async with self.registry.changing(entry):
            pass  # the response shows streams that were just linked, so they must be durable
        await self._show(request, entry, caller, 200)

    async def _delete(self, id_: str, request: Request, caller: Grant) -> None:
        await self._creation.delete(id_, caller)
        await request.respond(204, (NO_STORE,))

    async def _link(self, id_: str, request: Request, caller: Grant) -> None:
        entry = self._owned(id_, caller)
        names = bodies.decode_streams(await _body(request))
        paths, time_slice = list[str](), self.registry.time_slice()
        for name in names:
            path = entry.full_name(parse_path(name))
            if path != entry.state.config.wake_stream:
                paths.append(path)
            await time_slice.step()
        async with self.registry.changing(entry) as draft:
            for path in paths:
                entry.grant.require(Right.READ, self._basin, path)
                await time_slice.step()
            draft.state = await self.registry.streams.link_explicit(draft.state, paths, entry.tails)
        self.registry.forget_interests()
        entry.notice(*paths)  # earlier appends to them were not noticed
        await request.respond(204, (NO_STORE,))

    async def _unlink(self, id_: str, path: str, request: Request, caller: Grant) -> None:
        entry = self._owned(id_, caller)
        name = parse_path(decode_name(path))
        stream = entry.full_name(name)
        async with self.registry.changing(entry) as draft:
            link = draft.state.links.get(stream)
            if link is not None and link.explicit:
                links = dict(draft.state.links)
                if entry.pattern is not None and entry.pattern.matches(name):
                    links[stream] = replace(link, explicit=False)
                else:
                    del links[stream]
                draft.state = replace(draft.state, links=links)
        self.registry.forget_interests()
        if entry.full:
            self.registry.sweep_soon()
        await request.respond(204, (NO_STORE,))

    async def _claim(self, id_: str, request: Request, caller: Grant) -> None:
        entry = self._owned(id_, caller)
        said = bodies.decode_claim(await _body(request))
        await answer_json(request, await self._work.claim(entry, said.worker))

    async def _ack(self, kind: SubscriptionType, request: Request, segment: str) -> None:
        entry, token = self._proven(parse_id(segment), request)
        said = bodies.decode_ack(await _body(request))
        await answer_json(request, await self._work.acknowledge(entry, kind, token, said))

    async def _release(self, request: Request, segment: str) -> None:
        entry, token = self._proven(parse_id(segment), request)
        said = bodies.decode_release(await _body(request))
        await self._work.release(entry, token, said)
        await request.respond(204, (NO_STORE,))

    async def _show(
        self, request: Request, entry: ActiveSubscription, caller: Grant, status: int
    ) -> None:
        kid = (await self._keyring.key()).kid if entry.state.config.url is not None else None
        view = partial(show, entry, kid, self._base_url(request), to_root=caller is ROOT)
        # A view of ten thousand links takes long. The state that it shows is immutable.
        body = await request.offload(lambda: msgspec.json.encode(view()))
        await answer_json(request, msgspec.Raw(body), status)

    def _base_url(self, request: Request) -> str:
        return self._public_url(request) + CONTROL_ROOT

    def _start(self, entry: ActiveSubscription) -> None:
        if self._group is not None:
            entry.task = self._group.create_task(self._runner.run(entry))

    def _on_append(self, basin: str, stream: str, first: int, following: int) -> None:
        if basin == self._basin:
            self.notice(stream)


async def _body(request: Request) -> bytes:
    body = await request.body(_BODY_MAX)
    if body is None:
        raise TooLargeError(f"the body has more than {_BODY_MAX} bytes: send less at once")
    return body


def _bearer(request: Request) -> str:
    scheme, _, token = (request.header("authorization") or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise wake_token_invalid("send the wake's token as 'authorization: Bearer <token>'")
    return token.strip()
