"""Saver calls as LangGraph makes them, with one channel."""

from __future__ import annotations

from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import Checkpoint, CheckpointTuple, empty_checkpoint

from streamfold_langgraph import StreamfoldSaver


def config(thread_id: str = "shared") -> RunnableConfig:
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}


def checkpoint(value: Any, version: int = 1) -> Checkpoint:
    return {
        **empty_checkpoint(),
        "channel_values": {"value": value},
        "channel_versions": {"value": version},
    }


async def put(saver: StreamfoldSaver, parent: RunnableConfig, value: Any) -> RunnableConfig:
    return await saver.aput(parent, checkpoint(value), {"source": "loop"}, {"value": 1})


async def values(saver: StreamfoldSaver) -> list[Any]:
    return [found.checkpoint["channel_values"]["value"] async for found in saver.alist(config())]


async def newest(saver: StreamfoldSaver) -> CheckpointTuple:
    found = await saver.aget_tuple(config())
    assert found is not None
    return found
