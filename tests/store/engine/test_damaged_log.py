"""On local disk, damage to acknowledged records is refused by name, and only an operator accepts it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from streamfold.errors import DataCorruptError
from streamfold.model.records import Record
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import _build
from streamfold.store.engine.slatedb_clock import system_time
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore, open_store
from tests.store.conftest import at_rest
from tests.store.crash.verify import BASIN, read_all

STREAM = "orders"
#: Upkeep only when a test asks for it; every append is large enough for a file.
SETTINGS = StoreSettings(upkeep_interval=3600, reclaim_after=3600, chunk_file_bytes=1)
#: Commits of a test: each writes one log file.
COMMITS = 12


async def append(store: StreamStore, *numbers: int) -> None:
    for number in numbers:
        await store.append(BASIN, STREAM, [Record(b"%d" % number)])


async def bodies(folder: Path, *, accept_loss: int | None = None) -> list[int]:
    async with open_store(folder.as_uri(), SETTINGS, accept_loss=accept_loss) as store:
        return [int(record.body) for record in await read_all(store, STREAM)]


@pytest.fixture
async def crashed(tmp_path: Path, no_collections: None) -> Path:
    """The folder of a store whose process was killed after acknowledged appends."""
    running, crashed = tmp_path / "running", tmp_path / "crashed"
    async with open_store(running.as_uri(), SETTINGS) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        await append(store, *range(COMMITS))
        await at_rest(store)  # or the first pass changes files while they are copied
        shutil.copytree(running, crashed)
    return crashed


def log_files(folder: Path) -> list[Path]:
    return sorted((folder / "db" / "wal").iterdir())


def reboot(folder: Path) -> None:
    """As if the machine had gone down since the store was last in use."""
    marker = folder / "db" / "restore-point"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"boot": "another boot"}))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[30:38] = bytes(byte ^ 0xFF for byte in content[30:38])
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "short": lambda path: path.write_bytes(path.read_bytes()[:99]),
    "tiny": lambda path: path.write_bytes(path.read_bytes()[:7]),  # SlateDB takes it for empty
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}


def content(folder: Path) -> dict[Path, bytes]:
    """All files of the store but those of locks."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {path: path.read_bytes() for path in files}


# Upstream defect 20.
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("rebooted", [True, False])
async def test_a_damaged_log_file_in_the_middle_is_refused_by_name_and_nothing_is_changed(
    crashed: Path, damage: str, rebooted: bool
) -> None:
    if rebooted:
        reboot(crashed)
    damaged = log_files(crashed)[-6]
    DAMAGES[damage](damaged)
    before = content(crashed)
    with pytest.raises(DataCorruptError, match=rf"{damaged}.*backup.*--accept-loss") as refusal:
        await bodies(crashed)
    assert f"--accept-loss {int(damaged.stem)} " in str(refusal.value)
    after = content(crashed)
    assert {path: after.get(path) for path in before} == before


@pytest.mark.parametrize("damage", ["flipped", "tiny", "empty", "gone"])
async def test_a_log_of_an_earlier_build_may_end_in_files_that_were_never_acknowledged(
    crashed: Path, damage: str
) -> None:
    """Two commits and one write of the reclaimer: the fourth from the end was synced."""
    reboot(crashed)
    note_in_flight(crashed, 3)
    fourth, third = log_files(crashed)[-4:-2]
    kept = fourth.read_bytes()
    DAMAGES[damage](fourth)
    with pytest.raises(DataCorruptError, match=fourth.name):
        await bodies(crashed)
    fourth.write_bytes(kept)
    DAMAGES[damage](third)
    assert await bodies(crashed) == list(range(COMMITS - 3))


@pytest.mark.parametrize("damage", ["flipped", "tiny"])
async def test_a_power_cut_explains_no_damage(crashed: Path, damage: str) -> None:
    reboot(crashed)
    last = log_files(crashed)[-1]
    DAMAGES[damage](last)
    with pytest.raises(DataCorruptError, match=last.name):
        await bodies(crashed)


def note_in_flight(folder: Path, files: int) -> None:
    marker = folder / "db" / "restore-point"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"in_flight": files}))


@pytest.mark.parametrize("rebooted", [True, False])
async def test_an_accepted_loss_is_told_in_full_and_the_files_are_kept(
    crashed: Path, rebooted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if rebooted:
        reboot(crashed)
    damaged, *following = log_files(crashed)[-6:]
    flip(damaged)
    files = [damaged, *following]
    dropped = {path.name: path.read_bytes() for path in files}
    chunk_files = content(crashed / "chunks")
    with pytest.raises(DataCorruptError, match=damaged.name):
        await bodies(crashed, accept_loss=int(damaged.stem) + 1)  # of another file
    with caplog.at_level(logging.WARNING):
        stored = await bodies(crashed, accept_loss=int(damaged.stem))
    assert stored == list(range(COMMITS - 6))
    for path in files:
        assert f"{path}, with {len(dropped[path.name])} bytes, is dropped" in caplog.text
    assert f"what log file {damaged} held is unknown" in caplog.text
    assert (
        f"dropped: records {COMMITS - 5} to {COMMITS - 1} of stream {BASIN}/{STREAM}" in caplog.text
    )
    aside = {path.name: path.read_bytes() for path in (crashed / "db" / "set-aside").rglob("*.sst")}
    assert aside == dropped
    assert content(crashed / "chunks") == chunk_files
    # The store works: appends, openings, power cuts.
    async with open_store(crashed.as_uri(), SETTINGS) as store:
        await append(store, 100, 101)
    reboot(crashed)
    assert await bodies(crashed) == [*range(COMMITS - 6), 100, 101]


async def test_a_loss_before_the_last_synced_file_can_be_accepted(tmp_path: Path) -> None:
    """After a clean stop, the restore point knows all log files as synced."""
    async with open_store(tmp_path.as_uri(), SETTINGS) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        await append(store, *range(3))
    async with open_store(tmp_path.as_uri(), SETTINGS) as store:
        await append(store, *range(3, 7))
        await store.upkeep()
        await append(store, 7, 8)
    reboot(tmp_path)
    damaged = log_files(tmp_path)[-4]
    flip(damaged)
    with pytest.raises(DataCorruptError, match=f"--accept-loss {int(damaged.stem)}"):
        await bodies(tmp_path)
    kept = await bodies(tmp_path, accept_loss=int(damaged.stem))
    assert kept == list(range(len(kept)))
    assert len(kept) < 9
    for number in range(2):
        async with open_store(tmp_path.as_uri(), SETTINGS) as store:
            await append(store, 100 + number)
        reboot(tmp_path)
    assert await bodies(tmp_path) == [*kept, 100, 101]


async def test_damage_after_a_clean_stop_is_damage_also_to_the_last_file(tmp_path: Path) -> None:
    async with open_store(tmp_path.as_uri(), SETTINGS) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        await append(store, *range(3))
    reboot(tmp_path)
    last = log_files(tmp_path)[-1]
    flip(last)
    with pytest.raises(DataCorruptError, match=last.name):
        await bodies(tmp_path)


@pytest.mark.parametrize("damage", ["empty", "tiny", "flipped"])
async def test_damage_to_the_last_log_file_is_refused_after_a_mere_crash(
    crashed: Path, damage: str
) -> None:
    last = log_files(crashed)[-1]
    DAMAGES[damage](last)
    with pytest.raises(DataCorruptError, match=last.name):
        await bodies(crashed)


async def test_the_marks_of_openings_that_never_got_to_write_are_no_damage(crashed: Path) -> None:
    """SlateDB was opened, and killed before the opening was noted, several times."""
    await leave_marks(crashed, 3)
    assert [path.stat().st_size for path in log_files(crashed)[-3:]] == [0, 0, 0]
    assert await bodies(crashed) == list(range(COMMITS))


async def test_an_empty_file_more_than_there_were_openings_is_damage(crashed: Path) -> None:
    last = log_files(crashed)[-1]
    await leave_marks(crashed, 2)
    last.write_bytes(b"")
    with pytest.raises(DataCorruptError, match=f"{last} is empty"):
        await bodies(crashed)


async def leave_marks(folder: Path, count: int) -> None:
    for _ in range(count):
        database, _, _ = await _build(open_location(folder.as_uri()), system_time, synced=True)
        await database.close(flush=False)


async def test_a_store_of_an_earlier_build_opens_with_the_marks_of_its_openings(
    crashed: Path,
) -> None:
    """Earlier builds noted neither marks nor openings."""
    marker = crashed / "db" / "restore-point"
    noted = json.loads(marker.read_text())
    marker.write_text(json.dumps({name: noted[name] for name in ("boot", "manifest", "wal")}))
    await leave_marks(crashed, 1)
    assert await bodies(crashed) == list(range(COMMITS))
    assert await bodies(crashed) == list(range(COMMITS))


async def test_files_that_were_set_aside_are_never_replaced(crashed: Path) -> None:
    """After a loss the same numbers come again, and may be set aside again."""
    former, last = log_files(crashed)[-2:]
    contents = []
    for damaged in (former, last):
        reboot(crashed)
        flip(damaged)
        contents.append(last.read_bytes())
        loss = int(damaged.stem)
        async with open_store(crashed.as_uri(), SETTINGS, accept_loss=loss) as store:
            while not last.exists():
                await append(store, COMMITS)
    aside = [path.read_bytes() for path in (crashed / "db" / "set-aside").rglob(last.name)]
    assert sorted(aside) == sorted(contents)


@pytest.mark.parametrize(
    "marker",
    [
        "{}",
        "",
        "null",
        "[1]",
        '{"boot": 7, "manifest": 1, "wal": 1}',
        '{"boot": "b", "manifest": "1", "wal": 1}',
        '{"boot": "b", "manifest": 1, "wal": -1}',
        '{"boot": "b", "manifest": 1, "wal": 1, "marks": 3}',
        "\x00\x00\x00",
    ],
)
async def test_a_damaged_restore_point_is_refused_in_one_sentence(
    crashed: Path, marker: str
) -> None:
    path = crashed / "db" / "restore-point"
    path.write_text(marker)
    with pytest.raises(DataCorruptError, match=rf"{path} is damaged \(.*\): restore .* backup"):
        await bodies(crashed)
    assert path.read_text() == marker


@pytest.mark.parametrize("damage", ["gone", "zeros"])
async def test_a_damaged_manifest_of_the_restore_point_is_named(crashed: Path, damage: str) -> None:
    reboot(crashed)
    number = json.loads((crashed / "db" / "restore-point").read_text())["manifest"]
    DAMAGES[damage](crashed / "db" / "manifest" / f"{number:020d}.manifest")
    with pytest.raises(DataCorruptError, match=f"needs manifest {number} .* backup"):
        await bodies(crashed)
