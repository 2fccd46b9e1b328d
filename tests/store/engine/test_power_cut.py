"""A power cut on local disk loses nothing acknowledged, whatever unsynced files become."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from streamfold._native import FaultyDisk
from streamfold.blob import LocalBlobStore
from streamfold.errors import DataCorruptError, DeviceFailedError
from streamfold.model.records import Record
from streamfold.store.engine.engine import EngineOpener, commit_rows
from streamfold.store.engine.local_disk import LocalDisk, sync_path
from streamfold.store.engine.location import CHUNKS, open_location
from streamfold.store.engine.slatedb import SlateEngine, log_reader, open_admin
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore, open_store
from streamfold.testing.hostile_disk import HostileDisk, Mood
from tests.proving import PROVING, seeds
from tests.store.conftest import at_rest
from tests.store.crash.ledger import Event, Ledger, StreamLedger
from tests.store.crash.load import STREAMS, Load, prepare
from tests.store.crash.verify import BASIN, read_all, verify
from tests.store.small_tables import use_small_tables

#: Seeds together cut at every sync when proving, else at one of three.
CUT_EVERY = 3 if PROVING else 9
#: Bytes from which a commit of the load writes a file: about half of them do.
FILE_FROM = 1500
#: Upkeep only when a test asks for it.
NO_UPKEEP = StoreSettings(
    upkeep_interval=3600, trim_grace=0, reclaim_after=3600, chunk_file_bytes=FILE_FROM
)
BUSY_UPKEEP = StoreSettings(
    upkeep_interval=0.05, trim_grace=0, reclaim_after=0.05, chunk_file_bytes=FILE_FROM
)


@pytest.fixture(autouse=True)
def _small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have SlateDB write tables and compact them within seconds, as it does in days of real use."""
    use_small_tables(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def _collect_on_request(no_collections: None) -> None:
    """Stores without upkeep delete no file on their own while a test looks at their files."""


@dataclass
class Machine:
    """A machine that runs a store, and whose power can be cut as often as one likes."""

    folder: Path
    seed: int
    boot: int = 1
    ledger: Ledger = field(default_factory=Ledger)
    engines: list[SlateEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.root.mkdir(parents=True)
        self.disk = hostile_disk(self.root, self.folder / "spare")

    @property
    def root(self) -> Path:
        return self.folder / f"boot-{self.boot}"

    @property
    def store_folder(self) -> Path:
        # The store makes these folders itself, so their names have to be synced, too.
        return self.root / "new" / "deeper" / "store"

    @property
    def database(self) -> Path:
        return self.store_folder / "db"

    def opener(self) -> EngineOpener:
        async def open_engine() -> SlateEngine:
            location = open_location(self.store_folder.as_uri())
            assert location.folder is not None
            disk = LocalDisk(location.folder, sync=self.disk.sync, boot=f"boot-{self.boot}")
            self.engines.append(await SlateEngine.open(location, disk))
            return self.engines[-1]

        return open_engine

    @asynccontextmanager
    async def store(self, settings: StoreSettings = NO_UPKEEP) -> AsyncIterator[StreamStore]:
        location = open_location(self.store_folder.as_uri())
        chunks = LocalBlobStore(self.store_folder / CHUNKS, fsync=self.sync_open_file)
        location = replace(location, chunks=chunks)
        async with open_store(location, settings, opener=self.opener()) as store:
            yield store

    def sync_open_file(self, descriptor: int) -> None:
        self.disk.sync(Path(f"/proc/self/fd/{descriptor}").readlink())

    def report(self, event: Event) -> None:
        with self.disk.frozen():
            self.ledger.apply(event)

    async def prepare(self, store: StreamStore) -> None:
        """Make the streams; from now on they must exist."""
        await prepare(store)
        with self.disk.frozen():
            for stream in STREAMS:
                self.ledger.streams.setdefault(stream, StreamLedger())

    def load(self, store: StreamStore, run: str) -> Load:
        return Load(store, f"boot{self.boot}.{run}", self.seed, self.report)

    async def verify(self, store: StreamStore) -> None:
        for event in await verify(store, self.ledger):
            self.report(event)

    def cut_power(self, name: str, mood: Mood | None = None) -> Machine:
        """The same machine after a power cut at this very moment; this one keeps running."""
        with self.disk.frozen():
            folder = self.folder / name
            image = folder / f"boot-{self.boot + 1}"
            mood = mood or self.dice.choice(list(Mood))
            dice = random.Random(self.dice.random())
            self.disk.cut_power(image, dice, mood)
            ledger = msgspec.json.decode(msgspec.json.encode(self.ledger), type=Ledger)
        return Machine._of_image(folder, self.seed, self.boot + 1, ledger)

    @classmethod
    def _of_image(cls, folder: Path, seed: int, boot: int, ledger: Ledger) -> Machine:
        machine = cls.__new__(cls)
        machine.folder, machine.seed, machine.boot, machine.ledger = folder, seed, boot, ledger
        machine.engines = []
        machine.dice = random.Random(f"{seed}.{folder.name}.{boot}")
        machine.disk = hostile_disk(machine.root, folder / f"spare-{boot}")
        return machine

    async def check_survival(self) -> None:
        """Everything acknowledged is stored, and the store still works: write, restart, read."""
        async with self.store() as store:
            await self.verify(store)
            await self.prepare(store)
            await self.load(store, "after").run(writers=2, batches=3)
            await self.verify(store)
        async with self.store() as store:
            await self.verify(store)


#: The step of `FaultyDisk.turn` that is a sync.
SYNCS = 8
#: What tells the disks of a test what the engine syncs.
_followed: list[FaultyDisk] = []


def hostile_disk(root: Path, spare: Path) -> HostileDisk:
    disk = HostileDisk(root, spare)
    _followed.append(FaultyDisk(root, 1))
    disk.follow(_followed[-1])
    return disk


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[[int], Machine]]:
    yield lambda seed: Machine(tmp_path, seed)
    while _followed:
        _followed.pop().close()


@contextmanager
def cuts_at_syncs(machine: Machine, when: Callable[[int], bool]) -> Iterator[list[Machine]]:
    """Cut the power just before each sync whose number satisfies `when`."""
    images: list[Machine] = []
    numbers = iter(range(1 << 30))

    def cut(path: Path) -> None:
        number = next(numbers)
        if when(number):
            images.append(machine.cut_power(f"sync-{number}-of-{path.name}"))

    machine.disk.on_sync = cut
    try:
        yield images
    finally:
        machine.disk.on_sync = lambda path: None


async def flush_tables(machine: Machine) -> None:
    """Have SlateDB write what it has in memory as a table, and a manifest that names it."""
    await machine.engines[-1].flush()


@pytest.mark.parametrize("seed", range(3))
async def test_a_cut_between_any_two_syncs_loses_nothing(
    machine: Callable[[int], Machine], seed: int
) -> None:
    """From the first opening of a new store through appends, a restore point and a restart."""
    running = machine(seed)
    with cuts_at_syncs(running, lambda number: number % CUT_EVERY == seed) as images:
        for run in ("first", "second"):
            async with running.store() as store:
                await running.prepare(store)
                await running.load(store, run).run(writers=2, batches=4)
                await flush_tables(running)
                await store.upkeep()
    assert len(images) > 30 // CUT_EVERY
    for image in images:
        await image.check_survival()


@pytest.mark.parametrize("mood", list(Mood))
async def test_a_cut_right_after_the_start_loses_nothing(
    machine: Callable[[int], Machine], mood: Mood
) -> None:
    running = machine(1)
    async with running.store() as store:
        await running.cut_power("opened", mood).check_survival()
        await running.prepare(store)
        await running.cut_power("prepared", mood).check_survival()


@pytest.mark.parametrize("mood", list(Mood))
async def test_a_cut_right_after_a_table_was_written_loses_nothing(
    machine: Callable[[int], Machine], mood: Mood
) -> None:
    running = machine(2)
    async with running.store() as store:
        await running.prepare(store)
        for number in range(3):
            await running.load(store, f"{number}").run(batches=5)
            await flush_tables(running)
            assert any((running.database / "compacted").iterdir())
            await running.cut_power(f"flush-{number}", mood).check_survival()


@pytest.mark.parametrize("mood", list(Mood))
async def test_a_cut_after_upkeep_that_deleted_files_loses_nothing(
    machine: Callable[[int], Machine], mood: Mood
) -> None:
    running = machine(3)
    async with running.store() as store:
        await running.prepare(store)
        await at_rest(store)
        for number in range(3):
            await running.load(store, f"{number}").run(batches=5)
            await flush_tables(running)
            make_old(running.database)
            folders = [running.database / name for name in ("wal", "manifest")]
            before = [set(folder.iterdir()) for folder in folders]
            await store.upkeep()
            assert all(
                found - set(folder.iterdir()) for found, folder in zip(before, folders, strict=True)
            )
            await running.cut_power(f"upkeep-{number}", mood).check_survival()
        await running.load(store, "last").run(batches=3)
        await running.cut_power("later", mood).check_survival()


def make_old(database: Path) -> None:
    """Let SlateDB's collector find files that it may delete."""
    for name in ("manifest", "compactions"):
        for path in (database / name).iterdir():
            with suppress(FileNotFoundError):  # the collector may have been quicker
                os.utime(path, (1_700_000_000, 1_700_000_000))


@pytest.mark.parametrize("seed", seeds(1, proving=20))
async def test_cut_after_cut_under_load_loses_nothing(
    machine: Callable[[int], Machine], seed: int
) -> None:
    """Tables, compactions and restore points come as they come; each image is cut again."""
    running = machine(10 + seed)
    for generation in range(4):
        running = await run_until_cut(running, f"g{generation}", running.dice.randrange(20, 150))
    await running.check_survival()


async def run_until_cut(running: Machine, run: str, syncs: int) -> Machine:
    """Put load on the machine, and cut its power before the sync of that number."""
    cut = asyncio.Event()
    loop = asyncio.get_running_loop()

    def due(number: int) -> bool:
        if number == syncs:
            loop.call_soon_threadsafe(cut.set)
        return number == syncs

    with cuts_at_syncs(running, due) as images:
        async with running.store(BUSY_UPKEEP) as store:
            await running.verify(store)
            await running.prepare(store)
            load = running.load(store, run)
            async with asyncio.TaskGroup() as group:
                group.create_task(load.run())
                await cut.wait()
                load.stop()
            await running.verify(store)
    return images[0]


async def rows_of(machine: Machine) -> dict[bytes, bytes]:
    engine = await machine.opener()()
    return {key: value async for page in engine.scan(b"\x00", b"\xff") for key, value in page}


@pytest.mark.parametrize("mood", list(Mood))
@pytest.mark.parametrize("cut", [False, True])
async def test_the_first_opening_settles_what_was_under_way(
    machine: Callable[[int], Machine], mood: Mood, cut: bool
) -> None:
    """A commit whose log file was never synced is there for good, or gone for good."""
    running = machine(9)
    engine = await running.opener()()
    await commit_rows(engine, [(b"1", b"durable")])
    _followed[0].turn(SYNCS, errno.EIO)
    with pytest.raises(DeviceFailedError):
        await commit_rows(engine, [(b"2", b"under way")])
    _followed[0].turn()
    machines = [running, running.cut_power("cut", mood)] if cut else [running]
    shown = await rows_of(machines[-1])
    assert b"1" in shown
    for name in ("again", "and again"):
        machines.append(machines[-1].cut_power(name, mood))
        assert await rows_of(machines[-1]) == shown
        assert await rows_of(machines[-1]) == shown
    for engine in (engine for machine in machines for engine in machine.engines):
        await engine.close(flush=False)


# Upstream defect 19.
@pytest.mark.parametrize("spoilt", ["empty", "gone", "zeros", "short", "wild", "not at all"])
async def test_in_a_log_of_an_earlier_build_no_commit_survives_without_those_before_it(
    machine: Callable[[int], Machine], spoilt: str
) -> None:
    """Two commits were written but not synced: of the second all is kept, of the first what is said."""
    running = machine(8)
    async with running.store() as store:
        await running.prepare(store)
        await store.append(BASIN, STREAMS[0], [Record(b"first")])
        await store.append(BASIN, STREAMS[0], [Record(b"second")])
        image = running.cut_power("cut", Mood.TEARS)
    marker = image.database / "restore-point"
    noted = msgspec.json.decode(marker.read_bytes())
    marker.write_bytes(msgspec.json.encode(noted | {"in_flight": 3}))
    first = sorted((image.database / "wal").glob("*.sst"))[-2]
    whole = first.read_bytes()
    wild = whole[:80] + b"\x01" * 8 + whole[-2:]  # an offset, and the version of the file
    torn = {"zeros": bytes(len(whole)), "short": whole[:99], "wild": wild, "empty": b""}
    first.write_bytes(torn.get(spoilt, whole))
    if spoilt == "gone":
        first.unlink()
    kept = [b"first", b"second"] if spoilt == "not at all" else []
    for added in ([], [b"third"]):
        async with image.store() as store:
            bodies = [record.body for record in await read_all(store, STREAMS[0])]
            assert bodies == kept + added
            await store.append(BASIN, STREAMS[0], [Record(b"third")])


async def test_a_restore_point_that_is_cancelled_is_noted_before_the_next_one(
    tmp_path: Path,
) -> None:
    """Noted later, it would name a manifest that the next one allowed to be deleted."""
    location = open_location(tmp_path.as_uri())
    assert location.folder is not None
    slow, reached, goes_on = threading.Event(), threading.Event(), threading.Event()

    def sync(path: Path) -> None:
        if slow.is_set():
            reached.set()
            goes_on.wait()
        sync_path(path)

    engine = await SlateEngine.open(location, LocalDisk(location.folder, sync=sync))
    await commit_rows(engine, [(b"0", b"value")])
    slow.set()
    first = asyncio.create_task(engine.collect())
    await asyncio.to_thread(reached.wait)
    first.cancel()
    second = asyncio.create_task(engine.collect())
    done, _ = await asyncio.wait([first, second], timeout=0.2)
    assert not done
    goes_on.set()
    await second
    assert first.cancelled()
    noted = msgspec.json.decode((location.folder / "restore-point").read_bytes())["manifest"]
    assert (location.folder / "manifest" / f"{noted:020d}.manifest").exists()
    await engine.close()


async def test_nothing_is_removed_after_a_mere_crash(machine: Callable[[int], Machine]) -> None:
    running = machine(5)
    async with running.store() as store:
        await running.prepare(store)
        await running.load(store, "first").run(batches=5)
        await flush_tables(running)
        await running.load(store, "second").run(batches=5)
        await at_rest(store)
        crashed = running.folder / "crashed"
        shutil.copytree(running.store_folder, crashed)
        ledger = msgspec.json.decode(msgspec.json.encode(running.ledger), type=Ledger)

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in crashed.rglob("*") if path.is_file()}

    before = files()
    location = open_location(crashed.as_uri())
    assert location.folder is not None
    disk = LocalDisk(location.folder, boot="boot-1")
    await disk.repair(open_admin(location), log_reader(location))
    assert {path: content for path, content in files().items() if path in before} == before

    async def open_engine() -> SlateEngine:
        return await SlateEngine.open(location, disk)

    async with open_store(location, NO_UPKEEP, opener=open_engine) as store:
        await verify(store, ledger)


async def test_what_was_written_without_sync_is_not_undone_by_a_restart_of_the_machine(
    tmp_path: Path,
) -> None:
    url = tmp_path.as_uri()

    def boot(name: str) -> EngineOpener:
        async def open_engine() -> SlateEngine:
            location = open_location(url)
            assert location.folder is not None
            return await SlateEngine.open(location, LocalDisk(location.folder, boot=name))

        return open_engine

    async with open_store(url, NO_UPKEEP, opener=boot("boot-1")) as store:
        await prepare(store)
        await store.append(BASIN, STREAMS[0], [Record(b"synced")])
    async with open_store(url, StoreSettings(fsync=False)) as store:
        await store.append(BASIN, STREAMS[0], [Record(b"not synced")])
    for path in (tmp_path / "db" / "wal").iterdir():
        path.unlink()  # as SlateDB's own collector may, for all of it is in a table
    async with open_store(url, NO_UPKEEP, opener=boot("boot-2")) as store:
        bodies = [record.body for record in await read_all(store, STREAMS[0])]
        assert bodies == [b"synced", b"not synced"]


@pytest.mark.parametrize("damage", ["manifest", "marker"])
async def test_a_store_without_its_restore_point_is_not_opened_as_another_one(
    machine: Callable[[int], Machine], damage: str
) -> None:
    running = machine(7)
    async with running.store() as store:
        await running.prepare(store)
    running = running.cut_power("cut", Mood.MIXES)
    marker = running.database / "restore-point"
    if damage == "marker":
        marker.write_bytes(b"")
    else:
        manifest = msgspec.json.decode(marker.read_bytes())["manifest"]
        (running.database / "manifest" / f"{manifest:020d}.manifest").unlink()
    with pytest.raises(DataCorruptError, match=r"restore-point|backup"):
        async with running.store():
            pass
