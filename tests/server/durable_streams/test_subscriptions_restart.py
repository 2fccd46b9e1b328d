"""Subscriptions survive restarts, crashes at the worst moment, and failing storage."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from streamfold.errors import OutcomeUnknownError
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.store import StreamStore, open_store
from streamfold.testing.engine_faults import CommitFault, FaultyEngine
from streamfold.wire.durable_streams.offsets import format_offset
from tests.server.durable_streams.subscribing import (
    BASIN,
    DONE,
    Bench,
    Clock,
    answer,
    append,
    create,
    is_held,
    next_message,
    receiving,
    serving,
)
from tests.server.durable_streams.test_subscriptions import START, code, pull, webhook
from tests.server.durable_streams.test_subscriptions_pull import of


class Engines:
    """Stores on one location, each of which ends as by a restart; their commits can be spoilt."""

    def __init__(self) -> None:
        self.location = open_location("memory:")
        self.last: FaultyEngine | None = None

    async def open(self) -> FaultyEngine:
        self.last = FaultyEngine(await SlateEngine.open(self.location))
        return self.last

    def fail_next(self, fault: CommitFault) -> None:
        assert self.last is not None
        self.last.fail_next(fault)


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@asynccontextmanager
async def restarted(engines: Engines, clock: Clock) -> AsyncIterator[Bench]:
    async with (
        open_store(engines.location, opener=engines.open) as store,
        serving(store, clock) as bench,
    ):
        yield bench


async def prepare(store: StreamStore) -> None:
    await store.create_basin(BASIN)
    await create(store, "wakes")


async def test_subscriptions_links_and_acks_survive(engines: Engines, clock: Clock) -> None:
    async with open_store(engines.location, opener=engines.open) as store:
        await prepare(store)
        async with serving(store, clock) as bench:
            await bench.put("s", **pull(streams=["named"], description="kept"))
            await create(store, "events/a", 1, 2)
            claimed = await bench.claim("s")
            await bench.post("s", "ack", of(claimed, ("events/a", 1), done=True), claimed["token"])
            before = await bench.get("s")
    async with restarted(engines, clock) as bench:
        assert await bench.get("s") == before
        assert (await bench.put("s", **pull(streams=["named"], description="kept"))).is_success
        await append(bench.store, "events/a", 3)
        again = await bench.claim("s")
        assert again["generation"] == 2
        [stream] = [s for s in again["streams"] if s["path"] == "events/a"]
        assert stream["acked_offset"] == format_offset(1)
        assert stream["tail_offset"] == format_offset(3)


async def test_a_claim_continues_after_a_restart_until_its_lease_is_over(
    engines: Engines, clock: Clock
) -> None:
    async with open_store(engines.location, opener=engines.open) as store:
        await prepare(store)
        async with serving(store, clock) as bench:
            await bench.put("s", **pull(lease_ttl_ms=1000))
            await create(store, "events/a", 1)
            await next_message(store, "wakes", 0)
            claimed = await bench.claim("s")
    async with restarted(engines, clock) as bench:
        clock.now += 900
        busy = await bench.post("s", "claim", {"worker": "worker-2"})
        assert code(busy) == (409, "ALREADY_CLAIMED")
        assert busy.json()["error"]["current_holder"] == "worker-1"
        said = await bench.post("s", "ack", of(claimed), claimed["token"])
        assert said.status_code == 200
    clock.now += 1000
    async with restarted(engines, clock) as bench:
        assert (await next_message(bench.store, "wakes", 1))["generation"] == 2
        late = await bench.post("s", "ack", of(claimed), claimed["token"])
        assert code(late) == (409, "FENCED")


async def test_a_receiver_that_was_called_before_the_restart_can_call_back(
    engines: Engines, clock: Clock
) -> None:
    async with receiving() as receiver:
        async with open_store(engines.location, opener=engines.open) as store:
            await prepare(store)
            async with serving(store, clock) as bench:
                await bench.put("s", **webhook(receiver))
                await create(store, "events/a", 1)
                hook = await receiver.hook()
                await bench.stored("s", is_held)
        async with restarted(engines, clock) as bench:
            ack = hook.ack(("events/a", format_offset(1)), done=True)
            said = await bench.post("s", "callback", ack, hook.body["callback_token"])
            assert said.json() == {"ok": True, "next_wake": False}
            assert receiver.hooks.empty()


async def test_a_webhook_that_was_under_way_is_sent_again_and_the_first_is_fenced(
    engines: Engines, clock: Clock
) -> None:
    async with receiving() as receiver:
        receiver.answer = None
        async with open_store(engines.location, opener=engines.open) as store:
            await prepare(store)
            async with serving(store, clock) as bench:
                await bench.put("s", **webhook(receiver))
                await create(store, "events/a", 1)
                first = await receiver.hook()
        receiver.answer = answer()
        async with restarted(engines, clock) as bench:
            second = await receiver.hook()
            assert second.body["generation"] > first.body["generation"]
            late = await bench.post("s", "callback", first.ack(), first.body["callback_token"])
            assert code(late) == (409, "FENCED")


async def test_a_schedule_of_retries_survives(engines: Engines, clock: Clock) -> None:
    async with receiving() as receiver:
        receiver.answer = answer(503)
        async with open_store(engines.location, opener=engines.open) as store:
            await prepare(store)
            async with serving(store, clock) as bench:
                await bench.put("s", **webhook(receiver))
                await create(store, "events/a", 1)
                await receiver.hook()
                await bench.stored("s", lambda state: state.failures == 1)
                bench.pass_seconds(2)
                await receiver.hook()
                due = (await bench.stored("s", lambda s: s.failures == 2)).next_attempt_at
        receiver.answer = DONE
        async with restarted(engines, clock) as bench:
            # The token of the first wake is lost, so that there is another, not due before.
            await bench.stored("s", lambda s: s.generation == 2 and s.failures == 2)
            assert (await bench.get("s"))["status"] == "failed"
            assert receiver.hooks.empty()
            bench.pass_seconds((due - clock.now) / 1000)
            await receiver.hook()
            await bench.stored("s", lambda state: state.links["events/a"].acked == 1)


async def test_a_wake_that_was_not_announced_is_announced_after_a_crash(
    engines: Engines, clock: Clock
) -> None:
    async with open_store(engines.location, opener=engines.open) as store:
        await store.create_basin(BASIN)
        async with serving(store, clock) as bench:
            await bench.put("s", **pull())
            await create(store, "events/a", 1)  # the wake stream does not exist yet
            await bench.stored("s", lambda state: state.failures == 1)
        await create(store, "wakes")
        clock.now += 1200
        async with serving(store, clock):
            assert (await next_message(store, "wakes", 0))["stream"] == "events/a"


async def test_appends_while_no_subscription_runs_are_found(engines: Engines, clock: Clock) -> None:
    """As if the process had crashed after the append was durable and before the wake was."""
    async with open_store(engines.location, opener=engines.open) as store:
        await prepare(store)
        await create(store, "events/old", 1)
        async with serving(store, clock) as bench:
            await bench.put("s", **pull())
        await append(store, "events/old", 2)
        await create(store, "events/new", 1, 2)
        await create(store, "other", 1)
        async with serving(store, clock) as bench:
            await next_message(store, "wakes", 0)
            await bench.stored("s", lambda state: "events/new" in state.links)
            claimed = await bench.claim("s")
            positions = {s["path"]: s["acked_offset"] for s in claimed["streams"]}
            assert positions == {"events/old": format_offset(1), "events/new": START}


async def test_the_signing_key_stays_the_same(engines: Engines, clock: Clock) -> None:
    published = []
    for _ in range(2):
        async with restarted(engines, clock) as bench:
            published.append((await bench.client.get("/jwks.json")).json())
    assert published[0] == published[1]


async def test_a_deletion_survives(engines: Engines, clock: Clock) -> None:
    async with open_store(engines.location, opener=engines.open) as store:
        await prepare(store)
        async with serving(store, clock) as bench:
            await bench.put("s", **pull())
            await bench.client.delete("/subscriptions/s")
    async with restarted(engines, clock) as bench:
        gone = await bench.client.get("/subscriptions/s")
        assert code(gone) == (404, "SUBSCRIPTION_NOT_FOUND")


@pytest.mark.parametrize("fault", [CommitFault.BEFORE, CommitFault.AFTER])
async def test_after_an_ack_of_unknown_outcome_storage_decides(
    engines: Engines, clock: Clock, fault: CommitFault
) -> None:
    async with open_store(engines.location, opener=engines.open) as store:
        await prepare(store)
        async with serving(store, clock) as bench:
            await bench.put("s", **pull())
            await create(store, "events/a", 1)
            await next_message(store, "wakes", 0)
            claimed = await bench.claim("s")
            engines.fail_next(fault)
            ack = of(claimed, ("events/a", 1), done=True)
            unknown = await bench.post("s", "ack", ack, claimed["token"])
            assert unknown.status_code >= 500
            again = await bench.post("s", "ack", ack, claimed["token"])
            if fault is CommitFault.BEFORE:
                assert again.json() == {"ok": True, "next_wake": False}
            else:
                assert code(again) == (409, "FENCED")
            assert await bench.acked("s", "events/a") == format_offset(1)


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("fault", [CommitFault.BEFORE, CommitFault.AFTER])
async def test_after_a_creation_of_unknown_outcome_storage_decides(
    engines: Engines, clock: Clock, fault: CommitFault, asked: bool
) -> None:
    async with open_store(engines.location, opener=engines.open) as store:
        await prepare(store)
        async with serving(store, clock) as bench:
            engines.fail_next(fault)
            assert (await bench.put("s", **pull())).status_code >= 500
            if asked:
                shown = await bench.client.get("/subscriptions/s")
                assert shown.status_code == (404 if fault is CommitFault.BEFORE else 200)
            created = await bench.put("s", **pull())
            assert created.status_code == (201 if fault is CommitFault.BEFORE else 200)
            await create(store, "events/a", 1)
            await bench.claim("s")


@pytest.mark.parametrize("fault", [CommitFault.BEFORE, CommitFault.AFTER])
async def test_a_deletion_of_unknown_outcome_can_be_repeated(
    engines: Engines, clock: Clock, fault: CommitFault
) -> None:
    async with restarted(engines, clock) as bench:
        await prepare(bench.store)
        await bench.put("s", **pull())
        engines.fail_next(fault)
        assert (await bench.client.delete("/subscriptions/s")).status_code >= 500
        assert (await bench.client.delete("/subscriptions/s")).status_code == 204
        assert (await bench.client.get("/subscriptions/s")).status_code == 404


async def test_a_claim_of_unknown_outcome_is_announced_again_when_its_lease_is_over(
    engines: Engines, clock: Clock
) -> None:
    """No client knows its token, and none asks again: the work must not be lost."""
    async with restarted(engines, clock) as bench:
        await prepare(bench.store)
        await bench.put("s", **pull(lease_ttl_ms=1000))
        await create(bench.store, "events/a", 1)
        await next_message(bench.store, "wakes", 0)
        engines.fail_next(CommitFault.AFTER)
        assert (await bench.post("s", "claim", {"worker": "w"})).status_code >= 500
        await bench.stored("s", is_held)
        bench.pass_seconds(1)
        assert (await next_message(bench.store, "wakes", 1))["generation"] == 2


async def test_an_append_that_only_storage_knows_of_wakes_as_well(
    engines: Engines, clock: Clock
) -> None:
    """It was reported as of unknown outcome, and turned out to be there when storage reopened."""
    async with open_store(engines.location, opener=engines.open) as store:
        await prepare(store)
        await create(store, "events/a")
        async with serving(store, clock) as bench:
            await bench.put("s", **pull())
            await bench.stored("s", lambda state: "events/a" in state.links)
            engines.fail_next(CommitFault.AFTER)
            with pytest.raises(OutcomeUnknownError):
                await append(store, "events/a", 1)
            wake = await next_message(store, "wakes", 0)
            assert wake["stream"] == "events/a"


async def test_callbacks_go_where_the_server_is_reached_now(engines: Engines, clock: Clock) -> None:
    async with receiving() as receiver, open_store(engines.location, opener=engines.open) as store:
        await prepare(store)
        async with serving(store, clock) as bench:
            await bench.put("s", **webhook(receiver))
        async with serving(store, clock) as bench:  # on another port
            assert (await bench.put("s", **webhook(receiver))).status_code == 200
            await create(store, "events/a", 1)
            hook = await receiver.hook()
            assert str(bench.client.base_url.port) in hook.body["callback_url"]


async def test_of_a_token_only_its_hash_is_stored(engines: Engines, clock: Clock) -> None:
    async with receiving() as receiver, open_store(engines.location, opener=engines.open) as store:
        await prepare(store)
        async with serving(store, clock) as bench:
            await bench.put("hook", **webhook(receiver))
            await bench.put("pull", **pull())
            await create(store, "events/a", 1)
            tokens = [(await receiver.hook()).body["callback_token"]]
            tokens.append((await bench.claim("pull"))["token"])
            assert engines.last is not None
            written = b"".join(value or b"" for ops in engines.last.commits for _, value in ops)
            for token in tokens:
                assert token.encode() not in written
                assert hashlib.sha256(token.encode()).digest() in written
