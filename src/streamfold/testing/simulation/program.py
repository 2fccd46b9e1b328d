"""A random program: clients, stops, crashes and failing storage, then an account of everything.

Clients run at the same time on few streams and wait for simulated storage, so that every await of the
store is a place where another client may come in between. Storage answers late and sometimes fails.
A run depends on its seed alone; its trace lists every call with its outcome.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from random import Random

from streamfold.errors import DataCorruptError, StreamfoldError
from streamfold.model.configs import INFINITE, BasinConfig, StreamConfigLayer
from streamfold.model.names import StreamName
from streamfold.model.records import Record, SequencedRecord, trim_record
from streamfold.model.resources import Claim, Producer
from streamfold.records.batch import RecordBatch
from streamfold.store import ReadRequest, StoreSettings, StreamStore, from_seq_num
from streamfold.store.catalog.creation import ForkSpec, StreamSpec, prepared
from streamfold.store.catalog.snapshots import Publication
from streamfold.store.engine.location import open_location
from streamfold.store.store import open_store
from streamfold.testing.simulation.ledger import StreamLedger, ViolationError
from streamfold.testing.simulation.loop import SimulationLoop
from streamfold.testing.simulation.storage import (
    SimulatedBlobs,
    SimulatedEngine,
    SimulatedStorage,
    Weather,
)

BASIN = "simulated-basin"
#: 2026-01-01T00:00:00Z in milliseconds: where simulated time starts.
_EPOCH = 1_767_225_600_000
_CLIENTS, _CALLS, _LIVES = 6, 14, 4
_STREAMS = 6
#: Steps that a report of a violation shows.
_STEPS_TOLD = 60
#: Seconds that records of half the streams are kept.
_RETENTION = 60


@dataclass
class SimulationReport:
    """What one run did."""

    seed: int
    calls: int = 0
    acked: int = 0
    unknown: int = 0
    stops: int = 0
    crashes: int = 0
    #: One line for each call and event.
    trace: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """The same for two runs that did the same."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()


def simulate(seed: int) -> SimulationReport:
    """Run the program of `seed`; ViolationError with the story of the stream if a promise broke."""
    random = Random(seed)  # noqa: S311 - repeatable, not secret
    program = _Program(random, SimulationReport(seed))
    with asyncio.Runner(loop_factory=lambda: SimulationLoop(random)) as runner:
        try:
            runner.run(program.run())
        except (ViolationError, BaseExceptionGroup) as error:
            violation = _violation(error)
            if violation is None:
                raise
            raise ViolationError(program.tell(violation)) from None
    return program.report


def _violation(error: BaseException) -> ViolationError | None:
    """The first violation among what the clients raised."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_violation, error.exceptions)), None)
    return error if isinstance(error, ViolationError) else None


class _Process:
    """One life of a store: from its opening to its stop or crash."""

    def __init__(self, program: _Program, settings: StoreSettings) -> None:
        self._program = program
        self._settings = settings
        self._ready: asyncio.Future[StreamStore] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._engines: list[SimulatedEngine] = []
        self._task = asyncio.create_task(self._live())

    async def store(self) -> StreamStore:
        return await asyncio.shield(self._ready)

    async def _open_engine(self) -> SimulatedEngine:
        program = self._program
        engine = SimulatedEngine(program.storage, program.weather)
        self._engines.append(engine)
        return engine

    async def _live(self) -> None:
        program = self._program
        location = replace(
            open_location("memory:"),
            snapshots=SimulatedBlobs(program.storage, program.weather, "snapshots/"),
            chunks=SimulatedBlobs(program.storage, program.weather, "chunks/"),
        )
        try:
            async with open_store(
                location, self._settings, now=program.now, opener=self._open_engine
            ) as store:
                self._ready.set_result(store)
                await self._stop.wait()
        except StreamfoldError as error:
            if not self._ready.done():
                self._ready.set_exception(error)
                self._ready.exception()

    async def stop(self) -> None:
        """End the store in order."""
        self._stop.set()
        await asyncio.wait([self._task])

    def crash(self) -> None:
        """End the process between two steps; what storage has stays."""
        for engine in self._engines:
            engine.kill()
        self._task.cancel()


class _Program:
    def __init__(self, random: Random, report: SimulationReport) -> None:
        self.random = random
        self.report = report
        self.storage = SimulatedStorage()
        self.weather = Weather(random)
        self._bodies = 0
        self._streams: dict[str, StreamLedger] = {}
        self._names = 0
        self._process: _Process | None = None

    def now(self) -> int:
        return _EPOCH + round(asyncio.get_running_loop().time() * 1000)

    def tell(self, violation: ViolationError) -> str:
        """The violation, with everything that happened to its stream."""
        stream = str(violation).partition(":")[0]
        steps = [line for line in self.report.trace if stream in line or " -- " in line]
        return "\n  ".join([f"seed {self.report.seed}: {violation}", *steps[-_STEPS_TOLD:]])

    async def run(self) -> None:
        await self._begin(calm=True)
        store = await self._store()
        await store.create_basin(BASIN, BasinConfig(create_stream_on_append=True))
        for _ in range(_STREAMS):
            await self._new_stream(store)
        for life in range(_LIVES):
            if life:
                await self._begin(calm=False)
            async with asyncio.TaskGroup() as group:
                for client in range(_CLIENTS):
                    group.create_task(self._client(client))
            await self._end()
            await self._begin(calm=True)
            await self._check_all()
            if self.random.random() < 0.7:
                await self._end(in_order=True)
            else:
                await self._end()

    async def _begin(self, *, calm: bool) -> None:
        self.weather.failures = 0.0 if calm else self.random.choice((0.0, 0.0, 0.002, 0.02))
        self.weather.slowest = self.random.choice((0.0, 0.02, 0.5))
        settings = StoreSettings(
            idle_streams=self.random.choice((1, 3, 100)),
            upkeep_interval=self.random.choice((0.05, 5.0, 1e6)),
            trim_grace=0,
            recent_bytes=self.random.choice((0, 1 << 20)),
            chunk_file_bytes=self.random.choice((1, 1 << 20)),
        )
        while True:
            self._note(
                f" -- open, failures {self.weather.failures}, slowest {self.weather.slowest}"
            )
            self._process = _Process(self, settings)
            try:
                await self._process.store()
            except StreamfoldError as error:
                self._note(f" -- not opened: {error.code}")
            else:
                return

    async def _end(self, *, in_order: bool | None = None) -> None:
        assert self._process is not None
        if in_order or (in_order is None and self.random.random() < 0.5):
            self._note(" -- stop")
            self.report.stops += 1
            await self._process.stop()
        else:
            self._note(" -- crash")
            self.report.crashes += 1
            self._process.crash()

    async def _store(self) -> StreamStore:
        assert self._process is not None
        return await self._process.store()

    def _note(self, line: str) -> None:
        self.report.trace.append(f"{asyncio.get_running_loop().time():.6f} {line}")

    def _fail(self, call: str, ledger: StreamLedger, error: StreamfoldError) -> None:
        """Note a failed call; no fault of this storage excuses damaged records."""
        self._note(f"{call} -> {error.code}")
        if isinstance(error, DataCorruptError):
            raise ViolationError(f"{ledger.name}: {error}")

    async def _client(self, number: int) -> None:
        store = await self._store()
        for _ in range(_CALLS):
            await asyncio.sleep(self.random.random() ** 2 * 0.1)
            self.report.calls += 1
            calls: list[tuple[Callable[[StreamStore], Awaitable[None]], int]] = [
                (self._append, 10),
                (self._look_for_nothing, 6),
                (self._check_tail, 3),
                (self._read, 4),
                (self._trim, 1),
                (self._publish, 1),
                (self._fork, 1),
                (self._delete, 1),
                (self._wait, 1),
                (self._follow, 2),
                (self._delete_basin, 1),
            ]
            call = self.random.choices([c for c, _ in calls], [weight for _, weight in calls])[0]
            await call(store)
            if self.random.random() < 0.2:
                await self._produce(store, number)

    def _pick(self) -> StreamLedger | None:
        streams = [ledger for ledger in self._streams.values() if not ledger.over]
        return self.random.choice(streams) if streams else None

    async def _new_stream(self, store: StreamStore, name: str | None = None) -> None:
        if name is None:
            self._names += 1
            name = f"s{self._names}."
        retention = _RETENTION if self.random.random() < 0.5 else None
        layer = StreamConfigLayer(retention=INFINITE if retention is None else retention)
        try:
            await store.create_stream(BASIN, name, layer)
        except StreamfoldError as error:
            self._note(f"create {name} -> {error.code}")
            return
        self._note(f"create {name} -> done")
        self._streams[name] = StreamLedger(name, retention)

    async def _append(self, store: StreamStore) -> None:
        if (ledger := self._pick()) is None:
            return
        bodies = []
        for _ in range(self.random.choice((1, 1, 1, 3))):
            self._bodies += 1
            bodies.append(b"%d" % self._bodies)
        match = ledger.tail if self.random.random() < 0.2 else None
        began = asyncio.get_running_loop().time()
        call = f"append {ledger.name} {bodies} match={match}"
        try:
            ack = await store.append(
                BASIN, ledger.name, [Record(body) for body in bodies], match_seq_num=match
            )
        except StreamfoldError as error:
            self._fail(call, ledger, error)
            if error.definite:
                ledger.refused.update(bodies)
            else:
                self.report.unknown += 1
            return
        start = int(ack.start.seq_num)
        self._note(f"{call} -> {start} to {int(ack.end.seq_num)}")
        self.report.acked += len(bodies)
        if not ledger.over:
            ledger.acknowledge(start, bodies, began)

    async def _produce(self, store: StreamStore, client: int) -> None:
        """Append by an idempotent producer, which repeats itself until it is answered."""
        streams = [ledger for ledger in self._streams.values() if not ledger.over]
        if not streams:
            return
        ledger = self.random.choice(streams)
        self._bodies += 1
        body = b"%d" % self._bodies
        number = ledger.produced.get(client, 0)
        if number < 0:
            return
        claim = Claim(None, Producer(f"p{client}", 0, number), None, False)
        for _ in range(5):
            content = prepared([RecordBatch.of([Record(body)])])
            call = f"produce {ledger.name} {body!r} by {client} as {number}"
            try:
                appended = await store.durable.append(BASIN, ledger.name, claim, content)
            except StreamfoldError as error:
                self._fail(call, ledger, error)
                if error.definite:
                    ledger.produced[client] = -1  # refused, or its fate is unclear: no more of it
                    return
                continue
            self._note(f"{call} -> repeated {appended.repeated}")
            ledger.produced[client] = number + 1
            return
        ledger.produced[client] = -1

    async def _follow(self, store: StreamStore) -> None:
        """Follow a stream for a moment: every record follows the one before, as readers see it."""
        if (ledger := self._pick()) is None:
            return
        first = self.random.randrange(ledger.tail + 1)
        records: list[SequencedRecord] = []
        trimmed = ledger.trimmed
        try:
            request = ReadRequest(from_seq_num(first), clamp=True)
            async with store.follow(BASIN, ledger.name, request) as session:
                async with asyncio.timeout(self.random.random()):
                    while (batch := await session.next()) is not None:
                        ledger.check_batch(batch.records())
                        records += batch.records()
        except TimeoutError:
            pass
        except StreamfoldError as error:
            self._fail(f"follow {ledger.name} from {first}", ledger, error)
        numbers = [int(record.seq_num) for record in records]
        self._note(f"follow {ledger.name} from {first} -> {numbers}")
        if ledger.over or ledger.trimmed != trimmed or ledger.trim_attempted > first:
            return
        if ledger.retention is None and numbers:
            expected = list(range(numbers[0], numbers[0] + len(numbers)))
            if numbers != expected:
                raise ViolationError(f"{ledger.name}: a follower got {numbers}")
            now = asyncio.get_running_loop().time()
            ledger.check_read(records, numbers[0], numbers[-1] + 1, now)

    async def _delete_basin(self, store: StreamStore) -> None:
        """Delete a basin beside appends to its streams: none is acknowledged that begins later."""
        self._names += 1
        basin = f"basin-{self._names:03d}"
        try:
            await store.create_basin(basin, BasinConfig(create_stream_on_append=True))
            for number in range(3):
                await store.append(basin, f"s-{number}", [Record(b"x")])
            await store.delete_basin(basin)
        except StreamfoldError as error:
            self._note(f"delete {basin} -> {error.code}")
            return
        self._note(f"delete {basin} -> done")
        for number in range(4):
            try:
                await store.append(basin, f"s-{number}", [Record(b"late")])
            except StreamfoldError as error:
                self._note(f"append {basin} {number} -> {error.code}")
            else:
                raise ViolationError(f"{basin}: took an append after its deletion")

    async def _look_for_nothing(self, store: StreamStore) -> None:
        name = f"missing-{self.random.randrange(1000)}"
        try:
            await store.check_tail(BASIN, name)
        except StreamfoldError as error:
            self._note(f"look for {name} -> {error.code}")
        else:
            raise ViolationError(f"{name}: exists although nobody created it")

    async def _check_tail(self, store: StreamStore) -> None:
        if (ledger := self._pick()) is None:
            return
        before = ledger.tail
        try:
            tail = int((await store.check_tail(BASIN, ledger.name)).seq_num)
        except StreamfoldError as error:
            self._fail(f"tail of {ledger.name}", ledger, error)
            return
        self._note(f"tail of {ledger.name} -> {tail}")
        if not ledger.over:
            ledger.check_tail(tail, before)

    async def _read(self, store: StreamStore) -> None:
        if (ledger := self._pick()) is None or not ledger.tail:
            return
        first = self.random.randrange(ledger.tail)
        trimmed = ledger.trimmed
        try:
            batch = await store.read(BASIN, ledger.name, ReadRequest(from_seq_num(first)))
        except StreamfoldError as error:
            self._fail(f"read {ledger.name} from {first}", ledger, error)
            return
        records = batch.records()
        numbers = [int(record.seq_num) for record in records]
        self._note(f"read {ledger.name} from {first} -> {numbers}")
        ledger.check_batch(records)
        if not ledger.over and ledger.trimmed == trimmed and numbers:
            now = asyncio.get_running_loop().time()
            ledger.check_read(records, numbers[0], numbers[-1] + 1, now)

    async def _trim(self, store: StreamStore) -> None:
        if (ledger := self._pick()) is None or not ledger.tail:
            return
        point = self.random.randrange(ledger.tail + 1)
        ledger.trim_attempted = max(ledger.trim_attempted, point)
        try:
            ack = await store.append(BASIN, ledger.name, [trim_record(point)])
        except StreamfoldError as error:
            self._fail(f"trim {ledger.name} to {point}", ledger, error)
            return
        self._note(f"trim {ledger.name} to {point} -> {int(ack.end.seq_num)}")
        ledger.trimmed = max(ledger.trimmed, point)
        ledger.tail = max(ledger.tail, int(ack.end.seq_num))

    async def _publish(self, store: StreamStore) -> None:
        if (ledger := self._pick()) is None or not ledger.tail:
            return
        point = self.random.randrange(ledger.tail + 1)
        ledger.trim_attempted = max(ledger.trim_attempted, point)

        async def pieces() -> AsyncIterator[bytes]:
            yield b"state"

        new = Publication(
            point, "a/b", pieces(), hashlib.blake2b(), None, False, None, trim=True, size=5
        )
        try:
            await store.durable.publish(BASIN, ledger.name, new)
        except StreamfoldError as error:
            self._fail(f"publish {ledger.name} at {point}", ledger, error)
            return
        self._note(f"publish {ledger.name} at {point} -> done")
        ledger.trimmed = max(ledger.trimmed, point)

    async def _fork(self, store: StreamStore) -> None:
        if (source := self._pick()) is None or not source.tail:
            return
        self._names += 1
        name = f"s{self._names}."
        point = self.random.randrange(source.tail + 1)
        fork = ForkSpec(StreamName(source.name), point, 0, lambda _: True)
        spec = StreamSpec(None, None, None, None, False, fork, prepared([]), None)
        call = f"fork {source.name} at {point} as {name}"
        inherited = {n: record for n, record in source.acked.items() if n < point}
        try:
            status, _ = await store.durable.create(BASIN, name, spec)
        except StreamfoldError as error:
            self._fail(call, source, error)
            return
        self._note(f"{call} -> from {status.first}")
        ledger = StreamLedger(name, None, inherited, tail=point)
        ledger.trimmed = ledger.trim_attempted = int(status.first)
        self._streams[name] = ledger

    async def _delete(self, store: StreamStore) -> None:
        if (ledger := self._pick()) is None:
            return
        ledger.over = True
        try:
            await store.delete_stream(BASIN, ledger.name)
        except StreamfoldError as error:
            self._fail(f"delete {ledger.name}", ledger, error)
            return
        self._note(f"delete {ledger.name} -> done")
        await self._new_stream(store, ledger.name if self.random.random() < 0.5 else None)

    async def _wait(self, store: StreamStore) -> None:
        await asyncio.sleep(self.random.choice((1.0, _RETENTION / 2)))

    async def _check_all(self) -> None:
        """Read every stream to its end, and compare it with what clients were told."""
        store = await self._store()
        for ledger in [ledger for ledger in self._streams.values() if not ledger.over]:
            try:
                await self._check(store, ledger)
            except StreamfoldError as error:  # storage is calm now
                raise ViolationError(f"{ledger.name}: cannot be read: {error}") from error

    async def _check(self, store: StreamStore, ledger: StreamLedger) -> None:
        tail = int((await store.check_tail(BASIN, ledger.name)).seq_num)
        ledger.check_tail(tail, ledger.tail)
        records, first = [], 0
        while first < tail:
            batch = await store.read(BASIN, ledger.name, ReadRequest(from_seq_num(first)))
            if not batch.count:
                break
            ledger.check_batch(batch.records())
            records += batch.records()
            first = int(records[-1].seq_num) + 1
        self._note(f"check {ledger.name} -> {[int(r.seq_num) for r in records]} of {tail}")
        ledger.check_read(records, 0, tail, asyncio.get_running_loop().time())
