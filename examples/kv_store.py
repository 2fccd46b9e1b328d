"""A key-value store with two live replicas, one of which starts late, from a snapshot."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

from s2_sdk import S2, AppendInput, Endpoints, Record, S2Stream, StreamConfig

from streamfold.follow import Follower, SnapshotTaker, StreamRecord, external, follow
from streamfold.server.config import Configuration
from streamfold.server.main import running_server

BASIN, STREAM = "example-basin", "settings"
#: By default, records expire after 7 days, and the state would be lost with them.
FOR_GOOD = StreamConfig(retention_policy="infinite")
State = dict[str, str]


def apply(state: State, record: StreamRecord) -> State:
    change = json.loads(record.body)
    if change["value"] is None:
        state.pop(change["key"], None)
    else:
        state[change["key"]] = change["value"]
    return state


class Writer:
    """The side that changes values."""

    def __init__(self, stream: S2Stream) -> None:
        self._stream = stream

    async def put(self, key: str, value: str | None) -> None:
        body = json.dumps({"key": key, "value": value}).encode()
        await self._stream.append(AppendInput([Record(body)]))


async def replicate(name: str, replica: Follower[State], until: str) -> None:
    """Print every change as it arrives, until one key is there."""
    async for change in replica:
        print(f"  {name} saw change {change.seq_num}: {change.body.decode()}")
        if until in replica.value:
            return


async def main() -> None:
    quiet = Configuration(host="127.0.0.1", port=0, access_log=False)
    with tempfile.TemporaryDirectory() as folder:
        async with running_server(quiet) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with S2("ignored", endpoints=Endpoints(url, url)) as s2:
                await s2.create_basin(BASIN)
                await s2.basin(BASIN).create_stream(STREAM, config=FOR_GOOD)
                await run(s2.basin(BASIN).stream(STREAM), Path(folder).as_uri())


async def run(stream: S2Stream, snapshots_url: str) -> None:
    writer, snapshots = Writer(stream), external(snapshots_url)
    for number in range(200):
        await writer.put(f"key-{number % 50}", str(number))
    async with follow(stream, fold=apply, initial=dict, snapshots=snapshots) as early:
        print(f"an early replica replayed {early.plan.records} changes: {len(early.value)} keys")
        async with SnapshotTaker(stream, fold=apply, initial=dict, snapshots=snapshots) as taker:
            taken = await taker.take()
            print(f"a snapshot covers everything before {taken.cursor}")
        await writer.put("key-0", None)
        async with follow(stream, fold=apply, initial=dict, snapshots=snapshots) as late:
            print(f"a late replica plans:\n{late.plan}")
            both = asyncio.gather(
                replicate("early", early, "done"), replicate("late ", late, "done")
            )
            await writer.put("key-1", "changed")
            await writer.put("done", "yes")
            await both
            assert early.value == late.value
            print(f"both replicas have the same {len(late.value)} keys")


if __name__ == "__main__":
    asyncio.run(main())
