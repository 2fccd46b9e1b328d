"""However many streams, subscriptions and segments there are, other tasks run in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import msgspec
import pytest
from msgspec.structs import replace

from streamfold.server.durable_streams.subscriptions.fairness import SLICE
from streamfold.store.store import StreamStore
from streamfold.wire.durable_streams.subscriptions import MANY_MAX, SEGMENTS_MAX
from tests.server.durable_streams.subscribing import (
    BASIN,
    Clock,
    append,
    create,
    read_subscription,
    serving,
)

KIND = f"ds-subscription/{BASIN}"
#: Looks at the clock until a slice is over.
STEPS = 5
#: Costs most: every segment of a path may be any of these.
COMPLEX = "**/a/" * 200 + "q"


class SlowMachine:
    """A clock by which every step takes a fifth of a slice."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.looks * SLICE / STEPS


class Turns:
    """How often other tasks ran."""

    count = 0


@asynccontextmanager
async def counting_turns() -> AsyncIterator[Turns]:
    turns = Turns()

    async def take_turns() -> None:
        while True:
            turns.count += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(take_turns())
    try:
        yield turns
    finally:
        task.cancel()


async def test_appends_to_many_streams_are_matched_in_slices(store: StreamStore) -> None:
    async with serving(store, Clock(), step_clock=SlowMachine()) as bench:
        await bench.put("s", type="pull-wake", pattern="none/*", wake_stream="wakes")
        registry = bench.subscriptions.registry
        for number in range(1000):
            registry.notice(f"a/{number}")
        async with counting_turns() as turns:
            async with registry.changing(registry.get("s")):
                pass
            assert turns.count >= 1000 // STEPS // 2  # some are spread at the same time


async def test_one_append_is_matched_against_many_subscriptions_in_slices(
    store: StreamStore,
) -> None:
    async with serving(store, Clock(), step_clock=SlowMachine()) as bench:
        for number in range(100):
            await bench.put(f"s{number}", type="pull-wake", pattern="b", wake_stream=f"w{number}")
        await bench.put("last", type="pull-wake", pattern="a", wake_stream="wakes")
        last = bench.subscriptions.registry.get("last")
        await asyncio.sleep(0)
        last.poked.clear()
        async with counting_turns() as turns:
            bench.subscriptions.notice("a")
            async with asyncio.timeout(60):
                await last.poked.wait()
            assert turns.count >= 100 // STEPS // 2


async def test_many_subscriptions_that_change_at_once_share_the_slices(store: StreamStore) -> None:
    async with serving(store, Clock(), step_clock=(clock := SlowMachine())) as bench:
        for number in range(20):
            await bench.put(f"s{number}", type="pull-wake", pattern="b", wake_stream=f"w{number}")
        registry, looks = bench.subscriptions.registry, [clock.looks]

        async def change(id_: str) -> None:
            async with registry.changing(registry.get(id_)):
                pass

        async def watch() -> None:
            while True:
                looks.append(clock.looks)
                await asyncio.sleep(0)

        for number in range(50):
            registry.notice(f"a/{number}")
        watching = asyncio.create_task(watch())
        await asyncio.gather(*(change(f"s{number}") for number in range(20)))
        watching.cancel()
        # One slice of a change, one of the spread, and what looks at the clock to begin one.
        longest = max(after - before for before, after in pairwise(looks))
        assert longest <= 6 * STEPS


async def test_an_append_is_seen_while_subscriptions_are_being_notified_of_it(
    store: StreamStore,
) -> None:
    """Those before it take many slices; this one asks in the middle of them."""
    await create(store, "wakes")
    async with serving(store, Clock(), step_clock=SlowMachine()) as bench:
        for number in range(50):
            await bench.put(f"s{number}", type="pull-wake", pattern="b", wake_stream=f"w{number}")
        await bench.put("last", type="pull-wake", pattern="a", wake_stream="wakes")
        await create(store, "a", 1)
        assert (await bench.claim("last"))["streams"][0]["path"] == "a"
        await append(store, "a", 2)
        assert (await bench.get("last"))["streams"][0]["path"] == "a"


async def test_streams_that_a_request_names_are_checked_in_slices(store: StreamStore) -> None:
    names = [f"a/{number}" for number in range(500)]
    async with serving(store, Clock(), step_clock=(clock := SlowMachine())) as bench:
        looks = clock.looks
        created = await bench.put("s", type="pull-wake", streams=names, wake_stream="wakes")
        assert created.status_code == 201, created.text
        # Once for each name, and once for the right to read it.
        assert clock.looks - looks >= 2 * len(names)
        looks = clock.looks
        linked = await bench.post("s", "streams", {"streams": [f"b/{name}" for name in names]})
        assert linked.status_code == 204, linked.text
        assert clock.looks - looks >= 2 * len(names)


@pytest.mark.parametrize(
    "pattern", ["a/" * SEGMENTS_MAX + "a", "**/a/" * MANY_MAX + "**", COMPLEX], ids=str.__len__
)
async def test_a_pattern_that_takes_long_to_match_is_refused(
    store: StreamStore, pattern: str
) -> None:
    async with serving(store, Clock()) as bench:
        refused = await bench.put("s", type="pull-wake", pattern=pattern, wake_stream="wakes")
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["code"] == "INVALID_REQUEST"
        assert f"{SEGMENTS_MAX} and {MANY_MAX}" in error["message"]
        simple = "**/a/" * MANY_MAX + "a/" * (SEGMENTS_MAX - 2 * MANY_MAX - 1) + "a"
        created = await bench.put("s", type="pull-wake", pattern=simple, wake_stream="wakes")
        assert created.status_code == 201, created.text


async def test_a_stored_pattern_keeps_working_however_long_it_takes_to_match(
    store: StreamStore,
) -> None:
    asked = {"type": "pull-wake", "wake_stream": "wakes"}
    async with serving(store, Clock()) as bench:
        await bench.put("s", pattern="q", **asked)
        state = await bench.stored("s", lambda state: True)
    state = replace(state, config=replace(state.config, pattern=COMPLEX))
    await store.documents.put(KIND, "s", msgspec.msgpack.encode(state))
    await create(store, "wakes")
    async with serving(store, Clock()) as bench:
        await create(store, "a/" * 200 + "q", 1)
        assert (await bench.claim("s"))["streams"][0]["path"] == "a/" * 200 + "q"
        assert (await bench.put("s", pattern=COMPLEX, **asked)).status_code == 200
        stored = await read_subscription(store, "s")
        assert stored is not None
        assert stored.config.pattern == COMPLEX
