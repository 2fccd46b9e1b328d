"""Pull-wake: workers read wakes from a stream, claim the work, and hold it under a lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from streamfold.store.store import StreamStore
from streamfold.wire.durable_streams.offsets import format_offset
from tests.server.durable_streams.subscribing import (
    BASIN,
    EPOCH,
    Bench,
    Clock,
    append,
    create,
    is_held,
    messages,
    next_message,
    serving,
)
from tests.server.durable_streams.test_subscriptions import START, code, pull


@pytest.fixture
async def bench(store: StreamStore) -> AsyncIterator[Bench]:
    """A subscription `s` to events/*, with a lease of a second and its stream of wakes."""
    await create(store, "wakes")
    async with serving(store, Clock()) as bench:
        assert (await bench.put("s", **pull(lease_ttl_ms=1000))).status_code == 201
        yield bench


def of(claimed: dict[str, Any], *acks: tuple[str, int], done: bool = False) -> dict[str, Any]:
    """The body of an ack."""
    return {
        "wake_id": claimed["wake_id"],
        "generation": claimed["generation"],
        "acks": [{"stream": stream, "offset": format_offset(at)} for stream, at in acks],
        "done": done,
    }


async def test_an_append_writes_a_wake_into_the_stream(bench: Bench, store: StreamStore) -> None:
    await create(store, "events/a", 1)
    assert await next_message(store, "wakes", 0) == {
        "type": "wake",
        "subscription_id": "s",
        "stream": "events/a",
        "generation": 1,
        "ts": EPOCH,
    }


async def test_a_claim_is_acknowledged_and_then_nothing_is_left(
    bench: Bench, store: StreamStore
) -> None:
    await create(store, "events/a", 1, 2)
    claimed = await bench.claim("s")
    assert claimed["generation"] == 1
    assert claimed["lease_ttl_ms"] == 1000
    assert claimed["streams"] == [
        {
            "path": "events/a",
            "link_type": "glob",
            "acked_offset": START,
            "tail_offset": format_offset(2),
            "has_pending": True,
        }
    ]
    said = await bench.post("s", "ack", of(claimed, ("events/a", 2), done=True), claimed["token"])
    assert (said.status_code, said.json()) == (200, {"ok": True, "next_wake": False})
    assert await bench.acked("s", "events/a") == format_offset(2)
    assert code(await bench.post("s", "claim", {"worker": "w"})) == (409, "NO_PENDING_WORK")


async def test_an_acknowledged_append_can_be_claimed_at_once(
    bench: Bench, store: StreamStore
) -> None:
    await create(store, "events/a")
    for position in range(1, 30):
        await append(store, "events/a", position)
        claimed = await bench.claim("s")
        ack = of(claimed, ("events/a", position), done=True)
        assert (await bench.post("s", "ack", ack, claimed["token"])).status_code == 200


async def test_of_many_who_claim_one_gets_the_work(bench: Bench, store: StreamStore) -> None:
    await create(store, "events/a", 1)
    workers = [f"worker-{number}" for number in range(20)]
    answers = await asyncio.gather(
        *(bench.post("s", "claim", {"worker": worker}) for worker in workers)
    )
    [winner] = [at for at, said in enumerate(answers) if said.status_code == 200]
    for at, said in enumerate(answers):
        if at != winner:
            error = said.json()["error"]
            assert code(said) == (409, "ALREADY_CLAIMED")
            assert (error["current_holder"], error["generation"]) == (workers[winner], 1)


async def test_of_an_ack_and_a_claim_that_race_both_cannot_win(
    bench: Bench, store: StreamStore
) -> None:
    """The lease is over: either the late ack or the new claim is refused, and the work is not lost."""
    await create(store, "events/a", 1)
    first = await bench.claim("s")
    bench.clock.now += 1000
    ack = of(first, ("events/a", 1), done=True)
    late, claim = await asyncio.gather(
        bench.post("s", "ack", ack, first["token"]), bench.post("s", "claim", {"worker": "w2"})
    )
    assert code(late) == (409, "FENCED")
    assert claim.status_code == 200
    assert claim.json()["generation"] > first["generation"]
    assert await bench.acked("s", "events/a") == START


async def test_a_released_claim_is_announced_again(bench: Bench, store: StreamStore) -> None:
    await create(store, "events/a", 1)
    claimed = await bench.claim("s")
    released = await bench.post("s", "release", of(claimed), claimed["token"])
    assert released.status_code == 204
    assert code(await bench.post("s", "release", of(claimed), claimed["token"])) == (409, "FENCED")
    again = await bench.claim("s", "worker-2")
    assert again["generation"] == 2
    assert again["token"] != claimed["token"]


async def test_a_lease_that_runs_out_is_announced_and_fences(
    bench: Bench, store: StreamStore
) -> None:
    await create(store, "events/a", 1)
    await next_message(store, "wakes", 0)
    claimed = await bench.claim("s")
    bench.pass_seconds(0.999)
    assert code(await bench.post("s", "claim", {"worker": "w"})) == (409, "ALREADY_CLAIMED")
    bench.pass_seconds(0.001)
    assert (await next_message(store, "wakes", 1))["generation"] == 2
    late = await bench.post("s", "ack", of(claimed, ("events/a", 1)), claimed["token"])
    assert code(late) == (409, "FENCED")
    assert (await bench.claim("s", "worker-2"))["streams"][0]["acked_offset"] == START


async def test_an_ack_extends_the_lease(bench: Bench, store: StreamStore) -> None:
    await create(store, "events/a", 1, 2, 3)
    claimed = await bench.claim("s")
    for position in (1, 2, 3):
        bench.pass_seconds(0.9)
        said = await bench.post("s", "ack", of(claimed, ("events/a", position)), claimed["token"])
        assert said.json() == {"ok": True, "next_wake": False}
    state = await bench.stored("s", is_held)
    assert state.wake is not None
    assert state.wake.lease_until == bench.clock.now + 1000


async def test_work_that_is_left_makes_the_next_wake(bench: Bench, store: StreamStore) -> None:
    await create(store, "events/a", 1, 2)
    claimed = await bench.claim("s")
    said = await bench.post("s", "ack", of(claimed, ("events/a", 1), done=True), claimed["token"])
    assert said.json() == {"ok": True, "next_wake": True}
    again = await bench.claim("s")
    assert (again["generation"], again["streams"][0]["acked_offset"]) == (2, format_offset(1))


@pytest.mark.parametrize(
    "acks",
    [
        [("events/a", format_offset(3))],
        [("events/a", format_offset(0))],
        [("events/a", "-1")],
        [("events/a", "now")],
        [("events/a", "2")],
        [("events/other", format_offset(1))],
        [("events/a", format_offset(2)), ("events/b", format_offset(9))],
    ],
)
async def test_an_ack_that_does_not_fit_changes_nothing(
    bench: Bench, store: StreamStore, acks: list[tuple[str, str]]
) -> None:
    await create(store, "events/a", 1, 2)
    await create(store, "events/b", 1)
    claimed = await bench.claim("s")
    await bench.post("s", "ack", of(claimed, ("events/a", 1)), claimed["token"])
    body = {**of(claimed), "acks": [{"stream": path, "offset": at} for path, at in acks]}
    refused = await bench.post("s", "ack", {**body, "done": True}, claimed["token"])
    assert code(refused) == (409, "INVALID_OFFSET")
    assert await bench.acked("s", "events/a") == format_offset(1)
    assert code(await bench.post("s", "claim", {"worker": "w"})) == (409, "ALREADY_CLAIMED")


async def test_the_same_ack_again_is_fine(bench: Bench, store: StreamStore) -> None:
    await create(store, "events/a", 1)
    claimed = await bench.claim("s")
    for _ in range(2):
        said = await bench.post("s", "ack", of(claimed, ("/events/a", 1)), claimed["token"])
        assert said.status_code == 200


async def test_a_subscription_does_not_wake_itself(store: StreamStore) -> None:
    await create(store, "wakes")
    async with serving(store, Clock()) as bench:
        await bench.put("s", **pull(pattern="**", streams=["wakes", "other"]))
        await bench.post("s", "streams", {"streams": ["wakes"]})
        await create(store, "events/a", 1)
        await next_message(store, "wakes", 0)
        claimed = await bench.claim("s")
        assert {stream["path"] for stream in claimed["streams"]} == {"events/a", "other"}
        ack = of(claimed, ("events/a", 1), done=True)
        said = await bench.post("s", "ack", ack, claimed["token"])
        assert said.json() == {"ok": True, "next_wake": False}


async def test_a_wake_stream_that_is_missing_is_tried_again(store: StreamStore) -> None:
    async with serving(store, Clock()) as bench:
        await bench.put("s", **pull())
        await create(store, "events/a", 1)
        state = await bench.stored("s", lambda state: state.failures == 1)
        assert 800 <= state.next_attempt_at - bench.clock.now <= 1200
        assert (await bench.get("s"))["status"] == "failed"
        await create(store, "wakes")
        bench.pass_seconds(1.2)
        assert (await next_message(store, "wakes", 0))["generation"] == 1
        await bench.stored("s", lambda state: state.failures == 0)


async def test_work_that_went_away_is_announced_when_it_comes_back(
    bench: Bench, store: StreamStore
) -> None:
    await create(store, "events/a", 1)
    await next_message(store, "wakes", 0)
    await store.stream(BASIN, "events/a").delete()
    bench.subscriptions.notice("events/a")
    assert code(await bench.post("s", "claim", {"worker": "w"})) == (409, "NO_PENDING_WORK")
    await create(store, "events/b", 1)
    wake = await next_message(store, "wakes", 1)
    assert (wake["stream"], wake["generation"]) == ("events/b", 2)


async def test_a_stream_that_is_created_anew_during_a_wake_ends_it(
    bench: Bench, store: StreamStore
) -> None:
    """An ack of the former stream's records must not pass for one of the new stream's."""
    await create(store, "events/a", 1)
    claimed = await bench.claim("s")
    await store.stream(BASIN, "events/a").delete()
    await create(store, "events/a", 2, 3)
    late = await bench.post("s", "ack", of(claimed, ("events/a", 1), done=True), claimed["token"])
    assert code(late) == (409, "FENCED")
    again = await bench.claim("s", "worker-2")
    [stream] = again["streams"]
    assert (stream["acked_offset"], stream["tail_offset"]) == (START, format_offset(2))


async def test_two_subscriptions_do_not_hinder_each_other(bench: Bench, store: StreamStore) -> None:
    await bench.put("t", **pull(pattern="**/a"))
    await create(store, "events/a", 1)
    first, second = await bench.claim("s"), await bench.claim("t")
    said = await bench.post("s", "ack", of(first, ("events/a", 1), done=True), first["token"])
    assert said.status_code == 200
    assert await bench.acked("t", "events/a") == START
    refused = await bench.post("t", "ack", of(second), first["token"])
    assert code(refused) == (401, "TOKEN_INVALID")


async def test_a_webhook_receiver_cannot_use_a_pull_subscription(
    bench: Bench, store: StreamStore
) -> None:
    await create(store, "events/a", 1)
    claimed = await bench.claim("s")
    body = {"wake_id": claimed["wake_id"], "generation": claimed["generation"]}
    refused = await bench.post("s", "callback", body, claimed["token"])
    assert code(refused) == (400, "INVALID_REQUEST")


@pytest.mark.parametrize("worker", ["", "x" * 257, None, 5])
async def test_a_worker_needs_a_name(bench: Bench, store: StreamStore, worker: object) -> None:
    await create(store, "events/a", 1)
    refused = await bench.post("s", "claim", {"worker": worker})
    assert code(refused) == (400, "INVALID_REQUEST")


async def test_many_appends_make_one_wake(bench: Bench, store: StreamStore) -> None:
    await create(store, "events/a")
    await asyncio.gather(*(append(store, "events/a", number) for number in range(50)))
    await next_message(store, "wakes", 0)
    claimed = await bench.claim("s")
    assert claimed["streams"][0]["tail_offset"] == format_offset(50)
    assert len(await messages(store, "wakes")) == 1
