"""Three servers and one storage in simulated time: the model of the lease.

The servers run the real `LeaseKeeper`. Storage is a dictionary whose requests wait until somebody
decides what becomes of each: done, refused, done without an answer, or done much later although its
sender was told that the outcome is unknown. Servers are paused, killed, stopped and started; their
clocks run at different speeds; the lease is deleted and overwritten. SlateDB is an epoch: opening the
store takes the next one, and a commit needs the current one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from streamfold.blob import DEFAULT_CHUNK_SIZE, BlobChangedError, BlobMeta, BlobStore
from streamfold.cluster import LeaseKeeper, LeaseOwner
from streamfold.cluster.lease import KEY
from streamfold.errors import (
    BlobExistsError,
    BlobNotFoundError,
    BlobOutcomeUnknownError,
    BlobUnavailableError,
    FormatUnsupportedError,
    LeaseLostError,
    NotActiveError,
    StorageError,
    WriterFencedError,
)

EXPIRY = 8.0
#: Each clock runs this much faster than storage's.
RATES = (1.0, 1.05, 0.95)
#: An object that only a store that was opened has.
MANIFEST = "manifest"


@dataclass
class StorageRequest:
    """A request whose fate is open."""

    server: SimulatedServer
    effect: Callable[[], Any]
    writes: bool
    answer: asyncio.Future[Any]


@dataclass
class Storage:
    """Objects with etags and times, the database's epoch, and the requests that wait."""

    time: float = 1000.0
    objects: dict[str, tuple[bytes, str, float]] = field(default_factory=dict)
    epoch: int = 0
    #: Every commit: its epoch and its server.
    log: list[tuple[int, str]] = field(default_factory=list)
    waiting: list[StorageRequest] = field(default_factory=list)
    #: Effects that are still on their way, although nobody waits for an answer.
    late: list[Callable[[], Any]] = field(default_factory=list)
    etags: itertools.count[int] = field(default_factory=itertools.count)

    def put(self, key: str, data: bytes) -> str:
        etag = f"v{next(self.etags)}"
        self.objects[key] = data, etag, self.time
        return etag

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        current = self.objects.get(key)
        if etag is None and current is not None:
            raise BlobExistsError(key)
        if etag is not None and current is None:
            raise BlobNotFoundError(key)
        if etag is not None and current is not None and current[1] != etag:
            raise BlobChangedError(key)
        return self.put(key, data)

    def get(self, key: str) -> tuple[bytes, str, float]:
        if key not in self.objects:
            raise BlobNotFoundError(key)
        return self.objects[key]

    def open(self) -> int:
        self.epoch += 1
        self.put(MANIFEST, b"%d" % self.epoch)
        return self.epoch

    def commit(self, epoch: int, server: str) -> None:
        if epoch != self.epoch:
            raise WriterFencedError
        self.log.append((epoch, server))


class SimulatedBlobs(BlobStore):
    """The database's folder as one server reaches it."""

    def __init__(self, server: SimulatedServer) -> None:
        self._server, self._storage = server, server.storage

    async def put(self, key: str, data: bytes | AsyncIterator[bytes]) -> None:
        assert isinstance(data, bytes)
        await self._server.ask(lambda: self._storage.put(key, data))

    async def put_if_absent(self, key: str, data: bytes) -> str:
        etag: str = await self._server.ask(lambda: self._storage.put_if(key, data, None))
        return etag

    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        new: str = await self._server.ask(lambda: self._storage.put_if(key, data, etag))
        return new

    async def get_with_etag(self, key: str) -> tuple[bytes, str]:
        data, etag, _ = await self._server.ask(lambda: self._storage.get(key), writes=False)
        return data, etag

    async def head(self, key: str) -> BlobMeta:
        data, etag, at = await self._server.ask(lambda: self._storage.get(key), writes=False)
        # S3 cuts to seconds.
        return BlobMeta(key, len(data), etag, datetime.fromtimestamp(int(at), UTC))

    async def list(self, prefix: str = "") -> AsyncIterator[BlobMeta]:
        keys = await self._server.ask(lambda: sorted(self._storage.objects), writes=False)
        for key in keys:
            yield BlobMeta(key, 0, None, datetime.fromtimestamp(0, UTC) + timedelta())

    async def get(self, key: str) -> bytes:
        raise NotImplementedError

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        raise NotImplementedError

    def stream(self, key: str, chunk_size: int = DEFAULT_CHUNK_SIZE) -> AsyncIterator[bytes]:
        raise NotImplementedError

    async def delete(self, key: str) -> None:
        raise NotImplementedError


class SimulatedServer:
    """One start of a server, until it stops or is killed."""

    def __init__(self, storage: Storage, name: str, rate: float, *, take_over: bool) -> None:
        self.storage, self.name, self._rate = storage, name, rate
        self.paused = self.killed = False
        #: What becomes of its requests; None = they wait. "slow" = they work at once, and their answers
        #: come when the fate changes.
        self._fate: str | None = "done"
        self._slow: list[Callable[[], None]] = []
        self._stopping = asyncio.Event()
        #: Local times at which the process wakes.
        self._sleeps: list[tuple[float, asyncio.Future[None]]] = []
        #: Answers that arrived while it was paused.
        self._unread: list[Callable[[], None]] = []
        self.keeper = LeaseKeeper(
            SimulatedBlobs(self), LeaseOwner(name, name, 1), EXPIRY, self.clock, self.sleep
        )
        #: The epoch of the open store.
        self.epoch: int | None = None
        self._reopened = False
        self.acknowledged = 0
        self.task = asyncio.get_running_loop().create_task(self._run(take_over))

    def clock(self) -> float:
        return self.storage.time * self._rate

    async def sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleeps.append((self.clock() + seconds, woken))
        await woken

    async def ask(self, effect: Callable[[], Any], *, writes: bool = True) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.storage.waiting.append(StorageRequest(self, effect, writes, answer))
        return await answer

    @property
    def fate(self) -> str | None:
        return self._fate

    @fate.setter
    def fate(self, fate: str | None) -> None:
        self._fate = fate
        self._unread += self._slow
        self._slow.clear()

    @property
    def running(self) -> bool:
        return not self.killed and not self.task.done()

    @property
    def trusted(self) -> bool:
        """Whether it would answer a request now."""
        if self.killed or self.task.done():
            return False
        try:
            self.keeper.check()
        except NotActiveError:
            return False
        return True

    @property
    def serving(self) -> bool:
        return self.trusted and self.epoch is not None

    # Its life

    async def _run(self, take_over: bool) -> None:
        with contextlib.suppress(StorageError):  # storage refused its first request
            await self.keeper.acquire(take_over=take_over, on_standby=lambda _: None)
            async with self.keeper.renewing():
                opening = asyncio.create_task(self._open())
                stopping = asyncio.create_task(self._stopping.wait())
                lost = asyncio.create_task(self.keeper.lost())
                ends = {stopping, lost}
                await asyncio.wait({opening, *ends}, return_when=asyncio.FIRST_COMPLETED)
                if opening.done() and opening.result():
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                self.epoch = None
                for task in (opening, *ends):
                    task.cancel()
                await asyncio.wait({opening, *ends})

    async def _open(self) -> bool:
        """Open the store; False if another server has the lease by then."""
        while True:
            try:
                await self.keeper.confirm()
                epoch = await self.ask(self.storage.open)
                await self.keeper.confirm()
            except LeaseLostError:
                return False
            except (StorageError, BlobUnavailableError, BlobOutcomeUnknownError):
                await self.sleep(0.5)
            else:
                self.epoch = epoch
                return True

    async def append(self) -> None:
        """Append a record, as a client asks for it; it counts once it is acknowledged."""
        try:
            self.keeper.check()
            epoch = self.epoch
            if epoch is None:
                return
            await self.ask(lambda: self.storage.commit(epoch, self.name))
            self.acknowledged += 1
        except WriterFencedError:
            await self._fenced()
        except (NotActiveError, BlobUnavailableError, BlobOutcomeUnknownError):
            return

    async def _fenced(self) -> None:
        """Open the store again if the lease is this server's: the other one was replaced before."""
        self.epoch = None
        if self._reopened or not await self._open():
            self.stop()
        self._reopened = True

    def stop(self) -> None:
        self._stopping.set()
        if self.epoch is None:
            self.task.cancel()

    # What happens to it

    def kill(self) -> None:
        self.killed = True

    def wake(self) -> None:
        """Let sleeps end whose time has come, and read answers, unless the process is paused."""
        if self.paused or self.killed:
            return
        for deliver in self._unread:
            deliver()
        self._unread.clear()
        due = [woken for at, woken in self._sleeps if at <= self.clock()]
        self._sleeps = [(at, woken) for at, woken in self._sleeps if at > self.clock()]
        for woken in due:
            if not woken.done():
                woken.set_result(None)

    def deliver(
        self, answer: asyncio.Future[Any], value: Any, error: Exception | None, *, slow: bool
    ) -> None:
        def settle() -> None:
            if answer.done():  # nobody waits any more
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)

        (self._slow if slow else self._unread).append(settle)


class Cluster:
    """The storage and the servers, and a loop that runs them step by step."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.storage = Storage()
        self.servers: dict[int, SimulatedServer] = {}
        self.old: list[SimulatedServer] = []
        self._starts = itertools.count()
        self._appends: set[asyncio.Task[None]] = set()
        #: Whether a server was started with `--take-over`.
        self.taken_over = False

    def start(self, number: int, *, take_over: bool = False) -> None:
        async def begin() -> SimulatedServer:
            name = f"server {number}, start {next(self._starts)}"
            return SimulatedServer(self.storage, name, RATES[number], take_over=take_over)

        self.taken_over = self.taken_over or take_over
        if number in self.servers:
            self.old.append(self.servers[number])
        self.servers[number] = self.loop.run_until_complete(begin())
        self.run()

    def append(self, number: int) -> None:
        server = self.servers[number]
        if server.running and not server.paused:
            self._appends.add(self.loop.create_task(server.append()))
            self.run()

    def run(self) -> None:
        """Let every server that is not paused do what it can."""

        async def turns() -> None:
            for _ in range(6):
                for server in self.servers.values():
                    server.wake()
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        self._check()
        for task in {task for task in self._appends if task.done()}:
            self._appends.remove(task)
            task.result()
        for server in (*self.old, *self.servers.values()):
            done = server.task.done() and not server.task.cancelled()
            if done and (error := server.task.exception()) is not None:
                # A server refuses to start, or stops, at the lease of a newer version.
                assert isinstance(error, FormatUnsupportedError), error

    def _check(self) -> None:
        """At most one server answers, and every acknowledged record is stored, in order."""
        servers = (*self.servers.values(), *self.old)
        trusted = [server.name for server in servers if server.trusted]
        assert len(trusted) <= 1 or self.taken_over, trusted
        log = self.storage.log
        assert log == sorted(log, key=lambda entry: entry[0])
        for server in servers:
            stored = sum(name == server.name for _, name in log)
            assert server.acknowledged <= stored

    def pass_time(self, seconds: float) -> None:
        self.storage.time += seconds
        self.run()

    def answer(self, request: StorageRequest, fate: str) -> None:
        """Decide what becomes of a request."""
        self.storage.waiting.remove(request)
        value: Any = None
        error: Exception | None = None
        if fate in ("done", "slow", "answer lost"):
            try:
                value = request.effect()
            except (BlobChangedError, BlobExistsError, BlobNotFoundError, WriterFencedError) as no:
                error = no
        elif fate == "late" and request.writes:
            self.storage.late.append(request.effect)
        if fate not in ("done", "slow"):
            unknown = request.writes and fate != "refused"
            error = _unknown() if unknown else _unavailable()
        if not request.server.killed:
            request.server.deliver(request.answer, value, error, slow=fate == "slow")
        self.run()

    def arrive(self, effect: Callable[[], Any]) -> None:
        """Let an effect happen of which nobody waits for the answer."""
        self.storage.late.remove(effect)
        with contextlib.suppress(
            BlobChangedError, BlobExistsError, BlobNotFoundError, WriterFencedError
        ):
            effect()
        self.run()

    def damage_lease(self, data: bytes | None) -> None:
        if MANIFEST not in self.storage.objects:
            return  # nobody has a store to lose
        if data is None:
            self.storage.objects.pop(KEY, None)
        else:
            self.storage.put(KEY, data)

    def settle(self) -> None:
        """Let nothing fail any more, for long enough that one server is active."""
        for server in self.servers.values():
            server.paused, server.fate = False, "done"
        for effect in tuple(self.storage.late):
            self.arrive(effect)
        self.live(20.0)

    def live(self, seconds: float) -> None:
        """Let time pass in small steps, and requests meet the fate of their server."""
        for _ in range(int(seconds * 2)):
            self.pass_time(0.5)
            for _ in range(6):
                for request in tuple(self.storage.waiting):
                    if request.server.fate is not None:
                        self.answer(request, request.server.fate)

    def check_progress(self) -> None:
        """After faults have ended, one of the servers that run is active."""
        self.settle()
        running = [server for server in self.servers.values() if server.running]
        serving = [server.name for server in running if server.serving]
        assert len(serving) == min(1, len(running)), (serving, len(running))

    def close(self) -> None:
        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            while tasks := {task for task in tasks if not task.done()}:
                for task in tasks:  # a server that is cancelled still tries to give its lease up
                    task.cancel()
                await asyncio.wait(tasks, timeout=0)

        self.loop.run_until_complete(end())
        self.loop.close()


def _unknown() -> BlobOutcomeUnknownError:
    return BlobOutcomeUnknownError("no answer")


def _unavailable() -> BlobUnavailableError:
    error = BlobUnavailableError("no connection")
    error.transient = True
    return error
