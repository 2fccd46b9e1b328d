"""Runs one program: clients, stops, crashes and failing storage, then a check of every stream.

Clients run concurrently on few streams and wait for simulated storage, so that another client may run
at every await of the store. A run depends only on its seed, and its trace lists every call with its
outcome. Stores and faces live in processes that stop gracefully, are killed between two steps, or are
replaced by another one while they run, whether idle or in the middle of requests.

Limitations:

- Real threads. Offloaded work runs as one step of the loop after a short delay. Nothing else runs
  meanwhile, so races within offloaded work go undetected.
- Schedules that asyncio never produces. Ready callbacks run first in, first out.
- Code below the test doubles: SlateDB and its log, files, sockets, the native door, TLS. The adversary
  and the crash tests cover these.
- Two servers at once for longer than a take-over, and more than one client process per server.
- Corruption. Blobs may be torn if their write was never acknowledged; stored rows never change.
- Subscriptions, the console, encryption, and bodies beyond a few hundred bytes.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Protocol

from streamfold.errors import NotFoundError, StorageError, StreamfoldError
from streamfold.model.configs import BasinConfig
from streamfold.store import StoreSettings, StreamStore
from streamfold.store.engine.location import Location, open_location
from streamfold.store.store import open_store
from streamfold.testing.simulation.books import BASIN, Books, SimulationReport
from streamfold.testing.simulation.ledger import StreamLedger, ViolationError
from streamfold.testing.simulation.loop import (
    SimulatedProcess,
    SimulationLoop,
    SimulationStuckError,
    chance,
    quiet,
    roll_with,
    seeded,
)
from streamfold.testing.simulation.plan import LifePlan, PlannedCall, SimulationPlan, draw_plan
from streamfold.testing.simulation.storage import (
    SimulatedBlobs,
    SimulatedEngine,
    SimulatedStorage,
    Weather,
)
from streamfold.testing.simulation.store_calls import StoreCalls


class FaceCalls(Protocol):
    """Calls of one client through the faces."""

    by_kind: dict[str, Callable[[int], Awaitable[None]]]

    async def create_stream(self, number: int) -> None: ...

    async def check(self, ledger: StreamLedger) -> None: ...


class FaceOpener(Protocol):
    """The faces of a running server."""

    def calls(self, client: int) -> FaceCalls: ...


class Clients:
    """All clients of one server life."""

    def __init__(self, books: Books, store: StreamStore, faces: FaceOpener | None) -> None:
        self._books = books
        self._store = store
        self._faces = faces

    async def create_stream(self, number: int) -> None:
        """Create one of the initial streams."""
        if self._faces is not None and chance().random() < 0.5:
            await self._faces.calls(0).create_stream(number)
        else:
            await StoreCalls(self._books, self._store, 0).new_stream()

    async def run(self, client: int, operations: Sequence[PlannedCall]) -> None:
        """Make one client's calls in order."""
        calls = dict(StoreCalls(self._books, self._store, client).by_kind)
        if self._faces is not None:
            calls |= self._faces.calls(client).by_kind
        for operation in operations:
            roll_with(operation.seed)
            await asyncio.sleep(operation.pause)
            if self._books.closing:
                return
            self._books.report.calls += 1
            await calls[operation.kind](operation.number)

    async def check_all(self) -> None:
        """Read every stream to its end and compare it with what clients learned."""
        store_calls = StoreCalls(self._books, self._store, 0)
        books = self._books
        for ledger in books.streams.values():
            ledger.lazy = ledger.lazy and not ledger.tail
        for ledger in [ledger for ledger in books.streams.values() if books.exists(ledger)]:
            if not books.exists(ledger):
                continue
            try:
                await store_calls.check(ledger)
            except StreamfoldError as error:  # storage is calm now
                if isinstance(error, NotFoundError) and not books.exists(ledger):
                    continue  # its TTL has passed meanwhile
                raise ViolationError(f"{ledger.name}: cannot be read: {error}") from error
            if self._faces is not None:
                await self._faces.calls(0).check(ledger)


#: Trace lines shown in a violation report.
_STEPS_TOLD = 60
#: Simulated seconds after which a client without an answer counts as stuck.
_PATIENCE = 600.0
#: Operation number that creates the first stream. Client operations have smaller numbers.
_FIRST_STREAM = 1_000_000


def simulate(
    seed: int, *, faces: bool = True, plan: SimulationPlan | None = None
) -> SimulationReport:
    """Run `plan`, or the program of `seed`. Raises ViolationError with the last trace lines."""
    books = Books(SimulationReport(seed))
    with quiet(), seeded(seed, books.now):
        violation = _run(plan or draw_plan(seed, faces=faces), books)
    if violation is not None:
        steps = books.tell(violation, _STEPS_TOLD)
        raise ViolationError("\n  ".join([f"seed {seed}: {violation}", *steps]))
    return books.report


def _run(plan: SimulationPlan, books: Books) -> str | None:
    """Run a program to its end. Return its violation, or None."""
    loop = SimulationLoop()
    books.loop = loop
    try:
        loop.run_until_complete(_Program(plan, books).run())
    except (ViolationError, SimulationStuckError) as error:
        return str(error)
    finally:
        books.report.steps = loop.steps
        loop.bury()
    return None


@cache
def _memory() -> Location:
    return open_location("memory:")


class _Server:
    """One life of a store and its faces, from opening to a stop or crash."""

    def __init__(self, program: _Program, plan: LifePlan) -> None:
        self._program = program
        self._plan = plan
        self.process = SimulatedProcess(chance().getrandbits(32))
        self._ready: asyncio.Future[StreamStore] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self.faces: FaceOpener | None = None
        self.task = self.process.start(self._live())

    async def store(self) -> StreamStore:
        return await asyncio.shield(self._ready)

    async def _open_engine(self) -> SimulatedEngine:
        weather = self._program.weather
        await weather.pass_time()
        if weather.fails("openings failed"):
            raise StorageError("simulated: storage cannot be opened")
        return SimulatedEngine(self._program.storage, weather)

    async def _live(self) -> None:
        program, plan = self._program, self._plan
        location = replace(
            _memory(),
            snapshots=SimulatedBlobs(program.storage, program.weather, "snapshots/"),
            chunks=SimulatedBlobs(program.storage, program.weather, "chunks/"),
        )
        settings = StoreSettings(
            idle_streams=plan.idle_streams,
            upkeep_interval=plan.upkeep_interval,
            trim_grace=0,
            recent_bytes=plan.recent_bytes,
            chunk_file_bytes=plan.chunk_file_bytes,
        )
        try:
            async with open_store(
                location, settings, now=program.books.now, opener=self._open_engine
            ) as store:
                await self._serve(store)
        except StreamfoldError as error:
            if not self._ready.done():
                self._ready.set_exception(error)
                self._ready.exception()

    async def _serve(self, store: StreamStore) -> None:
        if not self._program.plan.faces:
            self._ready.set_result(store)
            await self._stop.wait()
            return
        # Imported late, so that --store-only also works with an older version whose faces do not fit.
        from streamfold.testing.simulation.faces import Faces

        async with Faces(store, self.process, self._program.books, self._plan.drain) as faces:
            self.faces = faces
            self._ready.set_result(store)
            await self._stop.wait()

    async def stop(self) -> None:
        """Stop the server gracefully."""
        self._stop.set()
        await asyncio.wait([self.task], timeout=_PATIENCE)
        if not self.task.done():
            raise ViolationError(f"the server did not stop within {_PATIENCE:g} s")
        if error := self.task.exception():
            raise _unexpected("the server", error)

    def crash(self) -> None:
        """Kill the process between two steps. Storage keeps its contents."""
        self.process.kill()


class _Program:
    def __init__(self, plan: SimulationPlan, books: Books) -> None:
        self.plan = plan
        self.books = books
        self.storage = SimulatedStorage()
        self.weather = Weather(injected=books.report.faults)

    async def run(self) -> None:
        roll_with(self.plan.seed)
        await self._create()
        for life in self.plan.lives:
            roll_with(life.seed)
            await self._live(life)

    async def _create(self) -> None:
        server = await self._open(self.plan.lives[0], calm=True)
        store = await server.store()
        await store.create_basin(BASIN, BasinConfig(create_stream_on_append=True))
        clients = Clients(self.books, store, server.faces)
        for number in range(self.plan.streams):
            await clients.create_stream(_FIRST_STREAM + number)
        # Created by concurrent appends of several clients.
        self.books.open_ledger(StreamLedger(self.books.new_name(), lazy=True))
        await self._end(server, "stop", [])

    async def _live(self, plan: LifePlan) -> None:
        books = self.books
        server = await self._open(plan, calm=False)
        clients = Clients(books, await server.store(), server.faces)
        tasks = [
            server.process.start(clients.run(number, calls))
            for number, calls in enumerate(plan.clients)
            if calls
        ]
        if tasks:
            await self._wait_for(tasks, plan.lasts)
        replacement = None
        if plan.ending == "replace":
            books.note(" -- another server takes over")
            books.report.replacements += 1
            replacement = await self._open(plan, calm=False)
            await self._wait_for(tasks, chance().random())
            await self._end(server, "crash", tasks)
            server, tasks = replacement, []
        await self._end(server, plan.ending, tasks)
        if plan.jump:
            books.jump(plan.jump)
        books.trims.clear()
        await self._account(plan)

    async def _account(self, plan: LifePlan) -> None:
        """Open the store with calm storage and compare all streams with what clients learned."""
        server = await self._open(plan, calm=True)
        clients = Clients(self.books, await server.store(), server.faces)
        check = server.process.start(clients.check_all())
        await self._wait_for([check], _PATIENCE)
        if not check.done():
            raise ViolationError(f"the streams cannot be read within {_PATIENCE:g} s")
        await self._end(server, "stop" if chance().random() < 0.7 else "crash", [])

    async def _open(self, plan: LifePlan, *, calm: bool) -> _Server:
        weather = self.weather
        weather.failures = 0.0 if calm else plan.failures
        weather.slowest = plan.slowest
        while True:
            self.books.note(f" -- open, failures {weather.failures}, slowest {weather.slowest}")
            server = _Server(self, plan)
            try:
                await server.store()
            except StreamfoldError as error:
                self.books.note(f" -- not opened: {error.code}")
                if calm:
                    raise ViolationError(f"the store cannot be opened: {error}") from None
            else:
                return server

    async def _wait_for(self, tasks: list[asyncio.Task[None]], seconds: float | None) -> None:
        """Let clients work for `seconds`, or until done if None. Raises the clients' errors."""
        alive = [task for task in tasks if not task.done()]
        if alive:
            await asyncio.wait(
                alive,
                timeout=_PATIENCE if seconds is None else seconds,
                return_when=asyncio.FIRST_EXCEPTION,
            )
        for task in tasks:
            if task.done() and (error := task.exception()):
                raise _unexpected("a client", error)
        loop = asyncio.get_running_loop()
        if isinstance(loop, SimulationLoop) and loop.errors:
            raise ViolationError(loop.errors[0])
        if seconds is None and not all(task.done() for task in tasks):
            raise ViolationError(f"a client has no answer after {_PATIENCE:g} s")

    async def _end(self, server: _Server, ending: str, tasks: list[asyncio.Task[None]]) -> None:
        report = self.books.report
        if ending == "crash":
            self.books.note(" -- crash")
            report.crashes += 1
            server.crash()
            return
        self.books.note(" -- stop")
        report.stops += 1
        self.books.closing = True
        stopping = asyncio.create_task(server.stop())
        await self._wait_for(tasks, None)
        await stopping
        self.books.closing = False


def _unexpected(who: str, error: BaseException) -> BaseException:
    """Return `error` as a violation. Violations, also in a group, are returned unchanged."""
    if isinstance(error, ViolationError):
        return error
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            if isinstance(violation := _unexpected(who, one), ViolationError):
                return violation
    lines = traceback.format_exception(error)
    return ViolationError(f"{who} failed unexpectedly: {error!r}\n{''.join(lines[-6:])}")


#: Maximum runs per shrinking.
_ATTEMPTS = 400


def shrink(plan: SimulationPlan, attempts: int = _ATTEMPTS) -> tuple[SimulationPlan, str]:
    """Return the smallest violating program found, and its violation.

    Raises ValueError if `plan` itself violates nothing.
    """
    story = _violation(plan)
    if story is None:
        raise ValueError(f"seed {plan.seed} violates nothing")
    size = max(1, len(plan.operations) // 2)
    while attempts > 0:
        smaller = None
        numbers = [operation.number for operation in plan.operations]
        for start in range(0, len(numbers), size):
            attempts -= 1
            candidate = plan.keep({*numbers[:start], *numbers[start + size :]})
            if (told := _violation(candidate)) is not None:
                smaller, story = candidate, told
                break
            if attempts <= 0:
                break
        if smaller is not None:
            plan = smaller
            size = min(size, max(1, len(plan.operations) // 2))
        elif size == 1:
            break
        else:
            size //= 2
    return plan, story


def _violation(plan: SimulationPlan) -> str | None:
    try:
        simulate(plan.seed, plan=plan)
    except ViolationError as violation:
        return str(violation)
    return None
