"""Stored bytes and time per step, beside LangGraph's own SQLite saver.

    python integrations/langgraph/bench.py --steps 200

An agent whose state is a list of messages gets one message per step, about 600 bytes of words. Both
savers sync to the same disk. Needs langgraph and langgraph-checkpoint-sqlite.
"""

from __future__ import annotations

import argparse
import asyncio
import operator
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from s2_sdk import ReadLimit, SeqNum

from streamfold import connect
from streamfold.server.config import Configuration
from streamfold.server.main import running_server
from streamfold_langgraph import StreamfoldSaver

BASIN = "bench-agents"
WORDS = 100
THREAD: RunnableConfig = {"configurable": {"thread_id": "bench"}, "recursion_limit": 10_000}


class State(TypedDict):
    messages: Annotated[list[AnyMessage], operator.add]


def agent(
    saver: BaseCheckpointSaver[Any], steps: int, times: list[float]
) -> CompiledStateGraph[State]:
    """Return a one-node graph that runs `steps` times and records when."""
    rng = random.Random(7)
    vocabulary = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(2000)]

    def say(state: State) -> State:
        times.append(time.perf_counter())
        number = len(state["messages"])
        words = random.Random(number).choices(vocabulary, k=WORDS)
        return {"messages": [AIMessage(" ".join(words), id=f"message-{number}")]}

    builder = StateGraph(State)
    builder.add_node("say", say)
    builder.add_edge(START, "say")
    builder.add_conditional_edges(
        "say", lambda state: END if len(state["messages"]) >= steps else "say"
    )
    return builder.compile(checkpointer=saver)


@asynccontextmanager
async def streamfold_saver(endpoint: str) -> AsyncIterator[StreamfoldSaver]:
    async with StreamfoldSaver.connect(endpoint, basin=BASIN) as saver:
        yield saver


async def measure(open_saver: Any, steps: int) -> dict[str, float]:
    """Milliseconds of a step, of resuming in a new process, and of reading a checkpoint half-way."""
    times: list[float] = []
    async with open_saver() as saver:
        await agent(saver, steps, times).ainvoke({"messages": []}, THREAD, durability="sync")
    gaps = [later - earlier for earlier, later in pairwise(times)]
    async with open_saver() as saver:
        began = time.perf_counter()
        newest = await saver.aget_tuple(THREAD)
        resumed = time.perf_counter() - began
        assert len(newest.checkpoint["channel_values"]["messages"]) == steps
        [half] = [found async for found in saver.alist(THREAD, filter={"step": steps // 2})]
    async with open_saver() as saver:
        await saver.aget_tuple(THREAD)
        began = time.perf_counter()
        assert await saver.aget_tuple(half.config) is not None
        travelled = time.perf_counter() - began
    return {
        "step, median": statistics.median(gaps) * 1000,
        "last 20 steps, median": statistics.median(gaps[-20:]) * 1000,
        "resume": resumed * 1000,
        "half-way checkpoint": travelled * 1000,
    }


async def stream_bytes(endpoint: str) -> int:
    """Return the bytes of all records in the thread's stream, including snapshotted ones."""
    async with connect(endpoint) as s2:
        stream = s2.basin(BASIN).stream("langgraph/bench")
        total, position = 0, 0
        tail = (await stream.check_tail()).seq_num
        while position < tail:
            batch = await stream.read(start=SeqNum(position), limit=ReadLimit(count=1000))
            total += sum(len(record.body) for record in batch.records)
            position = batch.records[-1].seq_num + 1
    return total


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


async def compare(steps: int, folder: Path) -> None:
    sqlite = folder / "sqlite"
    sqlite.mkdir()
    rows = {
        "SQLite": await measure(
            lambda: AsyncSqliteSaver.from_conn_string(f"{sqlite}/bench.db"), steps
        )
    }
    sizes = {"SQLite": (folder_bytes(sqlite), folder_bytes(sqlite))}
    store = folder / "streamfold"
    settings = Configuration(
        host="127.0.0.1", port=0, access_log=False, location=store.as_uri(), console=None
    )
    async with running_server(settings) as server:
        await server.store.create_basin(BASIN)
        endpoint = f"http://127.0.0.1:{server.port}"
        rows["Streamfold"] = await measure(lambda: streamfold_saver(endpoint), steps)
        logical = await stream_bytes(endpoint)
    sizes["Streamfold"] = (logical, folder_bytes(store))
    for name, figures in rows.items():
        stored, on_disk = sizes[name]
        print(f"{name}: {stored / 1e6:.2f} MB stored, {on_disk / 1e6:.2f} MB on disk")
        for what, milliseconds in figures.items():
            print(f"  {what}: {milliseconds:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(options.steps, Path(folder)))


if __name__ == "__main__":
    main()
