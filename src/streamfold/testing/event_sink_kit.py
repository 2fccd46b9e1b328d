"""Conformance tests for event sinks.

    class TestMySink(EventSinkConformance):
        @pytest.fixture
        def probe(self) -> SinkProbe:
            return MyProbe(...)     # a sink and its receiver, new for each test

Needs pytest and pytest-asyncio: `pip install streamfold[archive,testing]`.
"""

from __future__ import annotations

import asyncio
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

from streamfold.archive.events import (
    Event,
    EventRefusedError,
    EventSink,
    EventUnconfirmedError,
)
from streamfold.extras import needing_extra

with needing_extra("testing"):
    import pytest

#: Events per table in the ordering test. More than services deliver in one batch.
MANY = 25
#: Table names that some services reject unless escaped.
ODD_TABLES = ("with space", "größe.表", "a" * 300, 'quote"back\\slash', "line\nend", "x/y:z")


class SinkProbe(ABC):
    """A sink together with its receiving end."""

    sink: EventSink
    #: Whether a table's events arrive in the order sent.
    is_ordered = True
    #: Whether an event sent twice arrives once.
    drops_repetitions = False
    #: Strings that must not appear in any error message.
    secrets: Sequence[str] = ()

    @abstractmethod
    async def received(self, count: int) -> list[Event]:
        """Wait until `count` events have arrived, then return all received so far."""

    @abstractmethod
    async def break_target(self) -> None:
        """Make delivery impossible, for example by deleting the receiver."""


def sample_event(number: int = 0, table: str = "public.users") -> Event:
    """Return a diff event. Events of different numbers differ."""
    folder = "s3://bucket/public.users/"
    return Event(
        event_id=f"{number:032x}",
        table=table,
        kind="diff",
        epoch=1,
        from_position=str(number - 1),
        to_position=str(number),
        head_position=str(number),
        manifest_uri=f"{folder}manifest.json",
        formats={"jsonl": f"{folder}epoch=1/diff-{number}.jsonl", "parquet": folder},
        created_at="2026-06-03T12:00:00.000000Z",
    )


class EventSinkConformance:
    """Conformance suite. Subclass it in a test module and override the `probe` fixture."""

    pytestmark = pytest.mark.asyncio

    @pytest.fixture
    def probe(self) -> SinkProbe:
        raise NotImplementedError("override the `probe` fixture: return a new one")

    async def test_an_event_arrives_as_it_was_sent(self, probe: SinkProbe) -> None:
        await probe.sink.send(sample_event())
        assert await probe.received(1) == [sample_event()]

    async def test_a_base_and_a_gap_arrive_as_they_were_sent(self, probe: SinkProbe) -> None:
        event = Event(
            event_id="f" * 32,
            table="public.users",
            kind="snapshot",
            epoch=7,
            from_position=None,
            to_position="0/16B3748",
            head_position="0/16B3748",
            manifest_uri="file:///archive/manifest.json",
            formats={},
            created_at="2026-06-03T12:00:00Z",
            gap=True,
        )
        await probe.sink.send(event)
        assert await probe.received(1) == [event]

    async def test_events_of_a_table_arrive_all_and_in_order(self, probe: SinkProbe) -> None:
        sent = [sample_event(number) for number in range(MANY)]
        for event in sent:
            await probe.sink.send(event)
        received = await probe.received(MANY)
        if not probe.is_ordered:
            received.sort(key=lambda event: event.event_id)
        assert received == sent

    async def test_any_name_of_a_table_is_accepted(self, probe: SinkProbe) -> None:
        sent = [sample_event(number, table) for number, table in enumerate(ODD_TABLES)]
        for event in sent:
            await probe.sink.send(event)
        # Sinks preserve order only within a table.
        received = await probe.received(len(sent))
        assert sorted(received, key=lambda event: event.event_id) == sent

    async def test_a_repeated_event_keeps_its_id(self, probe: SinkProbe) -> None:
        for number in (1, 1, 2):
            await probe.sink.send(sample_event(number))
        numbers = (1, 2) if probe.drops_repetitions else (1, 1, 2)
        received = await probe.received(len(numbers))
        if not probe.is_ordered:
            received.sort(key=lambda event: event.event_id)
        assert received == [sample_event(number) for number in numbers]

    async def test_what_cannot_be_delivered_fails_and_can_be_tried_again(
        self, probe: SinkProbe
    ) -> None:
        await probe.break_target()
        for _ in range(2):
            with pytest.raises((EventRefusedError, EventUnconfirmedError)):
                await probe.sink.send(sample_event())

    async def test_failures_and_names_show_no_secret(
        self, probe: SinkProbe, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("DEBUG", logger="streamfold")
        await probe.break_target()
        with pytest.raises((EventRefusedError, EventUnconfirmedError)) as failure:
            await probe.sink.send(sample_event())
        shown = "".join(traceback.format_exception(failure.value))
        shown += repr(failure.value) + repr(probe.sink) + str(probe.sink) + caplog.text
        assert [secret for secret in probe.secrets if secret in shown] == []

    async def test_a_cancelled_call_does_not_disturb_the_next(self, probe: SinkProbe) -> None:
        first = asyncio.create_task(probe.sink.send(sample_event(1)))
        await asyncio.sleep(0)
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        for number in (1, 2):
            await probe.sink.send(sample_event(number))
        arrived = await probe.received(2)
        if sample_event(2) not in arrived:  # the cancelled event was in flight and arrived too
            arrived = await probe.received(3)
        assert [*dict.fromkeys(event.event_id for event in arrived)] == [
            sample_event(number).event_id for number in (1, 2)
        ] or not probe.is_ordered
        assert sample_event(2) in arrived

    async def test_a_closed_sink_sends_nothing(self, probe: SinkProbe) -> None:
        await probe.sink.close()
        await probe.sink.close()
        with pytest.raises(EventRefusedError):
            await probe.sink.send(sample_event())
