"""LangGraph graphs on the saver: resume, time travel, subgraphs, programs without an event loop."""

from __future__ import annotations

import asyncio
import operator
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, StateSnapshot, interrupt

from streamfold_langgraph import StreamfoldSaver


class State(TypedDict):
    steps: Annotated[list[str], operator.add]


def plan(state: State) -> State:
    return {"steps": ["plan"]}


def ask(state: State) -> State:
    return {"steps": [f"asked: {interrupt('go on?')}"]}


def act(state: State) -> State:
    return {"steps": ["act"]}


def config(thread_id: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread_id}}


def graph(saver: BaseCheckpointSaver[Any]) -> CompiledStateGraph[State]:
    builder = StateGraph(State)
    for node in (plan, ask, act):
        builder.add_node(node.__name__, node)
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "ask")
    builder.add_edge("ask", "act")
    builder.add_edge("act", END)
    return builder.compile(checkpointer=saver)


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
async def test_another_process_resumes_where_the_first_was_interrupted(
    saver: StreamfoldSaver, other: StreamfoldSaver, durability: Any
) -> None:
    thread = config(f"resumed {durability}")
    begun = await graph(saver).ainvoke({"steps": []}, thread, durability=durability)
    assert begun["steps"] == ["plan"]
    assert begun["__interrupt__"][0].value == "go on?"
    done = await graph(other).ainvoke(Command(resume="yes"), thread, durability=durability)
    assert done["steps"] == ["plan", "asked: yes", "act"]
    assert (await graph(saver).aget_state(thread)).values == done


async def test_an_older_checkpoint_can_be_run_again_with_another_answer(
    saver: StreamfoldSaver,
) -> None:
    app, thread = graph(saver), config("forked")
    await app.ainvoke({"steps": []}, thread)
    await app.ainvoke(Command(resume="yes"), thread)
    asked = [found async for found in app.aget_state_history(thread) if found.next == ("ask",)]
    fork = await app.aupdate_state(asked[0].config, {"steps": ["thought again"]}, as_node="plan")
    await app.ainvoke(None, fork)
    done = await app.ainvoke(Command(resume="no"), thread)
    assert done["steps"] == ["plan", "thought again", "asked: no", "act"]
    finished = [
        found.values["steps"] async for found in app.aget_state_history(thread) if not found.next
    ]
    assert finished == [done["steps"], ["plan", "asked: yes", "act"]]


async def test_a_subgraph_has_its_checkpoints_in_the_same_stream(saver: StreamfoldSaver) -> None:
    inner = graph(saver)
    builder = StateGraph(State)
    builder.add_node("inner", inner)
    builder.add_edge(START, "inner")
    outer, thread = builder.compile(checkpointer=saver), config("nested")
    await outer.ainvoke({"steps": ["begin"]}, thread)
    state = await outer.aget_state(thread, subgraphs=True)
    inner_state = state.tasks[0].state
    assert isinstance(inner_state, StateSnapshot)
    assert inner_state.values["steps"] == ["begin", "plan"]
    done = await outer.ainvoke(Command(resume="yes"), thread)
    assert done["steps"][-2:] == ["asked: yes", "act"]
    assert [info.name async for info in saver._basin.list_all_streams()] == ["langgraph/nested"]


def test_a_program_without_an_event_loop_uses_the_same_saver(
    sync_endpoint: str, basin: str
) -> None:
    with StreamfoldSaver.connect_sync(sync_endpoint, basin=basin) as saver:
        app, thread = graph(saver), config("sync")
        app.invoke({"steps": []}, thread)
        done = app.invoke(Command(resume="yes"), thread)
        assert done["steps"] == ["plan", "asked: yes", "act"]
        assert len(list(app.get_state_history(thread))) == 5
        assert len(list(saver.list(thread, limit=2))) == 2
        # The caller's own event loop can wait for the saver's.
        assert asyncio.run(app.aget_state(thread)).values == done
        saver.copy_thread("sync", "copy")
        saver.prune(["sync"])
        assert len(list(saver.list(thread))) == 1
        assert len(list(saver.list(config("copy")))) == 5
        saver.delete_thread("sync")
        assert saver.get_tuple(thread) is None


async def test_a_call_that_would_block_the_savers_loop_is_refused(saver: StreamfoldSaver) -> None:
    with pytest.raises(asyncio.InvalidStateError, match="ainvoke"):
        graph(saver).get_state(config("blocked"))


async def test_parallel_tasks_store_their_writes(saver: StreamfoldSaver) -> None:
    builder = StateGraph(State)
    for number in range(20):
        builder.add_node(f"n{number}", lambda _, number=number: {"steps": [f"{number:02}"]})
        builder.add_edge(START, f"n{number}")
    done = await builder.compile(checkpointer=saver).ainvoke({"steps": []}, config("parallel"))
    assert sorted(done["steps"]) == [f"{number:02}" for number in range(20)]
