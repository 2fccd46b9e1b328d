"""A hypothesis state machine over streams with traits, against a model of lists and dictionaries.

Streams are created, appended to by producers that repeat themselves, closed, forked, trimmed, deleted
and re-created; the store is restarted and its commits fail. After every step each stream must be what
the model says.
"""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, invariant, rule

from streamfold.errors import (
    AlreadyExistsError,
    InvalidError,
    OutcomeUnknownError,
    PositionTrimmedError,
    ProducerGapError,
    ProducerStaleError,
    StreamClosedError,
    StreamfoldError,
    StreamForkedError,
    StreamNotFoundError,
    StreamSeqError,
)
from streamfold.model.records import trim_record
from streamfold.model.resources import StreamStatus
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore, open_store
from streamfold.testing.engine_faults import CommitFault, FaultyEngine
from streamfold.testing.store_machine import HostedStoreMachine
from tests.proving import PROVING
from tests.store.conftest import BASIN, PATIENCE
from tests.store.durable_streams import append, create, fork_of, read

NAMES = ("a", "b", "c")
#: In the model: a record that is an order of S2, not content.
ORDER = b"(order)"

Result = TypeVar("Result")
names = st.sampled_from(NAMES)
contents = st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=3)


@dataclass
class Model:
    """One stream: its records, and what the next append has to keep."""

    records: list[bytes] = field(default_factory=list)
    #: The first record that is kept.
    first: int = 0
    closed: bool = False
    closed_by: tuple[str, int, int] | None = None
    seq: str = ""
    producers: dict[str, tuple[int, int]] = field(default_factory=dict)
    source: Model | None = None
    origin: tuple[str, int] | None = None
    deleted: bool = False

    def judge(
        self, producer: tuple[str, int, int] | None, seq: str | None
    ) -> type[StreamfoldError] | bool:
        """The refusal that an append must get; else whether it is a repetition."""
        if self.closed:
            return True if producer and producer == self.closed_by else StreamClosedError
        if producer is not None:
            name, epoch, number = producer
            known = self.producers.get(name)
            if known is None and number:
                return ProducerGapError
            if known is not None:
                if epoch < known[0]:
                    return ProducerStaleError
                if epoch > known[0] and number:
                    return InvalidError
                if epoch == known[0] and number > known[1] + 1:
                    return ProducerGapError
                if epoch == known[0] and number <= known[1]:
                    return True
        if seq is not None and seq <= self.seq:
            return StreamSeqError
        return False

    def apply(
        self,
        bodies: list[bytes],
        producer: tuple[str, int, int] | None,
        seq: str | None,
        close: bool,
    ) -> None:
        self.records += bodies
        if producer is not None:
            self.producers[producer[0]] = producer[1:]
        self.seq = seq or self.seq
        if close:
            self.closed, self.closed_by = True, producer


class DurableMachine(HostedStoreMachine):
    """Everything that can be done to streams with traits, in any order."""

    @initialize()
    def start(self) -> None:
        self.streams: dict[str, Model] = {}
        #: All that ever were, for those that forks still need.
        self.all: list[Model] = []
        self.location = open_location("memory:")
        self.host_store()
        self.run(self.store.create_basin(BASIN))

    def outcome(self, work: Coroutine[Any, Any, Result]) -> Result | StreamfoldError:
        try:
            return self.run(work)
        except StreamfoldError as error:
            return error

    def opening(self) -> AbstractAsyncContextManager[StreamStore]:
        async def open_engine() -> FaultyEngine:
            self.engine = FaultyEngine(await SlateEngine.open(self.location))
            return self.engine

        few = StoreSettings(
            recent_bytes=200,
            upkeep_interval=1e6,
            idle_streams=1,
            trim_grace=0,
            chunk_file_bytes=30,
            recovery_timeout=PATIENCE,
        )
        return open_store(self.location, few, opener=open_engine)

    def needed(self, model: Model) -> bool:
        """Whether a fork that is not deleted, or is needed itself, came from this stream."""
        return any(
            other.source is model and (not other.deleted or self.needed(other))
            for other in self.all
        )

    def refusal(self, name: str) -> tuple[type[StreamfoldError], ...]:
        """What everything but a creation may get; nothing if it must succeed."""
        model = self.streams.get(name)
        if model is None:
            return (StreamNotFoundError,)
        if not model.deleted:
            return ()
        if self.needed(model):
            return (StreamForkedError,)
        return (StreamNotFoundError, *[StreamForkedError] * self.lingers(model))

    def lingers(self, model: Model) -> bool:
        """Whether it may still be kept for forks that are gone: the background lets go of it."""
        return any(other.source is model for other in self.all)

    def _created(self, name: str, model: Model) -> None:
        self.streams[name] = model
        self.all.append(model)

    @rule(name=names, bodies=contents, closed=st.booleans())
    def create(self, name: str, bodies: list[bytes], closed: bool) -> None:
        outcome = self.outcome(create(self.store, name, *bodies, closed=closed))
        model = self.streams.get(name)
        if model is not None and not model.deleted:
            if model.origin is None and model.closed == closed:
                assert not made(outcome)
            else:
                assert isinstance(outcome, AlreadyExistsError), outcome
        elif model is not None and self.needed(model):
            assert isinstance(outcome, StreamForkedError), outcome
        elif isinstance(outcome, StreamForkedError):
            assert model is not None
            assert self.lingers(model)
        else:
            assert made(outcome)
            self._created(name, Model(list(bodies), closed=closed))

    @rule(
        name=names,
        bodies=contents,
        producer=st.none() | st.tuples(st.sampled_from("pq"), st.integers(0, 1), st.integers(0, 3)),
        seq=st.none() | st.sampled_from("xyz"),
        close=st.sampled_from([False, False, False, True]),
        fault=st.sampled_from([None, None, None, CommitFault.BEFORE, CommitFault.AFTER]),
    )
    def append(
        self,
        name: str,
        bodies: list[bytes],
        producer: tuple[str, int, int] | None,
        seq: str | None,
        close: bool,
        fault: CommitFault | None,
    ) -> None:
        if fault is not None:
            self.engine.fail_next(fault, with_records=True)
        given = {"producer": producer, "seq": seq, "close": close}
        outcome = self.outcome(append(self.store, name, *bodies, **given))  # type: ignore[arg-type]
        self.engine.forget_faults()
        if expected := self.refusal(name):
            assert type(outcome) in expected, (outcome, expected)
            return
        model = self.streams[name]
        judged = model.judge(producer, seq)
        if isinstance(judged, type):
            assert type(outcome) is judged, (outcome, judged)
        elif isinstance(outcome, OutcomeUnknownError):
            assert fault is not None
            if fault is CommitFault.AFTER and not judged:
                model.apply(bodies, producer, seq, close)
        else:
            assert not isinstance(outcome, StreamfoldError), outcome
            assert outcome.repeated is judged
            if not judged:
                model.apply(bodies, producer, seq, close)
            assert (outcome.tail, outcome.closed) == (len(model.records), model.closed)

    @rule(name=names)
    def close(self, name: str) -> None:
        outcome = self.outcome(append(self.store, name, close=True))
        if expected := self.refusal(name):
            assert type(outcome) in expected, outcome
            return
        assert not isinstance(outcome, StreamfoldError), outcome
        assert outcome.closed
        self.streams[name].closed = True

    @rule(name=names, source=names, at=st.integers(0, 12), body=contents)
    def fork(self, name: str, source: str, at: int, body: list[bytes]) -> None:
        outcome = self.outcome(create(self.store, name, *body, fork=fork_of(source, at)))
        there, origin = self.streams.get(name), self.streams.get(source)
        if there is not None and not there.deleted:
            if there.origin == (source, at) and not there.closed:
                assert not made(outcome)
            else:
                assert isinstance(outcome, AlreadyExistsError), outcome
        elif there is not None and self.needed(there):
            assert isinstance(outcome, StreamForkedError), outcome
        elif isinstance(outcome, StreamForkedError) and there is not None:
            assert self.lingers(there) or self.refusal(source), outcome
        elif expected := self.refusal(source):
            assert type(outcome) in expected, (outcome, expected)
        elif origin is not None and at > len(origin.records):
            assert isinstance(outcome, InvalidError), outcome
        elif origin is not None and at < origin.first:
            assert isinstance(outcome, PositionTrimmedError), outcome
        elif origin is not None:
            assert made(outcome)
            records = [*origin.records[:at], *body]
            model = Model(records, origin.first, source=origin, origin=(source, at))
            self._created(name, model)

    @rule(name=names, to=st.integers(0, 15))
    def trim(self, name: str, to: int) -> None:
        if self.refusal(name) or self.streams[name].closed:
            return
        model = self.streams[name]
        self.run(self.store.append(BASIN, name, [trim_record(to)]))
        model.records.append(ORDER)
        model.first = max(model.first, min(to, len(model.records)))

    @rule(name=names)
    def delete(self, name: str) -> None:
        outcome = self.outcome(self.store.stream(BASIN, name).delete())
        if expected := self.refusal(name):
            assert type(outcome) in expected, (outcome, expected)
        else:
            assert outcome is None, outcome
            self.streams[name].deleted = True

    @rule()
    def upkeep(self) -> None:
        self.run(self.store.upkeep())

    @rule()
    def restart(self) -> None:
        self.run(self._close())
        self.run(self._open())

    @invariant()
    def every_stream_is_what_the_model_says(self) -> None:
        for name, model in getattr(self, "streams", {}).items():
            status = self.outcome(self.store.stream(BASIN, name).status())
            if expected := self.refusal(name):
                assert type(status) in expected, (name, status, expected)
                continue
            assert not isinstance(status, StreamfoldError), (name, status)
            seen = status.first, status.tail, status.closed
            assert seen == (model.first, len(model.records), model.closed), (name, seen, model)
            found = self.run(read(self.store, name, model.first))
            wanted = model.records[model.first :]
            assert len(found) == len(wanted), (name, found, wanted)
            pairs = zip(found, wanted, strict=True)
            assert all(want in (ORDER, got) for got, want in pairs), (name, found, wanted)


def made(outcome: tuple[StreamStatus, bool] | StreamfoldError) -> bool:
    """Whether a creation, which must have succeeded, made a new stream."""
    assert not isinstance(outcome, StreamfoldError), outcome
    return outcome[1]


#: `make prove` runs many more examples, at random; CI runs the same few every time.
DurableMachine.TestCase.settings = settings(
    max_examples=1000 if PROVING else 40,
    stateful_step_count=30,
    deadline=None,
    derandomize=not PROVING,
    suppress_health_check=list(HealthCheck),
)
TestDurableStreams = DurableMachine.TestCase
