"""Random workers on one subscription, against a model of a few lines, through restarts."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from typing import Any

import pytest

from streamfold.store.store import StreamStore, open_store
from streamfold.wire.durable_streams.offsets import format_offset, parse_offset
from tests.proving import seeds
from tests.server.durable_streams.subscribing import BASIN, Bench, Clock, append, create, serving
from tests.server.durable_streams.test_subscriptions import pull

STREAMS = ("events/a", "events/b", "events/c")
#: Milliseconds.
LEASE = 1000


class Model:
    """What must be true: how far each stream is, who has the work, and until when."""

    def __init__(self, chance: random.Random, store: StreamStore, clock: Clock) -> None:
        self.chance = chance
        self.store = store
        self.clock = clock
        self.tails = dict.fromkeys(STREAMS, 0)
        self.acked = dict.fromkeys(STREAMS, 0)
        self.held: dict[str, Any] | None = None
        self.until = 0
        self.generation = 0
        #: Claims that are over.
        self.former: list[dict[str, Any]] = []

    @property
    def pending(self) -> bool:
        return self.tails != self.acked

    def lose(self) -> None:
        if self.held is not None:
            self.former.append(self.held)
        self.held = None

    async def append(self, bench: Bench) -> None:
        stream = self.chance.choice(STREAMS)
        count = self.chance.randint(1, 3)
        await append(self.store, stream, *range(count))
        self.tails[stream] += count

    async def pass_time(self, bench: Bench) -> None:
        bench.pass_seconds(self.chance.choice((0.1, 0.4, 1.0)))

    async def claim(self, bench: Bench) -> None:
        said = await bench.post("s", "claim", {"worker": "w"})
        if self.held is not None:
            assert said.json()["error"]["code"] == "ALREADY_CLAIMED"
        elif not self.pending:
            assert said.json()["error"]["code"] == "NO_PENDING_WORK"
        else:
            assert said.status_code == 200, said.text
            self.held = said.json()
            self.until = self.clock.now + LEASE
            assert self.held["generation"] > self.generation
            self.generation = self.held["generation"]
            reported = {
                stream["path"]: (parse_offset(stream["acked_offset"]), stream["tail_offset"])
                for stream in self.held["streams"]
            }
            for path in reported.keys() | {path for path in STREAMS if self.tails[path]}:
                assert reported[path] == (self.acked[path], format_offset(self.tails[path]))

    async def ack(self, bench: Bench) -> None:
        if self.held is None:
            return
        stream, done = self.chance.choice(STREAMS), self.chance.random() < 0.4
        position = self.chance.randint(self.acked[stream], self.tails[stream])
        acks = [{"stream": stream, "offset": format_offset(position)}] if self.tails[stream] else []
        body = {**_proof(self.held), "acks": acks, "done": done}
        said = await bench.post("s", "ack", body, self.held["token"])
        self.acked[stream] = position
        assert said.json() == {"ok": True, "next_wake": done and self.pending}
        self.until = self.clock.now + LEASE
        if done:
            self.lose()

    async def release(self, bench: Bench) -> None:
        if self.held is None:
            return
        said = await bench.post("s", "release", _proof(self.held), self.held["token"])
        assert said.status_code == 204
        self.lose()

    async def come_late(self, bench: Bench) -> None:
        """Who has lost the work changes nothing."""
        if not self.former:
            return
        late = self.chance.choice(self.former[-10:])
        acks = [{"stream": path, "offset": format_offset(self.tails[path])} for path in STREAMS]
        body = {**_proof(late), "acks": acks, "done": True}
        said = await bench.post("s", self.chance.choice(("ack", "release")), body, late["token"])
        assert said.json()["error"]["code"] == "FENCED"

    def tick(self) -> None:
        if self.held is not None and self.until <= self.clock.now:
            self.lose()


def _proof(claimed: dict[str, Any]) -> dict[str, Any]:
    return {"wake_id": claimed["wake_id"], "generation": claimed["generation"]}


@pytest.mark.parametrize("seed", seeds(2, proving=50))
async def test_work_is_done_by_one_at_a_time_and_never_lost(seed: int) -> None:
    chance, clock = random.Random(seed), Clock()
    async with open_store("memory:") as store:
        await store.create_basin(BASIN)
        for stream in (*STREAMS, "wakes"):
            await create(store, stream)
        model = Model(chance, store, clock)
        steps = (model.append, model.claim, model.ack, model.release, model.come_late)
        async with AsyncExitStack() as stack:
            bench = await stack.enter_async_context(serving(store, clock))
            await bench.put("s", **pull(lease_ttl_ms=LEASE))
            for number in range(150):
                step = chance.choices((*steps, model.pass_time), (4, 4, 5, 1, 2, 3))[0]
                print(f"seed {seed} step {number}: {step.__name__}")  # shown on failure
                await step(bench)
                model.tick()
                if chance.random() < 0.03:
                    await stack.aclose()
                    bench = await stack.enter_async_context(serving(store, clock))
            shown = {s["path"]: s["acked_offset"] for s in (await bench.get("s"))["streams"]}
            assert shown == {path: format_offset(at) for path, at in model.acked.items()}
