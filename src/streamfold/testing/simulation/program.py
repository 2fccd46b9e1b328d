"""Runs one program: clients, stops, crashes and failing storage, then an account of everything.

Clients run at the same time on few streams and wait for simulated storage, so that every await of the
store is a place where another client may come in between. A run depends on its seed alone; its trace
lists every call with its outcome. Stores and faces live in processes that are stopped in order, killed
between two steps, or replaced by another one while they run, idle or in the middle of requests.

What these runs cannot see:

- Real threads. Work for a thread runs as one step of the loop, a moment later: nothing else runs
  meanwhile, so races within such work stay unseen.
- Orders that asyncio never has. Callbacks that are ready run first in, first out.
- Code below the doubles: SlateDB and its log, files, sockets, granian, TLS. The adversary and the crash
  tests drive those.
- Two servers at once for longer than a take-over, and more than one client process per server.
- Damage. Blobs may be torn if their write was never acknowledged; stored rows never change.
- Subscriptions, the console, encryption, and bodies beyond some hundred bytes.
"""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import replace
from functools import cache

from streamfold.errors import StorageError, StreamfoldError
from streamfold.model.configs import BasinConfig
from streamfold.store import StoreSettings, StreamStore
from streamfold.store.engine.location import Location, open_location
from streamfold.store.store import open_store
from streamfold.testing.simulation.blobs import SimulatedBlobs
from streamfold.testing.simulation.books import BASIN, Books, SimulationReport
from streamfold.testing.simulation.clients import Clients, FaceOpener
from streamfold.testing.simulation.entropy import quiet, seeded
from streamfold.testing.simulation.ledger import StreamLedger, ViolationError
from streamfold.testing.simulation.loop import (
    SimulatedProcess,
    SimulationLoop,
    SimulationStuckError,
    chance,
    roll_with,
)
from streamfold.testing.simulation.plan import LifePlan, Plan, draw_plan
from streamfold.testing.simulation.storage import SimulatedEngine, SimulatedStorage, Weather

#: Steps that a report of a violation shows.
_STEPS_TOLD = 60
#: Simulated seconds after which a client that waits for an answer waits for ever.
_PATIENCE = 600.0
#: The number under which the first stream is created; operations of clients have smaller ones.
_FIRST_STREAM = 1_000_000


def simulate(seed: int, *, faces: bool = True, plan: Plan | None = None) -> SimulationReport:
    """Run the program of `seed`, or `plan`; ViolationError with the last steps if a promise broke."""
    books = Books(SimulationReport(seed))
    with quiet(), seeded(seed, books.now):
        violation = _run(plan or draw_plan(seed, faces=faces), books)
    if violation is not None:
        steps = books.tell(violation, _STEPS_TOLD)
        raise ViolationError("\n  ".join([f"seed {seed}: {violation}", *steps]))
    return books.report


def _run(plan: Plan, books: Books) -> str | None:
    """Run a program to its end; returns which promise broke, if one did."""
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
    """One life of a store and its faces: from the opening to a stop or a crash."""

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
        # Imported here: an older version may have a store that fits, and other faces.
        from streamfold.testing.simulation.faces import Faces

        async with Faces(store, self.process, self._program.books, self._plan.drain) as faces:
            self.faces = faces
            self._ready.set_result(store)
            await self._stop.wait()

    async def stop(self) -> None:
        """End the server in order."""
        self._stop.set()
        await asyncio.wait([self.task], timeout=_PATIENCE)
        if not self.task.done():
            raise ViolationError(f"the server did not stop within {_PATIENCE:g} s")
        if error := self.task.exception():
            raise _unexpected("the server", error)

    def crash(self) -> None:
        """End the process between two steps; what storage has stays."""
        self.process.kill()


class _Program:
    def __init__(self, plan: Plan, books: Books) -> None:
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
        # Made by appends of several clients at once.
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
        """Open the store with calm storage, and compare everything with what clients were told."""
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
        """Let clients work for so long; raises what they raise."""
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
    """The error as a violation, unless it is one or only stops the run."""
    if isinstance(error, ViolationError):
        return error
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            if isinstance(violation := _unexpected(who, one), ViolationError):
                return violation
    lines = traceback.format_exception(error)
    return ViolationError(f"{who} failed unexpectedly: {error!r}\n{''.join(lines[-6:])}")
