"""Query starts, ends and waits by timestamps and limits, on a real server without Spark."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import s2_sdk
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, ReadMinRows

from streamfold.spark import OptionError
from streamfold.spark.stream.client import ServerConnection, StreamCalls
from streamfold.spark.stream.options import parse_source, parse_streaming
from streamfold.spark.stream.positions import Offset, StreamPositions
from streamfold.spark.stream.source import StreamReader
from streamfold.spark.stream.stored import StoredBasin, open_basin

from .server import Server

#: 14 November 2023; records are a second apart from here on.
FIRST = 1_700_000_000_000


def append_every_second(server: Server, stream: str, count: int) -> None:
    server.append(
        stream, [s2_sdk.Record(b"%d" % n, timestamp=FIRST + n * 1000) for n in range(count)]
    )


def boundaries(given: dict[str, str], **options: str) -> tuple[Offset, Offset]:
    """Where a batch read starts and ends."""
    parsed = parse_source({**given, **options})
    if isinstance(parsed.origin, StoredBasin):
        with open_basin(parsed.origin) as basin:
            positions = StreamPositions(parsed, basin)
            start = positions.starts("earliest")
            return start, positions.ends(start)
    with ServerConnection(parsed.origin) as connection:
        positions = StreamPositions(parsed, StreamCalls(connection))
        start = positions.starts("earliest")
        return start, positions.ends(start)


@pytest.mark.parametrize("stored", [False, True])
def test_times_choose_the_first_record_that_is_not_older(
    server: Server, fresh: Callable[[], str], stored: bool
) -> None:
    stream, other, empty = fresh(), fresh(), fresh()
    append_every_second(server, stream, 20)
    append_every_second(server, other, 10)
    where = server.stored if stored else server.options
    given = {**where, "streams": f"{stream},{other},{empty}"}
    start, end = boundaries(
        given, startingTimestamp=str(FIRST + 2001), endingTimestamp="2023-11-14T22:13:35Z"
    )
    assert start == {stream: 3, other: 3, empty: 0}
    assert end == {stream: 15, other: 10, empty: 0}
    each = {stream: FIRST + 5000, other: "2023-11-14T22:13:22Z", empty: 0}
    last = {stream: FIRST + 5000, other: FIRST * 2, empty: FIRST}
    start, end = boundaries(
        given,
        startingOffsetsByTimestamp=json.dumps(each),
        endingOffsetsByTimestamp=json.dumps(last),
    )
    assert start == {stream: 5, other: 2, empty: 0}
    assert end == {stream: 5, other: 10, empty: 0}


def test_a_start_after_the_last_record_is_the_tail_unless_a_record_is_demanded(
    server: Server, fresh: Callable[[], str]
) -> None:
    stream = fresh()
    append_every_second(server, stream, 5)
    given = {**server.options, "stream": stream, "startingTimestamp": str(FIRST + 4001)}
    assert boundaries(given) == ({stream: 5}, {stream: 5})
    assert boundaries(given, startingOffsetsByTimestampStrategy="latest")[0] == {stream: 5}
    message = rf"is {FIRST + 4001}, and stream '{stream}' .* of {FIRST + 4000}: .* to latest"
    with pytest.raises(OptionError, match=message):
        boundaries(given, startingOffsetsByTimestampStrategy="error")
    given["startingTimestamp"] = str(FIRST + 4000)
    assert boundaries(given, startingOffsetsByTimestampStrategy="error")[0] == {stream: 4}


def test_a_time_before_a_trimmed_start_is_the_first_record_that_exists(
    server: Server, fresh: Callable[[], str]
) -> None:
    stream = fresh()
    append_every_second(server, stream, 10)
    server.trim(stream, 6)
    given = {**server.options, "stream": stream, "startingTimestamp": str(FIRST)}
    assert boundaries(given)[0] == {stream: 6}
    # Everything before the end is gone, too: there is nothing to read, and nothing is lost.
    assert boundaries(given, endingTimestamp=str(FIRST + 3000)) == ({stream: 6}, {stream: 6})


def test_every_stream_needs_a_time_and_ends_after_it_starts(
    server: Server, fresh: Callable[[], str]
) -> None:
    stream = fresh()
    given = {**server.options, "stream": stream}
    for name in ("startingOffsetsByTimestamp", "endingOffsetsByTimestamp"):
        with pytest.raises(OptionError, match=f"{name}' does not name stream '{stream}'"):
            boundaries(given, **{name: '{"another": 1}'})
    with pytest.raises(OptionError, match=r"'endingTimestamp' is 5 .* startingTimestamp.* 6"):
        boundaries(given, startingTimestamp="6", endingTimestamp="5")
    with pytest.raises(OptionError, match=r"does not name stream"):
        boundaries(given, startingOffsets="{}")


def test_a_batch_waits_for_enough_records_and_not_for_ever(
    server: Server, fresh: Callable[[], str]
) -> None:
    stream = fresh()
    with ExitStack() as stack:
        check_waits(server, stream, stack)


def check_waits(server: Server, stream: str, stack: ExitStack) -> None:
    def reader(**options: str) -> StreamReader:
        reading = StreamReader(parse_streaming({**server.options, "stream": stream, **options}))
        stack.callback(reading.stop)
        return reading

    def ends(reading: StreamReader, start: int, limit: ReadLimit | None = None) -> int:
        return reading.latestOffset({stream: start}, limit or reading.getDefaultReadLimit())[stream]

    patient = reader(minOffsetsPerTrigger="10")
    assert patient.getDefaultReadLimit() == ReadMinRows(10)
    assert ends(patient, 0) == 0
    server.append_numbers(stream, range(4))
    assert ends(patient, 0) == 4, "the first batch does not wait"
    server.append_numbers(stream, range(4, 13))
    assert ends(patient, 4) == 4
    assert ends(patient, 4, ReadAllAvailable()) == 13, "a trigger that wants all gets all"
    server.append_numbers(stream, range(13, 14))
    assert ends(patient, 4) == 14

    both = reader(minRecordsPerTrigger="5", maxRecordsPerTrigger="6")
    assert both.getDefaultReadLimit() == ReadMaxRows(6)
    assert [ends(both, 0), ends(both, 6), ends(both, 12)] == [6, 12, 12]
    hasty = reader(minRecordsPerTrigger="100", maxTriggerDelay="0")
    assert [ends(hasty, 0), ends(hasty, 0)] == [14, 14]
    finite = reader(minRecordsPerTrigger="5", maxRecordsPerTrigger="6")
    finite.prepareForTriggerAvailableNow()
    assert [ends(finite, 0), ends(finite, 6), ends(finite, 12)] == [6, 12, 14]
