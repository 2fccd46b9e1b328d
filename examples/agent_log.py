"""An agent session log: after a crash, one read restores the conversation.

The stream holds every step and the snapshots, so resuming needs nothing but the stream, and the log
stays short.
"""

from __future__ import annotations

import asyncio

import msgspec
from s2_sdk import S2, AppendInput, Endpoints, Record, S2Stream, StreamConfig

from streamfold.follow import JsonCodec, SnapshotTaker, StreamRecord, follow, in_stream
from streamfold.server.config import Configuration
from streamfold.server.main import running_server

BASIN, STREAM = "example-basin", "session/42"
#: By default, records expire after 7 days, and the state would be lost with them.
FOR_GOOD = StreamConfig(retention_policy="infinite")


class Step(msgspec.Struct):
    """One entry of the log."""

    role: str
    text: str
    tokens: int = 0


class Session(msgspec.Struct):
    """What the agent needs to resume: the last messages, and the tokens spent."""

    messages: list[Step] = msgspec.field(default_factory=list)
    steps: int = 0
    tokens: int = 0


#: Messages that fit into the agent's context.
CONTEXT = 4
SNAPSHOTS = in_stream(codec=JsonCodec[Session](Session))


def remember(session: Session, record: StreamRecord) -> Session:
    step = msgspec.json.decode(record.body, type=Step)
    session.messages = [*session.messages, step][-CONTEXT:]
    session.steps += 1
    session.tokens += step.tokens
    return session


async def log(stream: S2Stream, step: Step) -> None:
    await stream.append(AppendInput([Record(msgspec.json.encode(step))]))


async def work(stream: S2Stream, turns: int) -> None:
    """Answer some questions; whatever happened before is there."""
    async with follow(stream, fold=remember, initial=Session, snapshots=SNAPSHOTS) as state:
        before = state.value
        print(f"the agent begins with {before.steps} steps behind it, {before.tokens} tokens spent")
        print(f"  records that it read to know that: {state.plan.records}")
        for turn in range(before.steps // 2, before.steps // 2 + turns):
            await log(stream, Step("user", f"question {turn}"))
            await log(stream, Step("agent", f"answer {turn}", tokens=100 + turn))
        await state.catch_up()
        print(f"  and ends with {state.value.steps}; last: {state.value.messages[-1].text!r}")


async def main() -> None:
    quiet = Configuration(host="127.0.0.1", port=0, access_log=False)
    async with running_server(quiet) as server:
        url = f"http://127.0.0.1:{server.port}"
        async with S2("ignored", endpoints=Endpoints(url, url)) as s2:
            await s2.create_basin(BASIN)
            await s2.basin(BASIN).create_stream(STREAM, config=FOR_GOOD)
            stream = s2.basin(BASIN).stream(STREAM)
            await work(stream, turns=30)
            async with SnapshotTaker(
                stream, fold=remember, initial=Session, snapshots=SNAPSHOTS
            ) as taker:
                taken = await taker.take()
                print(f"a snapshot in the stream covers everything before {taken.cursor}")
            await work(stream, turns=2)


if __name__ == "__main__":
    asyncio.run(main())
