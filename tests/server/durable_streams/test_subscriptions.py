"""Subscriptions over a real port: creation, links, views and rejections."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from streamfold.model.names import StreamName
from streamfold.server.durable_streams.subscriptions import CONTROL_ROOT
from streamfold.store.catalog.creation import ForkSpec, NewStream, prepared
from streamfold.store.store import StreamStore
from streamfold.wire.durable_streams.offsets import format_offset
from tests.server.durable_streams.subscribing import (
    BASIN,
    Bench,
    Clock,
    Receiver,
    append,
    create,
    refuse_all,
    serving,
)

START = format_offset(0)


@pytest.fixture
async def bench(store: StreamStore) -> AsyncIterator[Bench]:
    async with serving(store, Clock()) as bench:
        yield bench


def webhook(receiver: Receiver, **changes: Any) -> dict[str, Any]:
    return {"type": "webhook", "pattern": "events/*", "webhook": {"url": receiver.url}, **changes}


def pull(**changes: Any) -> dict[str, Any]:
    return {"type": "pull-wake", "pattern": "events/*", "wake_stream": "wakes", **changes}


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def test_a_webhook_subscription_is_shown_as_it_was_created(
    bench: Bench, receiver: Receiver
) -> None:
    wanted = webhook(receiver, lease_ttl_ms=5000, description="for a test", streams=["/b/", "a"])
    created = await bench.put("s", **wanted)
    assert created.status_code == 201
    root = f"http://{bench.client.base_url.netloc.decode()}{CONTROL_ROOT}"
    shown = created.json()
    kid = shown["webhook"]["signing"].pop("kid")
    assert kid.startswith("ds_")
    assert shown == {
        "id": "s",
        "subscription_id": "s",
        "type": "webhook",
        "pattern": "events/*",
        "streams": [
            {"path": "a", "link_type": "explicit", "acked_offset": START},
            {"path": "b", "link_type": "explicit", "acked_offset": START},
        ],
        "webhook": {
            "url": receiver.url,
            "signing": {"alg": "ed25519", "jwks_url": f"{root}/jwks.json"},
        },
        "lease_ttl_ms": 5000,
        "created_at": "2026-01-01T00:00:00.000Z",
        "status": "active",
        "description": "for a test",
    }
    assert (await bench.get("s"))["webhook"]["signing"]["kid"] == kid


async def test_the_same_request_confirms_and_another_is_refused(bench: Bench) -> None:
    assert (await bench.put("s", **pull(streams=["x", "y"]))).status_code == 201
    assert (await bench.put("s", **pull(streams=["y", "/x", "x"]))).status_code == 200
    refused = await bench.put("s", **pull(streams=["x"]))
    assert code(refused) == (409, "SUBSCRIPTION_ALREADY_EXISTS")


async def test_links_added_later_do_not_change_what_is_confirmed(bench: Bench) -> None:
    await bench.put("s", **pull())
    await bench.post("s", "streams", {"streams": ["more"]})
    assert (await bench.put("s", **pull())).status_code == 200


async def test_a_deleted_subscription_is_gone(bench: Bench) -> None:
    await bench.put("s", **pull())
    for _ in range(2):
        deleted = await bench.client.delete("/subscriptions/s")
        assert deleted.status_code == 204
    assert code(await bench.client.get("/subscriptions/s")) == (404, "SUBSCRIPTION_NOT_FOUND")
    assert (await bench.put("s", **pull(pattern="other/*"))).status_code == 201


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"type": "carrier-pigeon", "pattern": "a"},
        pull(pattern=None),
        pull(pattern=""),
        pull(pattern="a*"),
        pull(pattern="a//b"),
        pull(lease_ttl_ms=999),
        pull(lease_ttl_ms=600_001),
        pull(lease_ttl_ms="1000"),
        pull(wake_stream=None),
        pull(wake_stream="__ds/x"),
        pull(streams=["__ds/x"]),
        pull(streams=["/"]),
        pull(streams=["a\0b"]),
        pull(streams=["x" * 513]),
        pull(streams=[1]),
        pull(description="x" * 4097),
        {"type": "webhook", "pattern": "a"},
        {"type": "webhook", "pattern": "a", "webhook": {"url": ""}},
    ],
)
async def test_a_request_that_breaks_a_rule_creates_nothing(
    bench: Bench, body: dict[str, Any]
) -> None:
    assert code(await bench.put("s", **body)) == (400, "INVALID_REQUEST")
    assert (await bench.client.get("/subscriptions/s")).status_code == 404


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"type":"webhook"'])
async def test_a_body_that_is_not_the_right_json_is_refused(bench: Bench, content: bytes) -> None:
    response = await bench.client.put("/subscriptions/s", content=content)
    assert code(response) == (400, "INVALID_REQUEST")


async def test_a_body_that_is_too_large_is_refused(bench: Bench) -> None:
    response = await bench.client.put("/subscriptions/s", content=b" " * ((1 << 20) + 1))
    assert code(response) == (413, "INVALID_REQUEST")


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1/hook",
        "https://10.0.0.1/hook",
        "https://169.254.169.254/latest/meta-data",
        "https://[::ffff:127.0.0.1]/",
        "https://localhost/hook",
        "http://example.com/hook",
        "ftp://127.0.0.1/",
        "not a url",
    ],
)
async def test_a_webhook_that_is_not_safe_is_refused(bench: Bench, url: str) -> None:
    refused = await bench.put("s", type="webhook", pattern="a", webhook={"url": url})
    assert code(refused) == (400, "WEBHOOK_URL_REJECTED")
    assert (await bench.client.get("/subscriptions/s")).status_code == 404


async def test_webhooks_to_this_machine_must_be_allowed(store: StreamStore) -> None:
    async with serving(store, Clock(), local_webhooks=False) as bench:
        for url in ("http://localhost:1/", "http://127.0.0.1:1/"):
            refused = await bench.put("s", type="webhook", pattern="a", webhook={"url": url})
            assert code(refused) == (400, "WEBHOOK_URL_REJECTED")


async def test_more_streams_than_a_subscription_can_have_are_refused(bench: Bench) -> None:
    streams = [f"{number:04}/{'x' * 500}" for number in range(1600)]
    assert code(await bench.put("s", **pull(streams=streams))) == (400, "INVALID_REQUEST")
    await bench.put("s", **pull(streams=streams[:100]))
    refused = await bench.post("s", "streams", {"streams": streams})
    assert code(refused) == (400, "INVALID_REQUEST")
    assert len((await bench.get("s"))["streams"]) == 100


async def test_there_are_only_so_many_subscriptions(store: StreamStore) -> None:
    async with serving(store, Clock(), subscriptions_max=2) as bench:
        for id_ in ("a", "b"):
            assert (await bench.put(id_, **pull())).status_code == 201
        assert code(await bench.put("more", **pull())) == (400, "INVALID_REQUEST")
        assert (await bench.put("a", **pull())).status_code == 200
        await bench.client.delete("/subscriptions/a")
        assert (await bench.put("more", **pull())).status_code == 201


async def test_a_stream_without_room_is_linked_when_there_is_room(
    bench: Bench, store: StreamStore
) -> None:
    await create(store, "wakes")
    named = [f"{number:04}/{'x' * 500}" for number in range(1520)]
    created = await bench.put("s", **pull(streams=named, pattern="new/*"))
    assert created.json()["status"] == "active"
    late = [f"new/{number}{'y' * 400}" for number in range(30)]
    for stream in late:
        await create(store, stream, 1)
    assert (await bench.get("s"))["status"] == "failed"
    linked = len((await bench.get("s"))["streams"])
    assert 1520 <= linked < 1550
    for stream in named[:20]:
        assert (await bench.client.delete(f"/subscriptions/s/streams/{stream}")).is_success
    await bench.stored("s", lambda state: state.links.keys() >= set(late))
    shown = await bench.get("s")
    assert shown["status"] == "active"
    assert {link["acked_offset"] for link in shown["streams"]} == {START}


async def test_streams_that_are_there_are_linked_at_their_tails(
    bench: Bench, store: StreamStore
) -> None:
    for stream in ("events/old", "other/old", "named"):
        await create(store, stream, 1, 2)
    await bench.put("s", **pull(streams=["named", "missing"]))
    links = {link["path"]: link for link in (await bench.get("s"))["streams"]}
    tail = format_offset(2)
    assert links == {
        "events/old": {"path": "events/old", "link_type": "glob", "acked_offset": tail},
        "named": {"path": "named", "link_type": "explicit", "acked_offset": tail},
        "missing": {"path": "missing", "link_type": "explicit", "acked_offset": START},
    }


async def test_a_stream_that_is_appended_to_is_linked_before_the_append(
    bench: Bench, store: StreamStore
) -> None:
    await bench.put("s", **pull())
    await create(store, "events/new", 1)
    await create(store, "other/new", 1)
    assert await bench.acked("s", "events/new") == START
    assert await bench.acked("s", "other/new") is None


async def test_what_a_fork_inherited_is_not_new(bench: Bench, store: StreamStore) -> None:
    await create(store, "source", 1, 2, 3)
    await bench.put("s", **pull())
    fork = ForkSpec(StreamName("source"), 2, 0, lambda _: True)
    spec = NewStream(None, None, None, False, False, fork, prepared([]), None)
    await store.stream(BASIN, "events/fork").create(spec)
    await append(store, "events/fork", 4)
    assert await bench.acked("s", "events/fork") == format_offset(2)


async def test_a_stream_that_is_created_anew_starts_over(bench: Bench, store: StreamStore) -> None:
    await create(store, "events/a", 1, 2)
    await create(store, "named", 1, 2)
    await bench.put("s", **pull(streams=["named"]))
    for stream in ("events/a", "named"):
        await store.stream(BASIN, stream).delete()
        await store.upkeep()
        await create(store, stream, 1)
        assert await bench.acked("s", stream) == START
    assert {s["has_pending"] for s in (await bench.claim("s"))["streams"]} == {True}


@pytest.mark.parametrize("path", ["named/b", "named%2Fb", "/named/b/", "named%2fb"])
async def test_explicit_links_come_and_go(bench: Bench, path: str) -> None:
    await bench.put("s", **pull(streams=["named/a"]))
    assert (await bench.post("s", "streams", {"streams": ["named/b"]})).status_code == 204
    assert await bench.acked("s", "named/b") == START
    for _ in range(2):
        removed = await bench.client.delete(f"/subscriptions/s/streams/{path}")
        assert removed.status_code == 204
    assert await bench.acked("s", "named/b") is None
    assert await bench.acked("s", "named/a") == START


async def test_a_stream_that_fits_the_pattern_stays_without_its_explicit_link(
    bench: Bench, store: StreamStore
) -> None:
    await create(store, "events/a", 1)
    await bench.put("s", **pull())
    types = []
    for method, path in (("POST", "streams"), ("DELETE", "streams/events%2Fa")):
        body = {"streams": ["events/a"]} if method == "POST" else None
        await bench.client.request(method, f"/subscriptions/s/{path}", json=body)
        [link] = (await bench.get("s"))["streams"]
        types.append((link["link_type"], link["acked_offset"]))
    assert types == [("explicit", format_offset(1)), ("glob", format_offset(1))]


async def test_an_append_right_after_an_explicit_link_is_pending(
    bench: Bench, store: StreamStore
) -> None:
    await create(store, "named", 1)
    await bench.put("s", **pull(pattern="nothing"))
    await append(store, "named", 2)  # no subscription matches yet, and that must not be cached
    await bench.post("s", "streams", {"streams": ["named"]})
    await append(store, "named", 3)
    [stream] = (await bench.claim("s"))["streams"]
    assert (stream["acked_offset"], stream["tail_offset"]) == (format_offset(2), format_offset(3))


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "jwks.json", "GET, OPTIONS"),
        ("POST", "subscriptions/s", "DELETE, GET, OPTIONS, PUT"),
        ("GET", "subscriptions/s/claim", "OPTIONS, POST"),
        ("POST", "subscriptions/s/streams/a", "DELETE, OPTIONS"),
    ],
)
async def test_other_methods_get_the_list_of_allowed_ones(
    bench: Bench, method: str, path: str, allow: str
) -> None:
    response = await bench.client.request(method, f"/{path}")
    assert (response.status_code, response.headers["allow"]) == (405, allow)


@pytest.mark.parametrize("path", ["", "subscriptions", "subscriptions/", "x", "subscriptions/s/y"])
async def test_there_is_nothing_at_other_paths(bench: Bench, path: str) -> None:
    assert code(await bench.client.get(f"/{path}")) == (404, "SUBSCRIPTION_NOT_FOUND")


@pytest.mark.parametrize("segment", ["%FF", "x" * 257, "a%00b"])
async def test_an_id_that_breaks_a_rule_is_refused(bench: Bench, segment: str) -> None:
    assert code(await bench.put(segment, **pull())) == (400, "INVALID_REQUEST")


async def test_an_id_may_have_any_other_character(bench: Bench) -> None:
    assert (await bench.put("a%2Fb%20%C3%A4", **pull())).json()["id"] == "a/b ä"
    assert (await bench.get("a%2Fb%20%C3%A4"))["id"] == "a/b ä"


async def test_who_may_not_use_subscriptions_can_only_verify_and_use_wake_tokens(
    store: StreamStore,
) -> None:
    async with serving(store, Clock(), refuse_all) as bench:
        for method, path in (
            ("PUT", "s"),
            ("GET", "s"),
            ("DELETE", "s"),
            ("POST", "s/streams"),
            ("DELETE", "s/streams/a"),
            ("POST", "s/claim"),
        ):
            response = await bench.client.request(method, f"/subscriptions/{path}", json={})
            assert response.status_code in (401, 403), path
        assert (await bench.client.get("/jwks.json")).status_code == 200
        for action in ("ack", "callback", "release"):
            body = {"wake_id": "w", "generation": 1}
            assert code(await bench.post("s", action, body)) == (401, "TOKEN_INVALID")
            unknown = await bench.post("s", action, body, "token")
            assert code(unknown) == (401, "TOKEN_INVALID")
