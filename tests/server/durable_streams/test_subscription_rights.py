"""Subscriptions show and do no more than the access token of their owner allows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import msgspec
import pytest
from s2_sdk import S2, AccessTokenScope, Operation, PrefixMatch

from streamfold.model.access_tokens import Secret
from streamfold.server.durable_streams.subscriptions.leases import Subscription
from streamfold.server.durable_streams.subscriptions.registry import SUBSCRIPTIONS_PER_OWNER
from streamfold.server.main import Server, running_server
from tests.sdk import sdk_client
from tests.server.conftest import ROOT, configuration
from tests.server.durable_streams.conftest import JSON, browsing, token
from tests.server.durable_streams.subscribing import Receiver, read_subscription
from tests.server.durable_streams.test_access import bearer
from tests.server.s2.test_session_tokens import Clock, clock

__all__ = ["clock"]

CONTROL = "/v1/stream/__ds/subscriptions"
KIND = "ds-subscription/durable-streams"
READ_APPEND = (Operation.READ, Operation.APPEND)


def scope(prefix: str, *ops: Operation) -> AccessTokenScope:
    return AccessTokenScope(
        basins=PrefixMatch(""), streams=PrefixMatch(prefix), ops=list(ops or READ_APPEND)
    )


@dataclass
class Guarded:
    """A server with access tokens, root's client of it, and clients of others."""

    server: Server
    account: S2
    root: httpx.AsyncClient

    async def issue(
        self, name: str, prefix: str, *ops: Operation, **options: Any
    ) -> dict[str, str]:
        secret = await self.account.issue_access_token(name, scope=scope(prefix, *ops), **options)
        return bearer(secret)

    async def create(self, stream: str, *messages: object) -> None:
        created = await self.root.put(f"/v1/stream/{stream}", headers=JSON)
        assert created.status_code == 201, created.text
        for message in messages:
            await self.append(stream, message)

    async def append(self, stream: str, message: object) -> None:
        sent = await self.root.post(
            f"/v1/stream/{stream}", headers=JSON, content=json.dumps([message])
        )
        assert sent.status_code == 204, sent.text

    async def content(self, stream: str) -> Any:
        return (await self.root.get(f"/v1/stream/{stream}")).json()

    async def first_wake(self, stream: str) -> dict[str, Any]:
        """The first wake in a stream, as soon as it is appended."""
        path = f"/v1/stream/{stream}?offset=-1&live=long-poll"
        async with asyncio.timeout(60):
            while (found := await self.root.get(path)).status_code != 200:
                pass
        first: dict[str, Any] = found.json()[0]
        return first

    async def put(self, who: dict[str, str], id_: str, **body: Any) -> httpx.Response:
        return await self.root.put(f"{CONTROL}/{id_}", headers=who, json=body)

    async def names(self, who: dict[str, str], id_: str) -> list[str]:
        """The streams that a subscription shows."""
        shown = await self.root.get(f"{CONTROL}/{id_}", headers=who)
        assert shown.status_code == 200, shown.text
        return [link["path"] for link in shown.json()["streams"]]


@pytest.fixture
async def guarded() -> AsyncIterator[Guarded]:
    settings = configuration(root_token=Secret(ROOT), long_poll=0.5, local_webhooks=True)
    async with running_server(settings) as server, browsing(server, headers=bearer(ROOT)) as root:
        endpoint = f"http://127.0.0.1:{server.port}"
        async with sdk_client(endpoint, ROOT) as account:
            yield Guarded(server, account, root)


def pull(wake_stream: str = "mine/wakes", **changes: Any) -> dict[str, Any]:
    return {"type": "pull-wake", "pattern": "**", "wake_stream": wake_stream, **changes}


def hook(receiver: Receiver, **changes: Any) -> dict[str, Any]:
    return {"type": "webhook", "pattern": "**", "webhook": {"url": receiver.url}, **changes}


async def test_a_pattern_finds_only_streams_that_the_token_may_read(guarded: Guarded) -> None:
    await guarded.create("mine/a")
    await guarded.create("mine/wakes")
    await guarded.create("victim/orders", "before")
    me = await guarded.issue("me", "mine/")
    assert (await guarded.put(me, "s", **pull())).status_code == 201
    await guarded.append("victim/orders", "after")
    await guarded.create("victim/new", "more")
    await guarded.append("mine/a", 1)
    assert (await guarded.first_wake("mine/wakes"))["stream"] == "mine/a"
    assert await guarded.names(me, "s") == ["mine/a"]
    claimed = await guarded.root.post(f"{CONTROL}/s/claim", headers=me, json={"worker": "w"})
    assert [stream["path"] for stream in claimed.json()["streams"]] == ["mine/a"]


async def test_a_webhook_is_notified_only_of_streams_that_the_token_may_read(
    guarded: Guarded, receiver: Receiver
) -> None:
    await guarded.create("victim/orders")
    me = await guarded.issue("me", "mine/", Operation.READ)
    assert (await guarded.put(me, "s", **hook(receiver))).status_code == 201
    await guarded.append("victim/orders", 1)
    await guarded.create("mine/a", 1)
    reported = (await receiver.hook()).body
    assert [stream["path"] for stream in reported["streams"]] == ["mine/a"]


@pytest.mark.parametrize(
    "body",
    [
        pull("victim/orders"),
        pull(streams=["mine/a", "victim/orders"]),
        pull(pattern="victim/**"),
        pull(pattern="victim/orders"),
        pull(pattern=None, streams=["victim/orders"]),
    ],
)
async def test_what_the_token_does_not_allow_cannot_be_subscribed_to(
    guarded: Guarded, body: dict[str, Any]
) -> None:
    await guarded.create("victim/orders")
    me = await guarded.issue("me", "mine/")
    refused = await guarded.put(me, "s", **body)
    assert (refused.status_code, refused.json()["code"]) == (403, "permission_denied")
    assert (await guarded.root.get(f"{CONTROL}/s")).status_code == 404
    assert await guarded.content("victim/orders") == []


async def test_a_subscription_needs_read_and_its_wake_stream_append(guarded: Guarded) -> None:
    writer = await guarded.issue("writer", "mine/", Operation.APPEND)
    reader = await guarded.issue("reader", "mine/", Operation.READ)
    both = await guarded.issue("both", "mine/")
    assert (await guarded.put(writer, "s", **pull())).status_code == 403
    assert (await guarded.put(reader, "s", **pull())).status_code == 403
    assert (await guarded.put(both, "s", **pull())).status_code == 201


async def test_a_stream_is_linked_only_by_who_may_read_it(guarded: Guarded) -> None:
    me = await guarded.issue("me", "mine/")
    await guarded.put(me, "s", **pull())
    for caller in (me, bearer(ROOT)):
        refused = await guarded.root.post(
            f"{CONTROL}/s/streams", headers=caller, json={"streams": ["victim/orders"]}
        )
        assert refused.status_code == 403
    linked = await guarded.root.post(
        f"{CONTROL}/s/streams", headers=me, json={"streams": ["mine/later"]}
    )
    assert linked.status_code == 204
    assert await guarded.names(me, "s") == ["mine/later"]


#: Requests for a subscription that belong to its owner alone: method, path, body.
OWNERS_CALLS: tuple[tuple[str, str, Any], ...] = (
    ("GET", "", None),
    ("DELETE", "", None),
    ("POST", "/streams", {"streams": ["mine/b"]}),
    ("DELETE", "/streams/mine%2Fa", None),
    ("POST", "/claim", {"worker": "w"}),
)


async def test_others_cannot_tell_whether_a_subscription_exists(guarded: Guarded) -> None:
    me = await guarded.issue("me", "mine/")
    other = await guarded.issue("other", "")
    await guarded.put(me, "taken", **pull())
    for method, path, body in OWNERS_CALLS:
        answers = set()
        for id_ in ("taken", "missing"):
            answer = await guarded.root.request(
                method, f"{CONTROL}/{id_}{path}", headers=other, json=body
            )
            answers.add((answer.status_code, answer.text.replace(id_, "…")))
        assert len(answers) == 1, (method, path, answers)
    assert (await guarded.root.get(f"{CONTROL}/taken", headers=me)).status_code == 200


async def test_only_its_owner_and_root_may_see_and_change_a_subscription(guarded: Guarded) -> None:
    await guarded.create("mine/a")
    me = await guarded.issue("me", "mine/")
    other = await guarded.issue("other", "")
    await guarded.put(me, "s", **pull(streams=["mine/a"]))
    for method, path, body in OWNERS_CALLS:
        refused = await guarded.root.request(method, f"{CONTROL}/s{path}", headers=other, json=body)
        assert refused.status_code == (204 if (method, path) == ("DELETE", "") else 404), path
    refused = await guarded.put(other, "s", **pull(streams=["mine/a"]))
    assert (refused.status_code, refused.json()["code"]) == (403, "permission_denied")
    assert await guarded.names(me, "s") == ["mine/a"]
    shown = (await guarded.root.get(f"{CONTROL}/s")).json()
    assert shown["owner"] == "me"
    assert "owner" not in (await guarded.root.get(f"{CONTROL}/s", headers=me)).json()
    assert (await guarded.root.delete(f"{CONTROL}/s")).status_code == 204
    assert (await guarded.put(other, "s", **pull())).status_code == 201


async def test_tokens_cannot_touch_what_root_subscribed_to(guarded: Guarded) -> None:
    assert (await guarded.put(bearer(ROOT), "s", **pull())).status_code == 201
    other = await guarded.issue("other", "")
    for method, path, body in OWNERS_CALLS:
        await guarded.root.request(method, f"{CONTROL}/s{path}", headers=other, json=body)
    assert (await guarded.put(other, "s", **pull())).status_code == 403
    assert await guarded.names(bearer(ROOT), "s") == []


async def test_names_are_relative_to_the_prefix_of_an_auto_prefixed_token(
    guarded: Guarded, receiver: Receiver
) -> None:
    await guarded.create("tenant-1/orders")
    await guarded.create("tenant-1/wakes")
    await guarded.create("orders", "not the tenant's")
    me = await guarded.issue("me", "tenant-1/", auto_prefix_streams=True)
    made = await guarded.put(me, "pull", **pull("wakes", pattern="*", streams=["named"]))
    assert made.status_code == 201, made.text
    assert made.json()["wake_stream"] == "wakes"
    assert sorted(await guarded.names(me, "pull")) == ["named", "orders"]
    assert (await guarded.put(me, "hook", **hook(receiver, pattern="orders"))).status_code == 201
    await guarded.append("orders", "still not")
    await guarded.append("tenant-1/orders", 1)

    assert (await guarded.first_wake("tenant-1/wakes"))["stream"] == "orders"
    claimed = await guarded.root.post(f"{CONTROL}/pull/claim", headers=me, json={"worker": "w"})
    reported = {stream["path"]: stream["tail_offset"] for stream in claimed.json()["streams"]}
    assert reported == {"named": token(0), "orders": token(1)}
    proof = {name: claimed.json()[name] for name in ("wake_id", "generation")}
    acked = await guarded.root.post(
        f"{CONTROL}/pull/ack",
        headers=bearer(claimed.json()["token"]),
        json=proof | {"acks": [{"stream": "orders", "offset": token(1)}], "done": True},
    )
    assert acked.json() == {"ok": True, "next_wake": False}

    told_hook = (await receiver.hook()).body
    assert [stream["path"] for stream in told_hook["streams"]] == ["orders"]
    shown = (await guarded.root.get(f"{CONTROL}/pull")).json()
    assert (shown["owner"], shown["stream_prefix"]) == ("me", "tenant-1/")
    assert "stream_prefix" not in made.json()


async def test_a_prefix_with_stars_in_it_is_not_a_pattern(guarded: Guarded) -> None:
    await guarded.create("a*/mine")
    await guarded.create("ab/other")
    me = await guarded.issue("me", "a*", auto_prefix_streams=True)
    assert (await guarded.put(me, "s", **pull("wakes", pattern="**"))).status_code == 201
    assert await guarded.names(me, "s") == ["/mine"]


async def revoke(guarded: Guarded, clock: Clock) -> None:
    await guarded.account.revoke_access_token("me")


async def expire(guarded: Guarded, clock: Clock) -> None:
    clock.ahead = timedelta(hours=2)


@pytest.mark.parametrize("end", [revoke, expire])
async def test_a_subscription_stops_when_its_token_is_revoked_or_expires(
    guarded: Guarded, receiver: Receiver, clock: Clock, end: Any
) -> None:
    for stream in ("mine/a", "mine/wakes", "theirs/a"):
        await guarded.create(stream)
    soon = datetime.now(UTC) + timedelta(hours=1)
    me = await guarded.issue("me", "mine/", expires_at=soon)
    await guarded.put(me, "pull", **pull(pattern="mine/a"))
    await guarded.put(me, "hook", **hook(receiver, pattern="mine/a"))
    await guarded.put(bearer(ROOT), "root", **hook(receiver, pattern="theirs/a"))
    await end(guarded, clock)
    await guarded.append("mine/a", "secret")
    # Both have looked at the append when they are shown.
    for id_ in ("pull", "hook"):
        shown = (await guarded.root.get(f"{CONTROL}/{id_}")).json()
        assert (shown["status"], shown["streams"]) == ("failed", [])
    assert (await guarded.root.get(f"{CONTROL}/pull", headers=me)).status_code == 401
    await guarded.append("theirs/a", "for root")
    assert (await receiver.hook()).body["subscription_id"] == "root"
    assert receiver.hooks.empty()
    assert await guarded.content("mine/wakes") == []


async def test_a_wake_cannot_be_acknowledged_after_the_token_was_revoked(guarded: Guarded) -> None:
    await guarded.create("mine/wakes")
    me = await guarded.issue("me", "mine/")
    await guarded.put(me, "s", **pull())
    await guarded.create("mine/a", 1)
    claimed = await guarded.root.post(f"{CONTROL}/s/claim", headers=me, json={"worker": "w"})
    await guarded.account.revoke_access_token("me")
    proof = {name: claimed.json()[name] for name in ("wake_id", "generation")}
    for action in ("ack", "release"):
        refused = await guarded.root.post(
            f"{CONTROL}/s/{action}", headers=bearer(claimed.json()["token"]), json=proof
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "TOKEN_INVALID")


async def test_a_token_of_the_same_id_takes_the_subscription_up_with_its_own_rights(
    guarded: Guarded, receiver: Receiver
) -> None:
    for stream in ("mine/a", "mine/b"):
        await guarded.create(stream)
    me = await guarded.issue("me", "mine/")
    await guarded.put(me, "s", **hook(receiver, pattern="mine/*"))
    assert await guarded.names(me, "s") == ["mine/a", "mine/b"]
    await guarded.account.revoke_access_token("me")
    narrower = await guarded.issue("me", "mine/b")
    await guarded.append("mine/a", 1)
    await guarded.append("mine/b", 1)
    reported = (await receiver.hook()).body
    assert [stream["path"] for stream in reported["streams"]] == ["mine/b"]
    assert await guarded.names(narrower, "s") == ["mine/b"]
    unread = {
        "wake_id": reported["wake_id"],
        "generation": reported["generation"],
        "acks": [{"stream": "mine/a", "offset": token(1)}],
    }
    refused = await guarded.root.post(
        f"{CONTROL}/s/callback", headers=bearer(reported["callback_token"]), json=unread
    )
    assert refused.json()["error"]["code"] == "INVALID_OFFSET"


async def test_wakes_are_not_written_once_the_token_may_not_append_there(guarded: Guarded) -> None:
    for stream in ("mine/a", "mine/wakes"):
        await guarded.create(stream)
    me = await guarded.issue("me", "mine/")
    await guarded.put(me, "s", **pull(pattern="mine/a"))
    await guarded.account.revoke_access_token("me")
    await guarded.issue("me", "mine/", Operation.READ)
    await guarded.append("mine/a", 1)
    async with asyncio.timeout(60):
        while (await stored(guarded, "s")).failures == 0:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.005)
    assert await guarded.content("mine/wakes") == []
    assert (await guarded.root.get(f"{CONTROL}/s")).json()["status"] == "failed"


async def stored(guarded: Guarded, id_: str) -> Subscription:
    subscription = await read_subscription(guarded.server.store, id_, "durable-streams")
    assert subscription is not None
    return subscription


async def test_ids_and_types_are_shown_only_to_holders_of_a_wake_token(
    guarded: Guarded, receiver: Receiver
) -> None:
    await guarded.put(bearer(ROOT), "pull", **pull())
    await guarded.put(bearer(ROOT), "hook", **hook(receiver))
    me = await guarded.issue("me", "mine/")
    bodies = (b'{"wake_id":"w","generation":1}', b"{", b"")
    for action in ("ack", "callback", "release"):
        for headers in ({}, bearer("guess"), bearer(ROOT), me, {"authorization": "Basic eDp5"}):
            for body in bodies:
                seen = {await said(guarded, id_, action, headers, body) for id_ in IDS}
                assert len(seen) == 1, (action, headers, body)
                assert next(iter(seen))[0] == 401


IDS = ("pull", "hook", "missing")


async def said(
    guarded: Guarded, id_: str, action: str, headers: dict[str, str], body: bytes
) -> tuple[int, bytes]:
    async with browsing(guarded.server) as web:
        answered = await web.post(f"{CONTROL}/{id_}/{action}", headers=headers, content=body)
    return answered.status_code, answered.content


async def test_one_token_cannot_take_the_room_of_all_subscriptions(guarded: Guarded) -> None:
    me = await guarded.issue("me", "mine/")
    other = await guarded.issue("other", "mine/")
    for number in range(SUBSCRIPTIONS_PER_OWNER):
        assert (await guarded.put(me, f"s{number}", **pull())).status_code == 201
    refused = await guarded.put(me, "more", **pull())
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "INVALID_REQUEST")
    assert (await guarded.put(other, "more", **pull())).status_code == 201


@asynccontextmanager
async def opened(folder: str) -> AsyncIterator[Guarded]:
    settings = configuration(location=folder, root_token=Secret(ROOT), local_webhooks=True)
    async with running_server(settings) as server, browsing(server, headers=bearer(ROOT)) as root:
        endpoint = f"http://127.0.0.1:{server.port}"
        async with sdk_client(endpoint, ROOT) as account:
            yield Guarded(server, account, root)


async def test_a_restart_keeps_the_owner(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("store").as_uri()
    async with opened(folder) as guarded:
        await guarded.create("mine/a")
        me = await guarded.issue("me", "mine/")
        other = await guarded.issue("other", "")
        await guarded.put(me, "s", **pull())
    async with opened(folder) as guarded:
        assert await guarded.names(me, "s") == ["mine/a"]
        await guarded.root.delete(f"{CONTROL}/s", headers=other)
        assert await guarded.names(me, "s") == ["mine/a"]


async def test_a_document_without_an_owner_belongs_to_root(guarded: Guarded) -> None:
    """Subscriptions were stored without one at first."""
    await guarded.put(bearer(ROOT), "s", **pull())
    content = await guarded.server.store.documents.get(KIND, "s")
    assert content is not None
    assert not {"owner", "prefix"} & msgspec.msgpack.decode(content).keys()
    assert (await stored(guarded, "s")).owner is None
