"""The dispatcher: at least once, in order, and in nobody's way."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from streamfold.archive.destinations.destination import Destination
from streamfold.archive.events import Backoff, Event, EventSink, MemorySink
from streamfold.errors import InvalidError
from streamfold.testing.event_faults import FaultyEventSink, SinkCall
from streamfold.testing.faults import NO_FAULT, Fault, FaultKind, ScriptedFaults, SeededFaults
from tests.archive.events.feeds import (
    Pauses,
    Table,
    deliver_all,
    new_dispatcher,
    running,
    without_repetitions,
)


class HeldSink(EventSink):
    """Takes events only while the gate is open."""

    def __init__(self) -> None:
        self.inner = MemorySink()
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()

    async def send(self, event: Event) -> None:
        self.asked.set()
        await self.gate.wait()
        await self.inner.send(event)


class DefectiveSink(EventSink):
    """Takes events only once it is repaired."""

    def __init__(self) -> None:
        self.inner = MemorySink()
        self.repaired = False

    async def send(self, event: Event) -> None:
        if not self.repaired:
            raise KeyError("secret")
        await self.inner.send(event)


async def test_everything_committed_arrives_in_order(destination: Destination) -> None:
    table, sink = await Table.create(destination), MemorySink()
    async with running(new_dispatcher(destination, {"sink": sink})) as dispatcher:
        for _ in range(3):
            await table.commit_diff()
            await table.rebase()
            await dispatcher.settle()
    assert sink.events == table.committed


async def test_a_dispatcher_without_sinks_runs_until_it_is_stopped(
    destination: Destination,
) -> None:
    async with running(new_dispatcher(destination, {})) as dispatcher:
        await dispatcher.settle()
        dispatcher.wake()
    assert (dispatcher.lag, dispatcher.errors) == ({}, {})


async def test_a_wake_is_enough(destination: Destination) -> None:
    table, sink = await Table.create(destination), MemorySink()
    async with (
        asyncio.timeout(300),
        running(new_dispatcher(destination, {"sink": sink})) as dispatcher,
    ):
        await sink.wait_for(1)
        await table.commit_diff()
        dispatcher.wake()
        assert await sink.wait_for(2) == table.committed


async def test_commits_of_other_processes_are_found_without_a_wake(
    destination: Destination,
) -> None:
    table, sink = await Table.create(destination), MemorySink()
    async with (
        asyncio.timeout(300),
        running(new_dispatcher(destination, {"sink": sink}, poll_interval=0.01)),
    ):
        await sink.wait_for(1)
        await table.commit_diff()
        assert await sink.wait_for(2) == table.committed


async def test_a_table_without_a_base_has_no_events_yet(destination: Destination) -> None:
    sink = MemorySink()
    async with running(new_dispatcher(destination, {"sink": sink})) as dispatcher:
        await dispatcher.settle()
        assert (sink.events, dict(dispatcher.lag)) == ([], {"sink": 0})
        table = await Table.create(destination)
        await dispatcher.settle()
    assert sink.events == table.committed


async def test_what_was_committed_while_no_dispatcher_ran_is_sent_once(
    destination: Destination,
) -> None:
    table, sink = await Table.create(destination), MemorySink()
    await deliver_all(destination, sink=sink)
    await table.commit_diff()
    await table.rebase()
    await deliver_all(destination, sink=sink)
    await deliver_all(destination, sink=sink)
    assert sink.events == table.committed


async def test_a_sink_that_is_added_later_gets_all_that_is_live(destination: Destination) -> None:
    table, old, new = await Table.create(destination), MemorySink(), MemorySink()
    await table.commit_diff()
    await deliver_all(destination, old=old)
    await deliver_all(destination, old=old, new=new)
    assert old.events == new.events == table.committed


@pytest.mark.parametrize("kind", SinkCall.SEND.kinds)
async def test_a_failed_event_holds_back_those_after_it(
    destination: Destination, kind: FaultKind
) -> None:
    table, sink = await Table.create(destination), MemorySink()
    for _ in range(3):
        await table.commit_diff()
    fault = Fault(kind)
    script = {SinkCall.SEND: [NO_FAULT, fault, fault, NO_FAULT, fault]}
    faulty = FaultyEventSink(sink, ScriptedFaults(script))
    dispatcher = await deliver_all(destination, sink=faulty)
    assert without_repetitions(sink.events) == table.committed
    positions = [int(event.to_position) for event in sink.events]
    assert positions == sorted(positions)
    assert len(positions) == (7 if kind is FaultKind.AFTER else 4)
    assert dispatcher.errors == {"sink": 3}


async def test_order_holds_under_many_failures(destination: Destination) -> None:
    seed = 20260603
    rng = random.Random(seed)
    table, sink = await Table.create(destination), MemorySink()
    faulty = FaultyEventSink(sink, SeededFaults(rng, {SinkCall.SEND: 0.5}))
    async with running(new_dispatcher(destination, {"sink": faulty}, seed=seed)) as dispatcher:
        for _ in range(30):
            await (table.rebase() if rng.random() < 0.3 else table.commit_diff())
            if rng.random() < 0.5:
                await dispatcher.settle()
        await dispatcher.settle()
    assert without_repetitions(sink.events) == table.committed, f"seed {seed}"
    ranks = {event.event_id: rank for rank, event in enumerate(table.committed)}
    order = [ranks[event.event_id] for event in sink.events]
    assert order == sorted(order), f"seed {seed}: repetitions come at once, not later"


async def test_pauses_grow_and_end_with_the_failures(destination: Destination) -> None:
    table, sink, pauses = await Table.create(destination), MemorySink(), Pauses()
    before = Fault(FaultKind.BEFORE)
    script = {SinkCall.SEND: [before] * 6 + [NO_FAULT, before]}
    await table.commit_diff()
    faulty = FaultyEventSink(sink, ScriptedFaults(script))
    dispatcher = new_dispatcher(
        destination, {"sink": faulty}, pauses=pauses, backoff=Backoff(1.0, 10.0)
    )
    async with running(dispatcher):
        await dispatcher.settle()
    assert sink.events == table.committed
    wholes = [1, 2, 4, 8, 10, 10, 1]
    for pause, whole in zip(pauses.lengths, wholes, strict=True):
        assert whole / 2 <= pause <= whole
    assert len(set(pauses.lengths)) == len(wholes), "jitter tells them apart"


async def test_pauses_are_the_same_for_the_same_seed(destination: Destination) -> None:
    await Table.create(destination)

    async def lengths(seed: int, name: str) -> list[float]:
        pauses = Pauses()
        faulty = FaultyEventSink(
            MemorySink(), ScriptedFaults({SinkCall.SEND: [Fault(FaultKind.LOST)] * 4})
        )
        async with running(
            new_dispatcher(destination, {name: faulty}, seed=seed, pauses=pauses)
        ) as p:
            await p.settle()
        return pauses.lengths

    assert await lengths(1, "a") == await lengths(1, "b") != await lengths(2, "c")


async def test_a_sink_that_hangs_stops_neither_the_commits_nor_the_others(
    destination: Destination,
) -> None:
    table, quick, slow = await Table.create(destination), MemorySink(), HeldSink()
    async with (
        asyncio.timeout(300),
        running(new_dispatcher(destination, {"quick": quick, "slow": slow})) as dispatcher,
    ):
        await slow.asked.wait()
        for _ in range(3):
            await table.commit_diff()
            dispatcher.wake()
        assert await quick.wait_for(4) == table.committed
        assert slow.inner.events == []
        slow.gate.set()
        await dispatcher.settle()
    assert slow.inner.events == table.committed


async def test_a_sink_that_is_down_stops_no_other(destination: Destination) -> None:
    table, up, down = await Table.create(destination), MemorySink(), MemorySink()
    pauses = Pauses()
    await down.close()
    async with (
        asyncio.timeout(300),
        running(new_dispatcher(destination, {"up": up, "down": down}, pauses=pauses)) as dispatcher,
    ):
        for count in range(2, 5):
            await table.commit_diff()
            dispatcher.wake()
            await up.wait_for(count)
        await pauses.begun.wait()
        status = dispatcher.status["down"]
    assert up.events == table.committed
    assert status.errors == status.failures_in_row > 0
    assert status.last_error == "the sink is closed: open another one"
    assert dispatcher.errors["up"] == 0


async def test_a_sink_with_a_defect_stops_no_other_and_says_so(
    destination: Destination, caplog: pytest.LogCaptureFixture
) -> None:
    table, right, wrong = await Table.create(destination), MemorySink(), DefectiveSink()
    sinks, pauses = {"right": right, "wrong": wrong}, Pauses()
    with caplog.at_level(logging.WARNING, logger="streamfold"):
        async with (
            asyncio.timeout(300),
            running(new_dispatcher(destination, sinks, pauses=pauses)) as dispatcher,
        ):
            for count in range(2, 5):
                await table.commit_diff()
                dispatcher.wake()
                await right.wait_for(count)
            await pauses.begun.wait()
            assert dispatcher.errors["wrong"] > 0
            assert dispatcher.status["wrong"].last_error == "a defect of the sink (KeyError)"
            wrong.repaired = True
            await dispatcher.settle()
    assert right.events == wrong.inner.events == table.committed
    assert "a defect of the sink (KeyError)" in caplog.text
    assert "secret" not in caplog.text


async def test_lag_counts_what_is_still_to_come(destination: Destination) -> None:
    table, sink = await Table.create(destination), HeldSink()
    for _ in range(4):
        await table.commit_diff()
    async with (
        asyncio.timeout(300),
        running(new_dispatcher(destination, {"sink": sink})) as dispatcher,
    ):
        await sink.asked.wait()
        assert dispatcher.lag == {"sink": 5}
        sink.gate.set()
        await dispatcher.settle()
        assert dispatcher.lag == {"sink": 0}
        status = dispatcher.status["sink"]
    assert (status.delivered, status.position, status.errors) == (5, "4", 0)


async def test_a_pruned_backlog_becomes_one_gap_notice(destination: Destination) -> None:
    table, sink = await Table.create(destination), MemorySink()
    await table.commit_diff()
    await deliver_all(destination, sink=sink)
    for _ in range(3):
        await table.commit_diff()
        await table.rebase()
    await table.commit_diff()
    await table.prune()
    await deliver_all(destination, sink=sink)
    assert sink.events == [*table.committed[:2], table.gap_notice(), table.committed[-1]]
    assert table.gap_notice().gap


async def test_pruning_what_was_delivered_makes_no_gap(destination: Destination) -> None:
    table, sink = await Table.create(destination), MemorySink()
    for _ in range(4):
        await table.commit_diff()
        await table.rebase()
        await deliver_all(destination, sink=sink)
        await table.prune()
    assert sink.events == table.committed
    assert not any(event.gap for event in sink.events)


async def test_a_base_after_lost_changes_is_announced_as_a_gap(destination: Destination) -> None:
    table, sink = await Table.create(destination), MemorySink()
    await table.commit_gap()
    await table.commit_diff()
    await deliver_all(destination, sink=sink)
    assert sink.events == table.committed
    assert [event.gap for event in sink.events] == [False, True, False]


async def test_failures_are_logged_with_the_sink_and_what_went_wrong(
    destination: Destination, caplog: pytest.LogCaptureFixture
) -> None:
    await Table.create(destination)
    faulty = FaultyEventSink(
        MemorySink(), ScriptedFaults({SinkCall.SEND: [Fault(FaultKind.BEFORE)]})
    )
    with caplog.at_level(logging.WARNING, logger="streamfold"):
        await deliver_all(destination, orders=faulty)
    [record] = caplog.records
    assert "sink orders" in record.getMessage()
    assert "injected" in record.getMessage()


@pytest.mark.parametrize(("first", "longest"), [(0, 1), (-1, 1), (2, 1)])
def test_pauses_that_make_no_sense_are_refused(first: float, longest: float) -> None:
    with pytest.raises(InvalidError):
        Backoff(first, longest)


def test_pauses_stay_bounded_after_any_number_of_failures() -> None:
    assert Backoff().pause(10**6, random.Random(1)) <= Backoff().longest
