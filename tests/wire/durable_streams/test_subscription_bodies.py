"""Bodies of subscription calls: valid, rejected, and responses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from streamfold.errors import InvalidError
from streamfold.wire.durable_streams import subscriptions as bodies
from streamfold.wire.durable_streams.subscriptions import (
    Ack,
    AckRequest,
    AckView,
    ClaimView,
    LinkType,
    LinkView,
    PendingView,
    Refusal,
    RefusalBody,
    SigningView,
    SubscriptionStatus,
    SubscriptionType,
    SubscriptionView,
    WakeMessage,
    WebhookCall,
    WebhookReply,
    WebhookTarget,
    WebhookView,
    decode_ack,
    decode_claim,
    decode_release,
    decode_streams,
    decode_subscription,
    decode_webhook_reply,
)

WEBHOOK = {"type": "webhook", "pattern": "a/*", "webhook": {"url": "https://a.example/hook"}}
PULL = {"type": "pull-wake", "streams": ["a", "b"], "wake_stream": "wakes"}
ACK = {"wake_id": "w", "generation": 3}


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def shown(value: msgspec.Struct) -> Any:
    return json.loads(msgspec.json.encode(value))


def test_a_subscription_has_streams_and_a_target() -> None:
    webhook = decode_subscription(encoded(WEBHOOK))
    assert webhook.type is SubscriptionType.WEBHOOK
    assert webhook.pattern == "a/*"
    assert webhook.streams == ()
    assert webhook.webhook == WebhookTarget("https://a.example/hook")
    assert webhook.lease_ttl_ms == 30_000
    pull = decode_subscription(encoded({**PULL, "lease_ttl_ms": 1000, "description": "d"}))
    assert pull.streams == ("a", "b")
    assert pull.wake_stream == "wakes"
    assert pull.lease_ttl_ms == 1000
    assert pull.description == "d"


def test_members_that_are_not_known_are_ignored() -> None:
    assert decode_subscription(encoded({**PULL, "colour": 1})) == decode_subscription(encoded(PULL))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"type": "push"}, "type"),
        ({"type": None}, "type"),
        ({"pattern": 5}, "pattern"),
        ({"pattern": ""}, "pattern"),
        ({"pattern": None}, "pattern"),
        ({"streams": "a"}, "streams"),
        ({"streams": [""]}, "streams"),
        ({"streams": [1]}, "streams"),
        ({"webhook": None}, "webhook"),
        ({"webhook": {}}, "url"),
        ({"webhook": {"url": ""}}, "url"),
        ({"type": "pull-wake"}, "wake_stream"),
        ({"lease_ttl_ms": 999}, "lease_ttl_ms"),
        ({"lease_ttl_ms": 600_001}, "lease_ttl_ms"),
        ({"lease_ttl_ms": 1000.5}, "lease_ttl_ms"),
        ({"lease_ttl_ms": "1000"}, "lease_ttl_ms"),
        ({"lease_ttl_ms": True}, "lease_ttl_ms"),
    ],
)
def test_a_subscription_that_breaks_a_rule_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidError, match=named):
        decode_subscription(encoded({**WEBHOOK, **change}))


DECODERS: list[Callable[[bytes], object]] = [
    decode_subscription,
    decode_streams,
    decode_claim,
    decode_ack,
    decode_release,
    decode_webhook_reply,
]


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"{} {}",
        b"\xff",
        b'{"x":' * 100_000,
        b'{"x":' + b"[" * 100_000,
    ],
)
def test_a_body_that_is_not_an_object_is_refused(
    decode: Callable[[bytes], object], body: bytes
) -> None:
    with pytest.raises(InvalidError):
        decode(body)


@pytest.mark.parametrize("decode", DECODERS[:-1])
@pytest.mark.parametrize("body", [b"", b"{}"])
def test_a_request_without_its_members_is_refused(
    decode: Callable[[bytes], object], body: bytes
) -> None:
    with pytest.raises(InvalidError):
        decode(body)


def test_streams_to_link_are_named() -> None:
    assert decode_streams(b'{"streams":["a","b/c"]}') == ("a", "b/c")
    for body in (b'{"streams":[]}', b'{"streams":[""]}', b'{"streams":[1]}', b'{"streams":"a"}'):
        with pytest.raises(InvalidError, match="streams"):
            decode_streams(body)


def test_a_claim_names_its_worker() -> None:
    assert decode_claim(b'{"worker":"w1"}').worker == "w1"
    with pytest.raises(InvalidError, match="worker"):
        decode_claim(b'{"worker":""}')
    with pytest.raises(InvalidError, match="UTF-8"):
        decode_claim(b'{"worker":"\xff"}')


def test_an_ack_says_how_far_and_whether_it_is_done() -> None:
    assert decode_ack(encoded(ACK)) == AckRequest("w", 3, (), False)
    acks = [{"stream": "a", "offset": "0_0"}]
    assert decode_ack(encoded({**ACK, "acks": acks, "done": True})) == (
        AckRequest("w", 3, (Ack("a", "0_0"),), True)
    )
    assert decode_release(encoded(ACK)).generation == 3


@pytest.mark.parametrize(
    "change",
    [
        {"wake_id": ""},
        {"wake_id": 1},
        {"generation": -1},
        {"generation": "3"},
        {"generation": 2**53},
        {"acks": [{"stream": "a"}]},
        {"acks": [{"offset": "0_0"}]},
        {"done": "true"},
    ],
)
def test_an_ack_that_breaks_a_rule_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidError):
        decode_ack(encoded({**ACK, **change}))


def test_a_receiver_that_says_nothing_acknowledges_nothing() -> None:
    assert decode_webhook_reply(b"") == WebhookReply(False)
    assert decode_webhook_reply(b" \n") == WebhookReply(False)
    assert decode_webhook_reply(b"{}") == WebhookReply(False)
    assert decode_webhook_reply(b'{"done":true}') == WebhookReply(True)


def test_a_subscription_is_shown_with_what_it_has() -> None:
    view = SubscriptionView(
        "s",
        "s",
        SubscriptionType.WEBHOOK,
        (LinkView("a", LinkType.GLOB, "0_0"),),
        30_000,
        "2030-01-31T12:00:00.000Z",
        SubscriptionStatus.ACTIVE,
        pattern="a/*",
        webhook=WebhookView("https://a", SigningView("ed25519", "ds_1", "https://b/jwks.json")),
    )
    assert shown(view) == {
        "id": "s",
        "subscription_id": "s",
        "type": "webhook",
        "pattern": "a/*",
        "streams": [{"path": "a", "link_type": "glob", "acked_offset": "0_0"}],
        "webhook": {
            "url": "https://a",
            "signing": {"alg": "ed25519", "kid": "ds_1", "jwks_url": "https://b/jwks.json"},
        },
        "lease_ttl_ms": 30_000,
        "created_at": "2030-01-31T12:00:00.000Z",
        "status": "active",
    }


PENDING = PendingView("a", LinkType.EXPLICIT, "0_0", "1_0", has_pending=True)
PENDING_JSON = {
    "path": "a",
    "link_type": "explicit",
    "acked_offset": "0_0",
    "tail_offset": "1_0",
    "has_pending": True,
}


def test_answers_to_workers_have_the_members_of_the_protocol() -> None:
    assert shown(ClaimView("w", 1, "secret", (PENDING,), 1000)) == {
        "wake_id": "w",
        "generation": 1,
        "token": "secret",
        "streams": [PENDING_JSON],
        "lease_ttl_ms": 1000,
    }
    assert shown(AckView(next_wake=False)) == {"ok": True, "next_wake": False}


def test_wakes_have_the_members_of_the_protocol() -> None:
    assert shown(WebhookCall("s", "w", 1, (PENDING,), "https://c", "secret")) == {
        "subscription_id": "s",
        "wake_id": "w",
        "generation": 1,
        "streams": [PENDING_JSON],
        "callback_url": "https://c",
        "callback_token": "secret",
    }
    assert shown(WakeMessage("s", "a", 1, 1_700_000_000_000)) == {
        "type": "wake",
        "subscription_id": "s",
        "stream": "a",
        "generation": 1,
        "ts": 1_700_000_000_000,
    }


def test_a_refusal_names_the_holder_of_the_wake_if_there_is_one() -> None:
    assert shown(RefusalBody(Refusal("FENCED", "m"))) == {
        "error": {"code": "FENCED", "message": "m"}
    }
    assert shown(RefusalBody(Refusal("ALREADY_CLAIMED", "m", "w1", 4))) == {
        "error": {
            "code": "ALREADY_CLAIMED",
            "message": "m",
            "current_holder": "w1",
            "generation": 4,
        }
    }


def test_the_bounds_of_a_lease_are_those_of_the_protocol() -> None:
    assert (bodies.LEASE_TTL_MIN_MS, bodies.LEASE_TTL_MAX_MS) == (1_000, 600_000)
