"""Two writers of a thread never interleave silently. Acknowledged checkpoints are stored once."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import pytest
from s2_sdk import S2Basin
from saver_calls import config, newest, put, values

from streamfold import Record, connect
from streamfold.errors import OutcomeUnknownError, RetryLaterError
from streamfold.follow import Backoff, as_client
from streamfold.testing import (
    Fault,
    FaultKind,
    FaultPlan,
    FaultyStream,
    ScriptedFaults,
    SeededFaults,
    StreamCall,
)
from streamfold_langgraph import StreamfoldSaver, ThreadConflictError


async def test_of_two_runs_from_one_checkpoint_the_second_is_refused(
    saver: StreamfoldSaver, other: StreamfoldSaver
) -> None:
    await put(saver, config(), "first")
    mine, theirs = (await newest(saver)).config, (await newest(other)).config
    theirs = await put(other, theirs, "theirs")
    with pytest.raises(ThreadConflictError, match="run the graph again"):
        await put(saver, mine, "mine")
    assert await values(saver) == ["theirs", "first"]
    await put(saver, (await newest(saver)).config, "after reading again")
    with pytest.raises(ThreadConflictError):
        await put(other, theirs, "too late")


async def test_of_two_first_runs_of_a_thread_the_second_is_refused(
    saver: StreamfoldSaver, other: StreamfoldSaver
) -> None:
    assert await saver.aget_tuple(config()) is None
    assert await other.aget_tuple(config()) is None
    await put(other, config(), "theirs")
    with pytest.raises(ThreadConflictError):
        await put(saver, config(), "mine")
    assert await values(saver) == ["theirs"]


async def test_two_runs_in_one_process_do_not_interleave_either(saver: StreamfoldSaver) -> None:
    await put(saver, config(), "first")
    began = (await newest(saver)).config
    await put(saver, began, "of one run")
    with pytest.raises(ThreadConflictError):
        await put(saver, began, "of the other")


async def test_a_checkpoint_that_was_read_by_its_id_can_be_forked(saver: StreamfoldSaver) -> None:
    old = await put(saver, config(), "first")
    await put(saver, old, "second")
    assert await saver.aget_tuple(old) is not None
    await put(saver, old, "fork")
    assert await values(saver) == ["fork", "second", "first"]
    assert (await newest(saver)).parent_config == old


async def test_writes_of_both_are_stored_and_the_first_of_a_task_counts(
    saver: StreamfoldSaver, other: StreamfoldSaver
) -> None:
    at = await put(saver, config(), "first")
    await asyncio.gather(
        *(
            writer.aput_writes(at, [("value", number)], f"task-{number}")
            for number in range(20)
            for writer in (saver, other)
        )
    )
    await saver.aput_writes(at, [("value", "once")], "task-x")
    await other.aput_writes(at, [("value", "again")], "task-x")
    writes = (await newest(other)).pending_writes
    assert writes is not None
    assert {task: value for task, _, value in writes} == {
        **{f"task-{number}": number for number in range(20)},
        "task-x": "once",
    }
    assert len(writes) == 21


async def test_a_record_of_somebody_else_in_between_is_no_conflict(
    saver: StreamfoldSaver, other: StreamfoldSaver, endpoint: str, basin: str
) -> None:
    mine = await put(saver, config(), "first")
    async with connect(endpoint) as s2:
        stream = as_client(s2.basin(basin).stream("langgraph/shared"))
        await stream.append([Record(b"a note")])
        await put(saver, mine, "second")
    assert await values(other) == ["second", "first"]


class FaultyBasin:
    """A basin whose streams fail according to a plan."""

    def __init__(self, basin: S2Basin, plan: FaultPlan) -> None:
        self._basin, self._plan = basin, plan

    def stream(self, name: str) -> FaultyStream:
        return FaultyStream(as_client(self._basin.stream(name)), self._plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._basin, name)


def failing(s2_basin: S2Basin, plan: FaultPlan) -> StreamfoldSaver:
    basin = cast("S2Basin", FaultyBasin(s2_basin, plan))
    return StreamfoldSaver(basin, backoff=Backoff(first=0.001, longest=0.002, attempts=3))


@pytest.mark.parametrize("kind", [FaultKind.AFTER, FaultKind.LOST])
async def test_a_checkpoint_whose_answer_was_lost_is_stored_once(
    kind: FaultKind, other: StreamfoldSaver, endpoint: str, basin: str
) -> None:
    plan = ScriptedFaults({StreamCall.APPEND: [Fault(), Fault(kind)]})
    async with connect(endpoint) as s2:
        saver = failing(s2.basin(basin), plan)
        at = await put(saver, config(), "first")
        at = await put(saver, at, "second")
        await put(saver, at, "third")
        await saver.aclose()
    assert await values(other) == ["third", "second", "first"]


async def test_an_outcome_that_stays_unknown_is_called_unknown(endpoint: str, basin: str) -> None:
    lost = [Fault(FaultKind.LOST)] * 8
    plan = ScriptedFaults({StreamCall.APPEND: [Fault(), *lost]})
    async with connect(endpoint) as s2:
        saver = failing(s2.basin(basin), plan)
        at = await put(saver, config(), "first")
        with pytest.raises(OutcomeUnknownError):
            await put(saver, at, "second")
        await saver.aclose()


@pytest.mark.parametrize("seed", range(3))
async def test_with_faults_every_acknowledged_checkpoint_is_stored_once_and_in_order(
    seed: int, other: StreamfoldSaver, endpoint: str, basin: str
) -> None:
    acknowledged, unknown = [], []
    async with connect(endpoint) as s2:
        saver = failing(
            s2.basin(basin),
            SeededFaults(random.Random(seed), 0.2, most_before_cut=20),
        )
        for number in range(60):
            try:
                at = await saver.aget_tuple(config())
                await put(saver, at.config if at else config(), number)
            except OutcomeUnknownError:
                unknown.append(number)
            except RetryLaterError:
                continue
            else:
                acknowledged.append(number)
        await saver.aclose()
    stored = (await values(other))[::-1]
    assert stored == sorted(set(stored))
    assert set(acknowledged) <= set(stored) <= {*acknowledged, *unknown}
    assert len(acknowledged) > 20
