"""Webhooks: signed, acknowledged, repeated until a receiver accepts them, fenced."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from streamfold.server.durable_streams.subscriptions.leases import Subscription
from streamfold.store.store import StreamStore
from streamfold.wire.durable_streams.offsets import format_offset
from tests.server.durable_streams.subscribing import (
    DONE,
    Bench,
    Clock,
    Receiver,
    answer,
    append,
    create,
    is_held,
    offsets,
    receiving,
    serving,
)
from tests.server.durable_streams.test_subscriptions import START, code, webhook

LEASE = 1.0


@pytest.fixture
async def bench(store: StreamStore, receiver: Receiver) -> AsyncIterator[Bench]:
    """A subscription `s` to events/*, with a lease of a second."""
    async with serving(store, Clock()) as bench:
        created = await bench.put("s", **webhook(receiver, lease_ttl_ms=1000))
        assert created.status_code == 201
        yield bench


async def callback(bench: Bench, body: dict[str, Any], token: str) -> tuple[int, Any]:
    response = await bench.post("s", "callback", body, token)
    return response.status_code, response.json()


async def wait_for_ack(bench: Bench, stream: str, offset: str) -> None:
    position = int(offset.partition("_")[0])
    await bench.stored("s", lambda s: stream in s.links and s.links[stream].acked == position)


def has_failed(times: int, state: Subscription) -> bool:
    return state.failures == times


async def test_an_append_calls_the_webhook(
    bench: Bench, store: StreamStore, receiver: Receiver
) -> None:
    await create(store, "events/a", {"n": 1}, {"n": 2})
    hook = await receiver.hook()
    body = hook.body
    root = str(bench.client.base_url).rstrip("/")
    assert body == {
        "subscription_id": "s",
        "wake_id": body["wake_id"],
        "generation": 1,
        "streams": [
            {
                "path": "events/a",
                "link_type": "glob",
                "acked_offset": START,
                "tail_offset": format_offset(2),
                "has_pending": True,
            }
        ],
        "callback_url": f"{root}/subscriptions/s/callback",
        "callback_token": body["callback_token"],
    }
    assert hook.path == "/hook"
    assert hook.headers["content-type"] == "application/json"
    assert len(body["callback_token"]) >= 43  # 256 bits


async def test_a_webhook_is_signed_with_the_published_key(
    bench: Bench, store: StreamStore, receiver: Receiver
) -> None:
    await create(store, "events/a", 1)
    hook = await receiver.hook()
    published = await bench.client.get("/jwks.json")
    assert published.headers["content-type"] == "application/jwk-set+json"
    assert published.headers["cache-control"] == "public, max-age=300"
    [key] = published.json()["keys"]
    raw = base64.urlsafe_b64decode(key["x"] + "=")
    public_key, now = Ed25519PublicKey.from_public_bytes(raw), bench.clock.now // 1000
    signed, _, signature = hook.headers["webhook-signature"].rpartition(",ed25519=")
    assert signed == f"t={now},kid={key['kid']}"
    public_key.verify(base64.urlsafe_b64decode(signature + "=="), b"%d.%b" % (now, hook.raw))


async def test_an_answer_of_done_acknowledges_what_was_sent(
    bench: Bench, store: StreamStore, receiver: Receiver
) -> None:
    receiver.answer = DONE
    await create(store, "events/a", 1)
    hook = await receiver.hook()
    await wait_for_ack(bench, "events/a", offsets(hook.body["streams"])["events/a"])
    stale = await callback(bench, hook.ack(), hook.body["callback_token"])
    assert (stale[0], stale[1]["error"]["code"]) == (409, "FENCED")


async def test_what_comes_before_an_answer_of_done_makes_the_next_wake(
    bench: Bench, store: StreamStore, receiver: Receiver
) -> None:
    receiver.answer = DONE
    receiver.may_answer.clear()
    await create(store, "events/a", 1)
    first = await receiver.hook()
    await append(store, "events/a", 2)
    receiver.may_answer.set()
    state = await bench.stored("s", lambda s: s.wake is None or s.generation > 1)
    assert state.generation > 1, "the record that came during the call wakes nobody"
    second = await receiver.hook()
    assert offsets(first.body["streams"]) == {"events/a": format_offset(1)}
    assert offsets(second.body["streams"]) == {"events/a": format_offset(2)}


async def test_a_callback_acknowledges_once(
    bench: Bench, store: StreamStore, receiver: Receiver
) -> None:
    await create(store, "events/a", 1)
    hook = await receiver.hook()
    ack, token = hook.ack(("events/a", format_offset(1)), done=True), hook.body["callback_token"]
    assert await callback(bench, ack, token) == (200, {"ok": True, "next_wake": False})
    assert await bench.acked("s", "events/a") == format_offset(1)
    status, body = await callback(bench, ack, token)
    assert (status, body["error"]["code"]) == (409, "FENCED")


async def test_a_callback_needs_everything_of_its_wake(
    bench: Bench, store: StreamStore, receiver: Receiver
) -> None:
    await create(store, "events/a", 1)
    hook = await receiver.hook()
    ack, token = hook.ack(("events/a", format_offset(1)), done=True), hook.body["callback_token"]
    for shown, change, refusal in (
        (None, {}, (401, "TOKEN_INVALID")),
        (f"{token}x", {}, (401, "TOKEN_INVALID")),
        (token, {"generation": 2}, (409, "FENCED")),
        (token, {"generation": 0}, (409, "FENCED")),
        (token, {"wake_id": "wake_other"}, (409, "FENCED")),
        (token, {"generation": "1"}, (400, "INVALID_REQUEST")),
        (token, {"wake_id": None}, (400, "INVALID_REQUEST")),
    ):
        assert code(await bench.post("s", "callback", {**ack, **change}, shown)) == refusal
    assert await bench.acked("s", "events/a") == START
    assert (await callback(bench, ack, token))[0] == 200


async def test_a_token_is_good_for_its_own_subscription_alone(
    bench: Bench, store: StreamStore, receiver: Receiver
) -> None:
    async with receiving() as other:
        await bench.put("t", **webhook(other))
        await create(store, "events/a", 1)
        hook, _ = await receiver.hook(), await other.hook()
        refused = await bench.post("t", "callback", hook.ack(), hook.body["callback_token"])
        assert code(refused) == (401, "TOKEN_INVALID")


async def test_what_comes_during_a_wake_makes_the_next_one(
    bench: Bench, store: StreamStore, receiver: Receiver
) -> None:
    await create(store, "events/a", 1)
    first = await receiver.hook()
    await append(store, "events/a", 2)
    await create(store, "events/b", 1)
    ack = first.ack(("events/a", format_offset(1)), done=True)
    said = await callback(bench, ack, first.body["callback_token"])
    assert said == (200, {"ok": True, "next_wake": True})
    second = await receiver.hook()
    assert second.body["generation"] == 2
    assert second.body["wake_id"] != first.body["wake_id"]
    reported = offsets(second.body["streams"])
    assert reported == {"events/a": format_offset(2), "events/b": format_offset(1)}


async def test_a_receiver_that_fails_is_called_again_after_growing_pauses(
    bench: Bench, store: StreamStore, receiver: Receiver
) -> None:
    receiver.answer = answer(500)
    await create(store, "events/a", 1)
    first = await receiver.hook()
    for failures, delay in enumerate((1, 2, 4, 8, 16, 32, 60, 60), start=1):
        state = await bench.stored("s", partial(has_failed, failures))
        wait = (state.next_attempt_at - bench.clock.now) / 1000
        assert delay * 0.8 <= wait <= delay * 1.2, f"failure {failures}"
        assert (await bench.get("s"))["status"] == "failed"
        bench.pass_seconds(wait - 0.001)
        await bench.get("s")
        assert receiver.hooks.empty()
        bench.pass_seconds(0.001)
        again = await receiver.hook()
        assert again.body == first.body
    receiver.answer = DONE
    await bench.stored("s", partial(has_failed, 9))
    bench.pass_seconds(72)
    await receiver.hook()
    await wait_for_ack(bench, "events/a", format_offset(1))
    assert (await bench.get("s"))["status"] == "active"


@pytest.mark.parametrize(
    "reply",
    [
        answer(302, "", "location: http://127.0.0.1:1/other"),
        answer(404),
        b"HTTP/1.1 nonsense\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort",
    ],
    ids=["redirect", "missing", "nonsense", "hangup", "truncated"],
)
async def test_what_is_not_a_success_is_a_failure(
    bench: Bench, store: StreamStore, receiver: Receiver, reply: bytes
) -> None:
    receiver.answer = reply
    await create(store, "events/a", 1)
    await receiver.hook()
    await bench.stored("s", lambda state: state.failures == 1)
    receiver.answer = DONE
    bench.pass_seconds(2)
    await receiver.hook()
    await wait_for_ack(bench, "events/a", format_offset(1))


@pytest.mark.parametrize("body", ["", "ok", "[]", '{"done":"yes"}', '{"done":false}'])
async def test_a_success_that_does_not_say_done_waits_for_a_callback(
    bench: Bench, store: StreamStore, receiver: Receiver, body: str
) -> None:
    receiver.answer = answer(200, body)
    await create(store, "events/a", 1)
    hook = await receiver.hook()
    await bench.stored("s", is_held)
    assert await bench.acked("s", "events/a") == START
    ack = hook.ack(("events/a", format_offset(1)), done=True)
    assert (await callback(bench, ack, hook.body["callback_token"]))[0] == 200


async def test_a_lease_that_runs_out_wakes_again_and_fences_the_first(
    bench: Bench, store: StreamStore, receiver: Receiver
) -> None:
    await create(store, "events/a", 1)
    first = await receiver.hook()
    await bench.stored("s", is_held)
    bench.pass_seconds(LEASE)
    second = await receiver.hook()
    assert second.body["generation"] == 2
    status, body = await callback(bench, first.ack(done=True), first.body["callback_token"])
    assert (status, body["error"]["code"]) == (409, "FENCED")
    ack = second.ack(("events/a", format_offset(1)), done=True)
    assert (await callback(bench, ack, second.body["callback_token"]))[0] == 200


async def test_a_sign_of_life_extends_the_lease(
    bench: Bench, store: StreamStore, receiver: Receiver
) -> None:
    await create(store, "events/a", 1)
    hook = await receiver.hook()
    await bench.stored("s", is_held)
    for _ in range(3):
        bench.pass_seconds(LEASE * 0.9)
        said = await callback(bench, hook.ack(), hook.body["callback_token"])
        assert said == (200, {"ok": True, "next_wake": False})
    assert receiver.hooks.empty()


async def test_a_callback_may_be_quicker_than_the_answer(
    bench: Bench, store: StreamStore, receiver: Receiver
) -> None:
    receiver.answer = None
    await create(store, "events/a", 1)
    hook = await receiver.hook()
    ack = hook.ack(("events/a", format_offset(1)), done=True)
    said = await callback(bench, ack, hook.body["callback_token"])
    assert said == (200, {"ok": True, "next_wake": False})


async def test_a_deletion_does_not_wait_for_a_receiver(
    bench: Bench, store: StreamStore, receiver: Receiver
) -> None:
    receiver.answer = None
    await create(store, "events/a", 1)
    hook = await receiver.hook()
    assert (await bench.client.delete("/subscriptions/s")).status_code == 204
    gone = await bench.post("s", "callback", hook.ack(), hook.body["callback_token"])
    assert code(gone) == (401, "TOKEN_INVALID")


async def test_a_pull_worker_cannot_use_a_webhook_subscription(bench: Bench) -> None:
    assert code(await bench.post("s", "claim", {"worker": "w"})) == (400, "INVALID_REQUEST")
    for action in ("ack", "release"):
        body = {"wake_id": "w", "generation": 1}
        assert code(await bench.post("s", action, body, "t")) == (401, "TOKEN_INVALID")
