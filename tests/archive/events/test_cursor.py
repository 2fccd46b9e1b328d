"""Delivery cursors: after a stop, events are repeated but never lost or mixed up."""

from __future__ import annotations

import asyncio
import json

import pytest

from streamfold.archive.destinations.destination import Destination
from streamfold.archive.events import (
    Event,
    EventDispatcher,
    EventSink,
    MemorySink,
)
from streamfold.archive.events.delivery import CURSOR_EVERY
from streamfold.errors import InvalidError
from streamfold.testing.blob_faults import FaultyBlobStore, Operation
from streamfold.testing.faults import Fault, FaultKind, ScriptedFaults
from tests.archive.events.feeds import (
    Pauses,
    Table,
    deliver_all,
    new_dispatcher,
    running,
    without_repetitions,
)


async def cursor_of(destination: Destination, sink: str = "sink") -> dict[str, object]:
    data = await destination.blobs.get(f"events/{sink}.json")
    return dict(json.loads(data))


async def test_the_cursor_says_what_was_delivered_last(destination: Destination) -> None:
    table, sink = await Table.create(destination), MemorySink()
    await table.commit_diff()
    await deliver_all(destination, sink=sink)
    cursor = await cursor_of(destination)
    assert cursor["event_id"] == table.committed[-1].event_id
    assert (cursor["version"], cursor["sink"]) == (1, "sink")
    assert (cursor["revision"], cursor["updated_at"]) == (1, "2026-06-03T12:00:00.000000Z")


async def test_a_stop_between_sending_and_the_cursor_repeats_and_loses_nothing(
    destination: Destination,
) -> None:
    table, sink = await Table.create(destination), MemorySink()
    await deliver_all(destination, sink=sink)
    await table.commit_diff()
    at_write = asyncio.Event()

    async def hang(_: float) -> None:
        at_write.set()
        await asyncio.Event().wait()

    hanging = ScriptedFaults({Operation.PUT_IF_MATCH: [Fault(delay=1)]})
    blobs = FaultyBlobStore(destination.blobs, hanging, sleep=hang)
    async with running(
        new_dispatcher(Destination(blobs, destination.uri), {"sink": sink})
    ) as dispatcher:
        dispatcher.wake()
        async with asyncio.timeout(300):
            await at_write.wait()
    assert sink.events == table.committed
    await table.commit_diff()
    await deliver_all(destination, sink=sink)
    assert [event.to_position for event in sink.events] == ["0", "1", "1", "2"]
    assert without_repetitions(sink.events) == table.committed


@pytest.mark.parametrize("kind", [FaultKind.BEFORE, FaultKind.AFTER])
@pytest.mark.parametrize("operation", [Operation.PUT_IF_ABSENT, Operation.PUT_IF_MATCH])
async def test_a_cursor_write_that_fails_is_repeated_and_the_event_is_not(
    destination: Destination, operation: Operation, kind: FaultKind
) -> None:
    table, sink = await Table.create(destination), MemorySink()
    faults = ScriptedFaults({operation: [Fault(kind), Fault(kind)]})
    faulty = Destination(FaultyBlobStore(destination.blobs, faults), destination.uri)
    async with running(new_dispatcher(faulty, {"sink": sink})) as dispatcher:
        await dispatcher.settle()
        for _ in range(2):
            await table.commit_diff()
            await dispatcher.settle()
    assert sink.events == table.committed
    assert dispatcher.errors["sink"] >= 1
    await deliver_all(destination, sink=sink)
    assert sink.events == table.committed, "the cursor was stored in the end"


async def test_nothing_more_is_sent_while_the_cursor_cannot_be_stored(
    destination: Destination,
) -> None:
    table, sink, pauses = await Table.create(destination), MemorySink(), Pauses()
    faults = ScriptedFaults({Operation.PUT_IF_ABSENT: [Fault(FaultKind.BEFORE)] * 100})
    faulty = Destination(FaultyBlobStore(destination.blobs, faults), destination.uri)
    async with (
        asyncio.timeout(300),
        running(new_dispatcher(faulty, {"sink": sink}, pauses=pauses)) as dispatcher,
    ):
        await pauses.begun.wait()
        await table.commit_diff()
        sent_meanwhile = list(sink.events)
        await dispatcher.settle()
    assert len(pauses.lengths) == 100
    assert sent_meanwhile == table.committed[:1]
    assert sink.events == table.committed


async def test_storage_that_is_away_delays_events_only(destination: Destination) -> None:
    table, sink = await Table.create(destination), MemorySink()
    faults = ScriptedFaults({Operation.GET_WITH_ETAG: [Fault(FaultKind.BEFORE)] * 5})
    faulty = Destination(FaultyBlobStore(destination.blobs, faults), destination.uri)
    dispatcher = await deliver_all(faulty, sink=sink)
    assert sink.events == table.committed
    assert dispatcher.errors == {"sink": 5}


async def test_a_long_backlog_is_not_repeated_from_its_beginning(destination: Destination) -> None:
    table, sink = await Table.create(destination), MemorySink()
    for _ in range(2 * CURSOR_EVERY):
        await table.commit_diff()

    class Stop(BaseException):
        pass

    class StoppingSink(EventSink):
        async def send(self, event: Event) -> None:
            if len(sink.events) == CURSOR_EVERY + 3:
                raise Stop
            await sink.send(event)

    with pytest.raises(BaseExceptionGroup) as ended:
        await new_dispatcher(destination, {"sink": StoppingSink()}).run()
    assert ended.group_contains(Stop)
    await deliver_all(destination, sink=sink)
    assert len(sink.events) == len(table.committed) + 3
    assert without_repetitions(sink.events) == table.committed


async def test_two_dispatchers_for_one_sink_lose_nothing(destination: Destination) -> None:
    table, sink = await Table.create(destination), MemorySink()
    first, second = (new_dispatcher(destination, {"sink": sink}) for _ in range(2))
    async with asyncio.timeout(300), running(first), running(second):
        for _ in range(5):
            await table.commit_diff()
            await asyncio.gather(first.settle(), second.settle())
    assert without_repetitions(sink.events) == table.committed
    cursor = await cursor_of(destination)
    assert cursor["event_id"] == table.committed[-1].event_id


async def test_a_deleted_cursor_sends_all_that_is_live_again(destination: Destination) -> None:
    table, sink = await Table.create(destination), MemorySink()
    await table.commit_diff()
    await deliver_all(destination, sink=sink)
    await destination.blobs.delete("events/sink.json")
    await deliver_all(destination, sink=sink)
    assert sink.events == table.committed * 2


async def test_a_pruning_before_the_first_cursor_leaves_no_unmarked_gap(
    destination: Destination,
) -> None:
    """The sink has events although no cursor says so: its process ended before it was stored."""
    table, sink = await Table.create(destination), MemorySink()
    await deliver_all(destination, sink=sink)
    await destination.blobs.delete("events/sink.json")
    await table.commit_diff()
    await table.rebase()
    await table.prune()
    await table.commit_diff()
    await deliver_all(destination, sink=sink)
    assert sink.events == [table.committed[0], table.gap_notice(), table.committed[-1]]


@pytest.mark.parametrize("data", [b"", b"no json", b"{}", b'{"version": 2}'])
async def test_a_cursor_that_cannot_be_read_stops_its_own_sink_only(
    destination: Destination, data: bytes
) -> None:
    table, sound, broken = await Table.create(destination), MemorySink(), MemorySink()
    await destination.blobs.put("events/broken.json", data)
    pauses = Pauses()
    dispatcher = new_dispatcher(destination, {"sound": sound, "broken": broken}, pauses=pauses)
    async with asyncio.timeout(300), running(dispatcher):
        await sound.wait_for(1)
        await pauses.begun.wait()
    message = str(dispatcher.status["broken"].last_error)
    assert (sound.events, broken.events) == (table.committed, [])
    assert "events/broken.json" in message
    assert "delete it" in message


async def test_a_cursor_of_a_later_version_is_not_guessed_at(destination: Destination) -> None:
    await Table.create(destination)
    sink = MemorySink()
    await deliver_all(destination, sink=sink)
    cursor = await cursor_of(destination) | {"version": 2}
    await destination.blobs.put("events/sink.json", json.dumps(cursor).encode())
    pauses = Pauses()
    dispatcher = new_dispatcher(destination, {"sink": sink}, pauses=pauses)
    async with asyncio.timeout(300), running(dispatcher):
        await pauses.begun.wait()
    assert "version is 2" in str(dispatcher.status["sink"].last_error)
    assert len(sink.events) == 1


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "ü", "a" * 65, "a b"])
def test_names_of_sinks_are_plain_file_names(destination: Destination, name: str) -> None:
    with pytest.raises(InvalidError, match="sink name"):
        EventDispatcher(destination, {name: MemorySink()})


async def test_cursors_survive_collection(destination: Destination) -> None:
    table, sink = await Table.create(destination), MemorySink()
    await table.rebase()
    await deliver_all(destination, sink=sink)
    await table.prune()
    assert (await cursor_of(destination))["sink"] == "sink"
