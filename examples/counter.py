"""A collaborative counter: several people add to it, and a snapshot taker keeps the stream short."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta

from s2_sdk import S2, AppendInput, Endpoints, Record, S2Stream, StreamConfig, Timeout

from streamfold.follow import (
    Follower,
    Outcome,
    Policy,
    SnapshotTaker,
    Taken,
    follow,
    in_stream,
)
from streamfold.follow.folds import counter
from streamfold.server.config import Configuration
from streamfold.server.main import running_server

BASIN, STREAM = "example-basin", "votes"
#: By default, records expire after 7 days, and the state would be lost with them.
FOR_GOOD = StreamConfig(retention_policy="infinite")
#: S2's client repeats an append that takes longer, and it would count twice.
PATIENCE = Timeout(request=timedelta(minutes=1))
PEOPLE, VOTES = 5, 40


async def vote(stream: S2Stream, rng: random.Random) -> int:
    """Add to the counter again and again; returns how much in all."""
    total = 0
    for _ in range(VOTES):
        amount = rng.randint(1, 9)
        await stream.append(AppendInput([Record(str(amount).encode())]))
        total += amount
        await asyncio.sleep(rng.random() / 20)  # people think before they click
    return total


async def show(state: Follower[int]) -> None:
    """Print the counter now and then, as it changes."""
    seen = 0
    async for change in state:
        seen += 1
        if seen % 50 == 0 or change.restored:
            print(f"  the counter stands at {state.value}")


async def run(stream: S2Stream) -> None:
    saved = asyncio.Event()

    def report(taken: Taken) -> None:
        if taken.outcome is Outcome.TAKEN:
            saved.set()
            print(f"  snapshot of everything before {taken.cursor}, as one {taken.placement}")

    async with (
        SnapshotTaker(
            stream,
            fold=counter,
            initial=int,
            snapshots=in_stream(),
            policy=Policy(records=60, bytes=None, replay=None),
            on_taken=report,
        ) as taker,
        follow(stream, fold=counter, initial=int, snapshots=in_stream()) as state,
    ):
        tasks = [asyncio.create_task(taker.run()), asyncio.create_task(show(state))]
        people = (vote(stream, random.Random(person)) for person in range(PEOPLE))
        total = sum(await asyncio.gather(*people))
        await saved.wait()  # at the latest when everybody is quiet
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await state.catch_up()
        assert state.value == total, (state.value, total)
    print(f"{PEOPLE} people added {total} in all, and so it stands")
    async with follow(stream, fold=counter, initial=int, snapshots=in_stream()) as late:
        print(f"a newcomer reads {late.plan.records} records to know: {late.value}")


async def main() -> None:
    quiet = Configuration(host="127.0.0.1", port=0, access_log=False)
    async with running_server(quiet) as server:
        url = f"http://127.0.0.1:{server.port}"
        async with S2("ignored", endpoints=Endpoints(url, url), timeout=PATIENCE) as s2:
            await s2.create_basin(BASIN)
            await s2.basin(BASIN).create_stream(STREAM, config=FOR_GOOD)
            await run(s2.basin(BASIN).stream(STREAM))


if __name__ == "__main__":
    asyncio.run(main())
