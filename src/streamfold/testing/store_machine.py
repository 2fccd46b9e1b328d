"""A hypothesis state machine that checks a store against StreamModel, with restarts and faults.

Subclass it, provide an engine opener and use its TestCase:

    class MyEngineMachine(StoreMachine):
        def opener(self) -> EngineOpener: ...

    TestMyEngine = MyEngineMachine.TestCase
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from typing import Any, TypeVar

from streamfold.errors import (
    OutcomeUnknownError,
    PositionUnwrittenError,
    StreamfoldError,
    WriterFencedError,
)
from streamfold.extras import needing_extra
from streamfold.model.configs import (
    StreamConfigLayer,
    StreamReconfiguration,
    TimestampMode,
    reconfigure_stream,
    resolve,
)
from streamfold.model.positions import SeqNum
from streamfold.model.records import (
    Header,
    Record,
    SequencedRecord,
    fence_record,
    trim_record,
)
from streamfold.store.engine.engine import Engine, EngineOpener
from streamfold.store.engine.location import open_location
from streamfold.store.log.shares import AppendAck
from streamfold.store.read.requests import ReadRequest, from_seq_num, from_tail, from_timestamp
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore, open_store
from streamfold.testing.engine_faults import CommitFault, FaultyEngine
from streamfold.testing.stream_model import StreamModel

with needing_extra("testing"):
    import hypothesis.strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

BASIN = "machine-basin"
STREAMS = ("first", "second", "third")
_LAYERS = {
    "first": StreamConfigLayer(),
    "second": StreamConfigLayer(retention=100, timestamp_uncapped=True),
    "third": StreamConfigLayer(timestamp_mode=TimestampMode.CLIENT_REQUIRE),
}
#: Seconds per step. Far more than any step needs, so that a hang fails the test.
_STEP_SECONDS = 60
#: Chunk size in bytes from which chunks go to chunk files. About half of the chunks do.
_FILE_FROM = 30
#: More records than any example has. With a limit, a read session ends at the tail.
_PLENTY = 1_000_000

Result = TypeVar("Result")

streams = st.sampled_from(STREAMS)
plain_records = st.builds(
    Record,
    st.binary(max_size=20),
    st.lists(
        st.builds(Header, st.binary(min_size=1, max_size=3), st.binary(max_size=3)), max_size=2
    ).map(tuple),
    st.none() | st.integers(0, 5_000_000),
)
records = st.one_of(
    plain_records,
    plain_records,
    st.builds(fence_record, st.sampled_from(["", "a", "b"])),
    st.builds(trim_record, st.integers(0, 60)),
)
batches = st.lists(records, min_size=1, max_size=5)
limits = st.none() | st.integers(0, 300)


class HostedStoreMachine(RuleBasedStateMachine):
    """A state machine whose store runs on its own event loop in a thread."""

    store: StreamStore

    def opening(self) -> AbstractAsyncContextManager[StreamStore]:
        """Open the store. Called at the start and after each close."""
        raise NotImplementedError

    def host_store(self) -> None:
        """Start the thread and open the store."""
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.run(self._open())

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.run(self._close())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(_STEP_SECONDS)

    async def _open(self) -> None:
        """Open the store in its own task: the task that entered its context must exit it."""
        opened: asyncio.Future[StreamStore] = self.loop.create_future()
        self.stop = asyncio.Event()
        self.host = asyncio.create_task(self._serve(opened, self.stop))
        self.store = await opened

    async def _serve(self, opened: asyncio.Future[StreamStore], stop: asyncio.Event) -> None:
        async with AsyncExitStack() as stack:
            opened.set_result(await stack.enter_async_context(self.opening()))
            await stop.wait()

    async def _close(self) -> None:
        self.stop.set()
        await self.host


class StoreMachine(HostedStoreMachine):
    """Calls every store operation in any order. Results must equal the model's."""

    def opener(self) -> EngineOpener:
        """Return an opener of the engine under test on empty storage. Called once per example."""
        raise NotImplementedError

    @initialize()
    def start(self) -> None:
        self.clock = 1_000_000
        self.models: dict[str, StreamModel] = {}
        self.engine: FaultyEngine | None = None
        self.open_engine = self.opener()
        #: Holds the example's chunk files.
        self.location = open_location("memory:")
        self.host_store()
        self.run(self.store.create_basin(BASIN))
        for stream in STREAMS:
            self._create(stream)

    def opening(self) -> AbstractAsyncContextManager[StreamStore]:
        async def open_faulty() -> Engine:
            self.engine = FaultyEngine(await self.open_engine())
            return self.engine

        settings = StoreSettings(
            recent_bytes=500,
            upkeep_interval=1e6,
            idle_streams=1,
            trim_grace=0,
            chunk_file_bytes=_FILE_FROM,
            recovery_timeout=_STEP_SECONDS,
        )
        return open_store(
            self.location,
            settings,
            now=lambda: self.clock,
            opener=open_faulty,
            take_over=True,
        )

    def _create(self, stream: str) -> None:
        self.run(self.store.create_stream(BASIN, stream, _LAYERS[stream]))
        self.models[stream] = StreamModel(resolve(_LAYERS[stream], StreamConfigLayer()))

    @rule(
        stream=streams,
        batch=batches,
        match=st.sampled_from([None, True, False]),
        token=st.sampled_from([None, "", "a", "b"]),
    )
    def append(
        self, stream: str, batch: list[Record], match: bool | None, token: str | None
    ) -> None:
        model = self.models[stream]
        seq_num = None if match is None else len(model.records) + (0 if match else 1)
        expected = model.refusal(batch, seq_num, token)
        work = self.store.append(BASIN, stream, batch, match_seq_num=seq_num, fencing_token=token)
        outcome = self.run(_outcome(work))
        if expected is not None or isinstance(outcome, StreamfoldError):
            assert type(outcome) is expected, outcome
            return
        ack = outcome
        start = len(model.records)
        model.append(batch, self.clock)
        assert (ack.start.seq_num, ack.end, ack.tail) == (start, model.tail, model.tail)
        assert ack.start.timestamp == model.records[start].timestamp

    @rule(
        burst=st.lists(st.tuples(streams, batches), min_size=1, max_size=6),
        fault=st.none() | st.sampled_from([CommitFault.BEFORE, CommitFault.AFTER]),
    )
    def burst(self, burst: list[tuple[str, list[Record]]], fault: CommitFault | None) -> None:
        """Append concurrently, possibly with a failing commit among the commits."""
        if fault is not None and self.engine is not None:
            self.engine.fail_next(fault)
        outcomes = self.run(self._submit_all(burst))
        if self.engine is not None:
            self.engine.forget_faults()
        if fault is not None:
            self.upkeep()  # the store may have reopened its storage
        for stream in STREAMS:
            mine = [
                (batch, outcome)
                for (name, batch), outcome in zip(burst, outcomes, strict=True)
                if name == stream
            ]
            self._reconcile(stream, mine, may_fail=fault is not None)

    async def _submit_all(self, burst: list[tuple[str, list[Record]]]) -> list[object]:
        tickets: list[Awaitable[object]] = [
            asyncio.ensure_future(self.store.append(BASIN, stream, batch))
            for stream, batch in burst
        ]
        return list(await asyncio.gather(*tickets, return_exceptions=True))

    def _reconcile(
        self, stream: str, outcomes: Sequence[tuple[list[Record], object]], *, may_fail: bool
    ) -> None:
        """Update the model.

        Acknowledged batches must be stored, and those of unknown outcome may be.
        """
        model = self.models[stream]
        request = ReadRequest(from_seq_num(0), count=_PLENTY)
        stored = {record.seq_num: record for record in self.run(self._read_all(stream, request))}
        acknowledged = {ack.start.seq_num for _, ack in outcomes if isinstance(ack, AppendAck)}
        tail = self.run(self.store.check_tail(BASIN, stream)).seq_num
        for batch, outcome in outcomes:
            at = len(model.records)
            if isinstance(outcome, AppendAck):
                assert outcome.start.seq_num == at, (stream, outcome, at)
                model.append(batch, self.clock)
            elif model.refusal(batch, None, None) is None:
                assert may_fail, outcome
                assert isinstance(outcome, StreamfoldError), outcome
                unknown = isinstance(outcome, OutcomeUnknownError)
                if unknown and at < tail and at not in acknowledged and _matches(batch, at, stored):
                    model.append(batch, self.clock)
        assert model.tail.seq_num == tail, (stream, model.tail, tail, outcomes)

    @rule(stream=streams, start=st.integers(0, 80), count=limits, size=limits, until=limits)
    def read(
        self, stream: str, start: int, count: int | None, size: int | None, until: int | None
    ) -> None:
        model = self.models[stream]
        start = min(start, len(model.records))
        scaled = None if until is None else until * 10_000
        request = ReadRequest(
            from_seq_num(start),
            count=_PLENTY if count is None else count,
            bytes=size,
            until=scaled,
        )
        assert self.run(self._read_all(stream, request)) == model.read(
            start, count, size, scaled, self.clock
        )

    async def _read_all(self, stream: str, request: ReadRequest) -> list[SequencedRecord]:
        try:
            async with self.store.follow(BASIN, stream, request) as session:
                return [record async for batch in session for record in batch.records()]
        except PositionUnwrittenError:
            return []

    @rule(stream=streams, timestamp=st.integers(0, 5_000_000))
    def read_from_timestamp(self, stream: str, timestamp: int) -> None:
        model = self.models[stream]
        request = ReadRequest(from_timestamp(timestamp), count=_PLENTY)
        expected = [record for record in model.visible(self.clock) if record.timestamp >= timestamp]
        assert self.run(self._read_all(stream, request)) == expected

    @rule(stream=streams, offset=st.integers(0, 20))
    def read_before_the_tail(self, stream: str, offset: int) -> None:
        model = self.models[stream]
        request = ReadRequest(from_tail(offset), count=_PLENTY)
        start = max(len(model.records) - offset, model.first(self.clock))
        assert self.run(self._read_all(stream, request)) == model.records[start:]

    @rule(prefix=st.sampled_from(["", "s", "th", "x"]), after=st.sampled_from(["", *STREAMS]))
    def list_streams(self, prefix: str, after: str) -> None:
        page = self.run(self.store.list_streams(BASIN, prefix=prefix, start_after=after))
        expected = [name for name in sorted(STREAMS) if name.startswith(prefix) and name > after]
        assert [stream.name for stream in page.items] == expected

    @rule(stream=streams, uncapped=st.sampled_from([True, False, None]))
    def reconfigure(self, stream: str, uncapped: bool | None) -> None:
        change = StreamReconfiguration(timestamp_uncapped=uncapped)
        config = self.run(self.store.reconfigure_stream(BASIN, stream, change))
        model = self.models[stream]
        model.config = reconfigure_stream(model.config, change, StreamConfigLayer())
        assert config == model.config == self.run(self.store.stream_config(BASIN, stream))

    @rule(stream=streams, retention=st.sampled_from([1, 50, 100, "infinite"]))
    def change_retention(self, stream: str, retention: Any) -> None:
        layer = replace(_LAYERS[stream], retention=retention)
        self.run(self.store.ensure_stream(BASIN, stream, layer))
        self.models[stream].config = resolve(layer, StreamConfigLayer())

    @rule(seconds=st.integers(1, 70))
    def pass_time(self, seconds: int) -> None:
        self.clock += seconds * 1000

    @rule()
    def upkeep(self) -> None:
        self.run(self.store.upkeep())
        for model in self.models.values():
            model.expire(self.clock)

    @rule(stream=streams)
    def delete_and_create_again(self, stream: str) -> None:
        self.run(self.store.delete_stream(BASIN, stream))
        self.upkeep()
        self._create(stream)

    @rule()
    def restart(self) -> None:
        self.run(self._close())
        self.run(self._open())
        self.upkeep()  # opening runs upkeep, and the model must catch up

    @precondition(lambda self: self.engine is not None)
    @rule(burst=st.lists(st.tuples(streams, batches), min_size=1, max_size=4))
    def crash(self, burst: list[tuple[str, list[Record]]]) -> None:
        """Let another process take over the store while appends are in flight to storage."""
        outcomes = self.run(self._take_over(burst))
        for outcome in outcomes:
            assert isinstance(outcome, StreamfoldError), outcome
        self.upkeep()
        for stream in STREAMS:
            self._reconcile(stream, [], may_fail=True)

    async def _take_over(self, burst: list[tuple[str, list[Record]]]) -> list[object]:
        former, host, stop = self.engine, self.host, self.stop
        assert former is not None
        former.hold()
        appends = asyncio.ensure_future(self._submit_all(burst))
        await asyncio.sleep(0.001)
        await self._open()
        former.resume()
        outcomes = await appends
        stop.set()
        await host
        assert all(
            isinstance(outcome, WriterFencedError | OutcomeUnknownError)
            or self.models[stream].refusal(batch, None, None) is not None
            for (stream, batch), outcome in zip(burst, outcomes, strict=True)
        ), outcomes
        return outcomes

    @invariant()
    def storage_agrees_with_the_model(self) -> None:
        for stream, model in getattr(self, "models", {}).items():
            tail = self.run(self.store.check_tail(BASIN, stream))
            assert tail == model.tail, (stream, tail, model.tail)
            request = ReadRequest(from_seq_num(0), count=_PLENTY)
            records, expected = self.run(self._read_all(stream, request)), model.visible(self.clock)
            assert records == expected, (stream, records, expected)


def _matches(batch: Sequence[Record], at: int, stored: dict[SeqNum, SequencedRecord]) -> bool:
    """Return whether the records from `at` on may be `batch`. Trimmed records match anything."""
    records = [stored.get(SeqNum(at + index)) for index in range(len(batch))]
    return all(
        there is None or (there.headers, there.body) == (record.headers, record.body)
        for record, there in zip(batch, records, strict=True)
    )


async def _outcome(work: Awaitable[Result]) -> Result | StreamfoldError:
    try:
        return await work
    except StreamfoldError as error:
        return error
